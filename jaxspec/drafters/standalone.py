"""STANDALONE: a smaller language model with the target's vocabulary, or nearly so, drafts a chain or an EAGLE-2 tree
(Leviathan et al. 2023; the tree of Li et al. 2024, section 4)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.config import ConfigError, ModelConfig, SpecConfig, resolve_tree
from jaxspec.drafters.base import Drafter, Proposal, RoundContext
from jaxspec.kvcache import LayerKV, init_layers
from jaxspec.models import decoder
from jaxspec.models.paged import paged_forward
from jaxspec.trees.tree import grow
from pallas_kernels.vocabulary.api import top_k_probabilities

LEAST_COMMON = 0.9
"""Tokens with the same id, as a part of the smaller vocabulary, without which the other vocabulary is another one."""


class StandaloneState(NamedTuple):
    """The draft model's pools, which share the target's page table, and its last hidden state at the bonus token.

    The draft's cache covers the bonus token as well: one position more than the target's.
    """

    layers: tuple[LayerKV, ...]
    hidden: Float[Array, "B E"]


@dataclasses.dataclass(frozen=True)
class CommonVocabulary:
    """Ids that mean the same token for target and draft: those below `size` but for `foreign`.

    The target may emit any id. One that is not common is fed to the draft as `stand_in`.
    """

    size: int
    foreign: tuple[int, ...] = ()
    stand_in: int = 0

    def __len__(self) -> int:
        """Common ids."""
        return self.size - len(self.foreign)

    @functools.cached_property
    def is_common(self) -> np.ndarray:
        """[size] bool."""
        common = np.ones(self.size, bool)
        common[list(self.foreign)] = False
        return common

    def as_draft_ids(self, tokens: Int[Array, "*R"]) -> Int[Array, "*R"]:
        """The target's ids with the stand-in for those that the draft does not have."""
        known = tokens < self.size
        if self.foreign:
            known &= jnp.asarray(self.is_common)[jnp.minimum(tokens, self.size - 1)]
        return jnp.where(known, tokens, self.stand_in)

    def restrict(self, logits: Float[Array, "*R V"]) -> Float[Array, "*R C"]:
        """The draft's logits of the ids below `size`, -inf where one is not common."""
        logits = logits[..., : self.size]
        return jnp.where(jnp.asarray(self.is_common), logits, -jnp.inf) if self.foreign else logits


