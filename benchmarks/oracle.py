"""A drafter that knows the answer and errs at a fixed rate: so that a proof of equal answers runs through accepted drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec.drafters.base import Drafter, Proposal, RoundContext
from jaxspec.trees.tree import chain, from_parents


def known(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> dict[str, Int[Array, "N L"]]:
    """An oracle's parameters: each prompt with the target's own answer, padded."""
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    table = np.zeros((len(whole), max(map(len, whole))), np.int32)
    for row, text in zip(table, whole, strict=True):
        row[: len(text)] = text
    return {"texts": jnp.asarray(table)}


@dataclasses.dataclass(frozen=True)
class OracleDrafter(Drafter):
    """Drafts the next `num_steps` tokens of a known text, each wrong with probability `error`; a tree has `topk` siblings a
    level, of which the right one (if any) is not always the first.

    Sequences are told apart by the text before their bonus token.
    """

    num_steps: int
    topk: int = 1
    error: float = 0.25
    name: ClassVar[str] = "ORACLE"

    @property
    def max_accept(self) -> int:
        """A full path and the bonus token."""
        return self.num_steps + 1

    @property
    def slack(self) -> int:
        """The tree's nodes."""
        return 1 + self.num_steps * self.topk

    def init(self, params, batch: int, num_pages: int, page_size: int, max_len: int, dtype) -> Any:
        """No state."""
        return ()

    def prefill(self, params, state, ctx: RoundContext, tokens, following, features, n_valid) -> Any:
        """Nothing to take in."""
        return state

    def update(self, params, state, ctx: RoundContext, accepted, features, n_accepted) -> Any:
        """Nothing to keep."""
        return state

    def propose(self, params, state, ctx: RoundContext) -> Proposal:
        """Levels of `topk` siblings below the right one of the level before."""
        table = params["texts"]
        length, (batch, width) = ctx.cache.length, ctx.tokens.shape
        table = jnp.pad(table, ((0, 0), (0, max(width - table.shape[1], 0))))[:, :width]
        behind = jnp.arange(width)[None] > length[:, None]
        same: Bool[Array, "B N"] = ((ctx.tokens[:, None] == table[None]) | behind[:, None]).all(-1)
        row = jnp.argmax(same, 1)
        at = length[:, None] + 1 + jnp.arange(self.num_steps)[None]
        right = table[row[:, None], jnp.minimum(at, width - 1)]
        # A multiplicative hash of row and position: the same errors whatever the rounds are.
        mixed = at.astype(jnp.uint32) * jnp.uint32(2654435761) + row[:, None].astype(jnp.uint32) * jnp.uint32(40503)
        coin = (mixed >> 16) % 1024
        place = jnp.where(coin < int(self.error * 1024), self.topk, (coin % self.topk).astype(jnp.int32))
        others = (right[..., None] + 1 + jnp.arange(self.topk)) % ctx.config.vocab_size
        levels = jnp.where(jnp.arange(self.topk) == place[..., None], right[..., None], others)
        tokens = jnp.concatenate([ctx.bonus[:, None], levels.reshape(batch, -1)], 1)
        if self.topk == 1:
            return self.proposal(chain(tokens), state, ctx)
        above = jnp.minimum(place, self.topk - 1) + 1 + jnp.arange(self.num_steps)[None] * self.topk
        parents = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), above[:, :-1]], 1)
        parent = jnp.concatenate([jnp.full((batch, 1), -1), jnp.repeat(parents, self.topk, 1)], 1)
        tree = from_parents(tokens, parent, jnp.ones(tokens.shape, bool), max_depth=self.num_steps)
        return self.proposal(tree, state, ctx)
