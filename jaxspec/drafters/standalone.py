"""STANDALONE: a smaller language model with the target's vocabulary drafts a chain or an EAGLE-2 tree
(Leviathan et al. 2023; the tree of Li et al. 2024, section 4)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ConfigError, ModelConfig, SpecConfig, resolve_tree
from jaxspec.drafters.base import Drafter, Proposal, RoundContext
from jaxspec.kvcache import LayerKV, init_layers
from jaxspec.models import decoder
from jaxspec.models.paged import paged_forward
from jaxspec.tree import grow, top_k_probabilities


class StandaloneState(NamedTuple):
    """The draft model's pools, which share the target's page table, and its best continuations of the bonus token.

    The draft's cache covers the bonus token as well: one position more than the target's.
    """

    layers: tuple[LayerKV, ...]
    probs: Float[Array, "B k"]
    tokens: Int[Array, "B k"]


@dataclasses.dataclass(frozen=True)
class StandaloneDrafter(Drafter):
    """Drafts with the model `draft`; num_steps levels, topk beams, num_draft_tokens nodes with the root."""

    draft: ModelConfig
    num_steps: int
    topk: int
    num_draft_tokens: int
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
        """Empty pools."""
        del params, max_len
        c = self.draft
        layers = init_layers(c.num_layers, num_pages, page_size, c.num_kv_heads, c.key_head_dim, c.value_head_dim, dtype)
        return StandaloneState(layers, jnp.zeros((batch, self.topk)), jnp.zeros((batch, self.topk), jnp.int32))

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
        """Runs `count` tokens behind the first `base` ones and keeps the best continuations of the last."""
        batch, T = tokens.shape
        positions = base[:, None] + jnp.arange(T)
        valid = jnp.arange(T)[None] < count[:, None]
        out = paged_forward(
            params, self.draft, decoder.embed(params, self.draft, tokens), state.layers, ctx.cache.page_table, base,
            positions, valid, fresh=ctx.fresh,
        )  # fmt: skip
        last = jnp.maximum(count - 1, 0)[:, None, None]
        probs, ids = self.best(params, jnp.take_along_axis(out.hidden, last, 1)[:, 0])
        fed = (count > 0)[:, None]
        return StandaloneState(out.layers, jnp.where(fed, probs, state.probs), jnp.where(fed, ids, state.tokens))

    def best(self, params, hidden: Float[Array, "*R E"]) -> tuple[Array, Array]:
        """The k most probable continuations (temperature 1, as SGLang drafts)."""
        return top_k_probabilities(decoder.unembed(params, self.draft, hidden), self.topk)

    def propose(self, params, state: StandaloneState, ctx: RoundContext) -> Proposal:
        """Grows the tree; the beams' KV lies behind the bonus token and is overwritten by `update`."""
        base, k = ctx.cache.length + 1, self.topk
        batch = base.shape[0]

        def expand(level: int, tokens, parent, visible, layers: Any):
            del parent
            entries = base[:, None] + jnp.arange((level + 1) * k)[None] // k
            out = paged_forward(
                params, self.draft, decoder.embed(params, self.draft, tokens), layers, ctx.cache.page_table, base,
                jnp.broadcast_to(base[:, None] + level, (batch, k)), jnp.broadcast_to(ctx.active[:, None], (batch, k)),
                inflight_positions=entries, visible=visible,
            )  # fmt: skip
            probs, ids = self.best(params, out.hidden)
            return probs, ids, out.layers

        tree, layers = grow(
            ctx.bonus, state.probs, state.tokens, expand, state.layers,
            num_steps=self.num_steps, topk=k, num_draft_tokens=self.num_draft_tokens,
        )  # fmt: skip
        return self.proposal(tree, state._replace(layers=layers), ctx)


def resolve(spec: SpecConfig, config: ModelConfig, draft) -> SpecConfig:
    """num_steps/topk/num_draft_tokens 3/1/4 unless all three are given."""
    del config, draft
    return resolve_tree(spec, (3, 1, 4), "STANDALONE")


def build(target, draft, spec: SpecConfig) -> tuple[StandaloneDrafter, dict]:
    """The drafter for a draft model, whose vocabulary must be the target's, id by id.

    Raises:
      ConfigError: the vocabularies differ; the message names the first difference.
    """
    if draft.config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"STANDALONE needs one vocabulary: the target has {target.config.vocab_size} tokens, "
            f"the draft {draft.config.vocab_size}"
        )
    if target.tokenizer is not None and draft.tokenizer is not None:
        ours, theirs = target.tokenizer.vocab, draft.tokenizer.vocab
        if ours != theirs:
            token = min(ours.keys() ^ theirs.keys() or {t for t in ours if ours[t] != theirs[t]})
            raise ConfigError(
                f"STANDALONE needs one vocabulary: token {token!r} is id {ours.get(token)} for the target and "
                f"{theirs.get(token)} for the draft (None: absent)"
            )
    drafter = StandaloneDrafter(
        draft=draft.config, num_steps=spec.num_steps, topk=spec.topk, num_draft_tokens=spec.num_draft_tokens
    )
    return drafter, draft.tree