@dataclasses.dataclass(frozen=True)
class StandaloneDrafter(Drafter):
    """Drafts with the model `draft`; num_steps levels, topk beams, num_draft_tokens nodes with the root.

    `vocabulary` says which ids are drafted, None: all of them.
    """

    draft: ModelConfig
    num_steps: int
    topk: int
    num_draft_tokens: int
    vocabulary: CommonVocabulary | None = None
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
            params, self.draft, self.embed(params, tokens), state.layers, ctx.cache.page_table, base,
            positions, valid, fresh=ctx.fresh,
        )  # fmt: skip
        last = jnp.maximum(count - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(out.hidden, last, 1)[:, 0]
        return StandaloneState(out.layers, jnp.where((count > 0)[:, None], hidden, state.hidden))

    def embed(self, params, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """The draft's embeddings of the target's ids."""
        if self.vocabulary is not None:
            tokens = self.vocabulary.as_draft_ids(tokens)
        return decoder.embed(params, self.draft, tokens)

    def best(self, params, hidden: Float[Array, "*R E"]) -> tuple[Array, Array]:
        """The k most probable continuations (temperature 1, as SGLang drafts)."""
        logits = decoder.unembed(params, self.draft, hidden)
        return top_k_probabilities(logits if self.vocabulary is None else self.vocabulary.restrict(logits), self.topk)

    def propose(self, params, state: StandaloneState, ctx: RoundContext) -> Proposal:
        """Grows the tree; the beams' KV lies behind the bonus token and is overwritten by `update`."""
        base, k = ctx.cache.length + 1, self.topk
        batch = base.shape[0]

        def expand(level: int, tokens, parent, visible, layers: Any):
            del parent
            entries = base[:, None] + jnp.arange((level + 1) * k)[None] // k
            out = paged_forward(
                params, self.draft, self.embed(params, tokens), layers, ctx.cache.page_table, base,
                jnp.broadcast_to(base[:, None] + level, (batch, k)), jnp.broadcast_to(ctx.active[:, None], (batch, k)),
                inflight_positions=entries, visible=visible,
            )  # fmt: skip
            probs, ids = self.best(params, out.hidden)
            return probs, ids, out.layers

        probs, ids = self.best(params, state.hidden)
        tree, layers = grow(
            ctx.bonus, probs, ids, expand, state.layers,
            num_steps=self.num_steps, topk=k, num_draft_tokens=self.num_draft_tokens,
        )  # fmt: skip
        return self.proposal(tree, state._replace(layers=layers), ctx)


def resolve(spec: SpecConfig, config: ModelConfig, draft) -> SpecConfig:
    """num_steps/topk/num_draft_tokens 3/1/4 unless all three are given."""
    del config, draft
    return resolve_tree(spec, (3, 1, 4), "STANDALONE")


def common_vocabulary(target, draft) -> CommonVocabulary | None:
    """The ids that target and draft have in common; None where all are.

    People pair models whose tables are padded to different sizes and whose tokenizers differ in a few added tokens. Without
    tokenizers an id counts as common if both tables have it.

    Raises:
      ConfigError: the vocabularies differ by more than that; the message names the first difference.
    """
    sizes = target.config.vocab_size, draft.config.vocab_size
    size, foreign = min(sizes), ()
    if target.tokenizer is not None and draft.tokenizer is not None and target.tokenizer.vocab != draft.tokenizer.vocab:
        ours, theirs = ({i: t for t, i in m.tokenizer.vocab.items() if i < size} for m in (target, draft))
        common = [i for i in ours if ours[i] == theirs.get(i)]
        size = max(common, default=-1) + 1
        foreign = tuple(i for i in range(size) if i in ours.keys() | theirs.keys() and ours.get(i) != theirs.get(i))
        if len(common) < LEAST_COMMON * min(len(ours), len(theirs)) or not common:
            i = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
            raise ConfigError(
                f"STANDALONE needs one vocabulary but for a few added tokens: target and draft share {len(common)} of "
                f"{len(ours)} and {len(theirs)} tokens; the first difference is id {i}, {ours.get(i)!r} for the target and "
                f"{theirs.get(i)!r} for the draft (None: absent)"
            )
    if not foreign and sizes == (size, size):
        return None
    # What the draft lacks is most often a mark that an instruction-tuned target uses; the draft's own end mark is the nearest.
    marks = [i for i in draft.config.stop_token_ids if i < size and i not in foreign]
    stand_in = marks[0] if marks else next(i for i in range(size) if i not in foreign)
    return CommonVocabulary(size, foreign, stand_in)


def build(target, draft, spec: SpecConfig) -> tuple[StandaloneDrafter, dict]:
    """The drafter for a draft model, whose vocabulary must be the target's, but for padding and a few added tokens.

    Drafts come from the common ids; the target may emit any.

    Raises:
      ConfigError: the vocabularies differ by more (`common_vocabulary`), or topk is larger than what they have in common.
    """
    vocabulary = common_vocabulary(target, draft)
    if vocabulary is not None and len(vocabulary) < spec.topk:
        raise ConfigError(f"topk={spec.topk} is more than the {len(vocabulary)} tokens that target and draft have in common")
    drafter = StandaloneDrafter(
        draft=draft.config, num_steps=spec.num_steps, topk=spec.topk, num_draft_tokens=spec.num_draft_tokens,
        vocabulary=vocabulary,
    )  # fmt: skip
    return drafter, draft.tree
