"""STANDALONE: a smaller language model drafts a chain or an EAGLE-2 tree (Leviathan et al. 2023; the tree of Li et al. 2024,
section 4). Its vocabulary is the target's, or nearly so (`CommonVocabulary`), or another one (`PairedVocabulary`)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ConfigError, ModelConfig, SpecConfig, resolve_tree
from jaxspec.drafters.base import Drafter, Proposal, RoundContext
from jaxspec.drafters.standalone.vocabulary import (
    PAIRS,
    CommonVocabulary,
    PairedVocabulary,
    common_vocabulary,
    paired_vocabulary,
)
from jaxspec.kvcache import LayerKV, init_layers
from jaxspec.models import decoder
from jaxspec.models.paged import paged_forward
from jaxspec.trees.tree import grow
from pallas_kernels.vocabulary.api import top_k_probabilities


class StandaloneState(NamedTuple):
    """The draft model's pools, which share the target's page table, and its last hidden state at the bonus token.

    The draft's cache covers the bonus token as well: one position more than the target's.
    """

    layers: tuple[LayerKV, ...]
    hidden: Float[Array, "B E"]


@dataclasses.dataclass(frozen=True)
class StandaloneDrafter(Drafter):
    """Drafts with the model `draft`; num_steps levels, topk beams, num_draft_tokens nodes with the root.

    `vocabulary` says which ids are drafted and what they are for the other model, None: all of them, and the same.
    """

    draft: ModelConfig
    num_steps: int
    topk: int
    num_draft_tokens: int
    vocabulary: CommonVocabulary | PairedVocabulary | None = None
    name: ClassVar[str] = "STANDALONE"

    @property
    def lookahead(self) -> int:
        """The token behind the prompt is fed too: its logits are the first level of the first tree."""
        return 1

    @property
    def slack(self) -> int:
        """The tree's nodes; the draft's beams lie behind the bonus token."""
        return max(self.num_draft_tokens, 1 + self.topk * (self.num_steps - 1)) + 1

    @property
    def max_accept(self) -> int:
        """A full path and the bonus token."""
        return self.num_steps + 1

    def init(self, params, batch: int, num_pages: int, page_size: int, max_len: int, dtype) -> StandaloneState:
        """Empty pools; the hidden state has the draft's own type."""
        del max_len
        c = self.draft
        layers = init_layers(c.num_layers, num_pages, page_size, c.num_kv_heads, c.key_head_dim, c.value_head_dim, dtype)
        return StandaloneState(layers, jnp.zeros((batch, c.hidden_size), params["embedder"]["embedding"].dtype))

    def prefill(self, params, state, ctx: RoundContext, tokens, following, features, n_valid) -> StandaloneState:
        """Feeds the chunk and the token behind it, which the next chunk feeds again, with the same result.

        Where the text goes on in another row of this program, that row feeds it and this one does not.
        """
        del features
        order = jnp.arange(tokens.shape[1] + 1)[None]
        rows = jnp.where(order < n_valid[:, None], jnp.pad(tokens, ((0, 0), (0, 1))), following[:, :1])
        ends = n_valid > 0 if ctx.continued is None else (n_valid > 0) & ~ctx.continued
        return self.feed(params, state, ctx, ctx.cache.length, rows, n_valid + ends)

    def update(self, params, state, ctx: RoundContext, accepted, features, n_accepted) -> StandaloneState:
        """Feeds what was emitted, behind the old bonus token."""
        del features
        return self.feed(params, state, ctx, ctx.cache.length + 1, accepted, n_accepted)

    def feed(
        self, params, state: StandaloneState, ctx: RoundContext, base: Int[Array, " B"], tokens: Int[Array, "B T"], count
    ) -> StandaloneState:
        """Runs `count` tokens behind the first `base` ones and keeps the hidden state of the last."""
        batch, T = tokens.shape
        positions = base[:, None] + jnp.arange(T)
        valid = jnp.arange(T)[None] < count[:, None]
        out = paged_forward(
            params,
            self.draft,
            self.embed(params, tokens),
            state.layers,
            ctx.cache.page_table,
            base,
            positions,
            valid,
            fresh=ctx.fresh,
        )
        last = jnp.maximum(count - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(out.hidden, last, 1)[:, 0]
        return StandaloneState(out.layers, jnp.where((count > 0)[:, None], hidden, state.hidden))

    def embed(self, params, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """The draft's embeddings of the target's ids."""
        if self.vocabulary is not None:
            tokens = self.vocabulary.as_draft_ids(params, tokens)
        return decoder.embed(params, self.draft, tokens)

    def best(self, params, hidden: Float[Array, "*R E"]) -> tuple[Array, Array]:
        """The k most probable continuations as the target's ids (temperature 1, as SGLang drafts)."""
        logits = decoder.unembed(params, self.draft, hidden)
        if self.vocabulary is None:
            return top_k_probabilities(logits, self.topk)
        probs, ids = top_k_probabilities(self.vocabulary.restrict(params, logits), self.topk)
        return probs, self.vocabulary.as_target_ids(params, ids)

    def propose(self, params, state: StandaloneState, ctx: RoundContext) -> Proposal:
        """Grows the tree; the beams' KV lies behind the bonus token and is overwritten by `update`."""
        base, k = ctx.cache.length + 1, self.topk
        batch = base.shape[0]

        def expand(level: int, tokens, parent, visible, layers: Any):
            del parent
            entries = base[:, None] + jnp.arange((level + 1) * k)[None] // k
            out = paged_forward(
                params,
                self.draft,
                self.embed(params, tokens),
                layers,
                ctx.cache.page_table,
                base,
                jnp.broadcast_to(base[:, None] + level, (batch, k)),
                jnp.broadcast_to(ctx.active[:, None], (batch, k)),
                inflight_positions=entries,
                visible=visible,
            )
            probs, ids = self.best(params, out.hidden)
            return probs, ids, out.layers

        probs, ids = self.best(params, state.hidden)
        tree, layers = grow(
            ctx.bonus,
            probs,
            ids,
            expand,
            state.layers,
            num_steps=self.num_steps,
            topk=k,
            num_draft_tokens=self.num_draft_tokens,
        )
        return self.proposal(tree, state._replace(layers=layers), ctx)


def resolve(spec: SpecConfig, config: ModelConfig, draft) -> SpecConfig:
    """num_steps/topk/num_draft_tokens 3/1/4 unless all three are given."""
    del config, draft
    return resolve_tree(spec, (3, 1, 4), "STANDALONE")


def build(target, draft, spec: SpecConfig) -> tuple[StandaloneDrafter, dict]:
    """The drafter for a draft model, whose vocabulary must be the target's, but for padding and a few added tokens, unless
    tokens are paired as strings (`StandaloneOptions`).

    Drafts come from what both have; the target may emit any.

    Raises:
      ConfigError: the vocabularies differ by more (`common_vocabulary`), or topk is larger than what they have in common.
    """
    tree = draft.tree
    if spec.options.pairing == "strings":
        vocabulary, maps = paired_vocabulary(target, draft)
        tree = {**tree, PAIRS: maps}
    else:
        vocabulary = common_vocabulary(target, draft)
    if vocabulary is not None and len(vocabulary) < spec.topk:
        raise ConfigError(f"topk={spec.topk} is more than the {len(vocabulary)} tokens that target and draft have in common")
    drafter = StandaloneDrafter(
        draft=draft.config,
        num_steps=spec.num_steps,
        topk=spec.topk,
        num_draft_tokens=spec.num_draft_tokens,
        vocabulary=vocabulary,
    )
    return drafter, tree
