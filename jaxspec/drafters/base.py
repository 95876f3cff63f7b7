"""The drafter contract: what an algorithm must provide so that the one round in `jaxspec.round` can use it.

A drafter is a frozen dataclass: hashable, so that it can be a static argument of ``jit``, and without arrays, which live
in its parameter tree and its state. All methods are pure and traceable with static shapes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.kvcache import LayerKV, PagedKVCache
from jaxspec.pytree import pytree
from jaxspec.sampling import SamplingState
from jaxspec.trees.tree import DraftTree, root_only
from pallas_kernels.attention.rows import Library


@pytree(static=("config", "fresh"))
class RoundContext:
    """What a drafter may look at.

    Attributes:
      params: the target's parameter tree.
      cache: the target's cache; its page table also serves the drafter's own pools, its `length` counts committed tokens.
      tokens: prompt and output of every sequence; the last one, at index `length`, is the bonus token.
      bonus: that token, the root of the tree to be proposed.
      keys: one random key per sequence, fresh for this round.
      sampling: the requests' sampling parameters.
      prompt_length: how many of the tokens are prompt.
      active: which rows take part in this program; the others change no leaf and write nothing.
      config: the target's configuration (static).
      allowed: a grammar's bit mask over the vocabulary of what may follow the bonus token; None for all. For drafters with
        exact tokens only: drafts that a grammar forbids are refused by the verifier.
      continued: in a prefill, rows whose text goes on in another row of the same program (a prompt is taken in as several
        rows at once): their state is dropped, and they must write nothing behind their own tokens. None: no row.
      fresh: in a prompt's first chunk, how its attention may be done without the pages (static; `models.paged`).
    """

    params: Any
    cache: PagedKVCache
    tokens: Int[Array, "B max_len"]
    bonus: Int[Array, " B"]
    keys: Key[Array, " B"]
    sampling: SamplingState
    prompt_length: Int[Array, " B"]
    active: Bool[Array, " B"]
    config: ModelConfig
    allowed: UInt32[Array, "B W"] | None = None
    continued: Bool[Array, " B"] | None = None
    fresh: Library | None = None


@pytree()
class Proposal:
    """What drafting gives.

    Attributes:
      tree: the draft tree.
      state: the drafter's state.
      layers: the target's pools, changed only by a drafter that runs the target itself (UNO).
      exact: tokens that the target itself already chose while drafting (UNO's row 0); m = 0 for all others. Their KV is in
        `layers`, they are emitted before the accepted path, and the last of them is the tree's root.
      num_exact: how many of them each sequence has.
    """

    tree: DraftTree
    state: Any
    layers: tuple[LayerKV, ...]
    exact: Int[Array, "B m"]
    num_exact: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Plain decoding, and the base of every other drafter: proposes nothing, keeps no state.

    Class attributes say what the round must provide: `taps` (target features, concatenated in this order along the last
    axis; `FINAL_NORM` or a hidden-state index, see `models.decoder.decode`), `lookahead` (next tokens that prefill needs).
    `num_exact` is how many exact tokens a proposal holds, `target_passes` how often a round runs the target,
    `verifications` which verifiers its trees are fit for: chains with ``draft_probs`` also for "rejection" and "block".
    """

    name: ClassVar[str] = "NONE"
    num_exact: ClassVar[int] = 0
    target_passes: ClassVar[int] = 1
    verifications: ClassVar[tuple[str, ...]] = ("target_only",)

    @property
    def taps(self) -> tuple[int, ...]:
        """Target features that `prefill` and `update` receive; empty for none."""
        return ()

    @property
    def lookahead(self) -> int:
        """How many tokens behind a prefill chunk `prefill` needs (EAGLE, MTP and STANDALONE: 1)."""
        return 0

    @property
    def key_lookahead(self) -> int:
        """How many tokens behind a position the draft's keys and values at that position depend on (EAGLE and MTP: 1).

        Pages may be shared by texts that agree on the tokens of their positions and on so many behind them: shared prefixes
        are keyed by it. Unlike `lookahead` it does not count what prefill wants for the next proposal alone.
        """
        return 0

    @property
    def separate_blocks(self) -> bool:
        """Whether a prompt may be taken in as several rows of one prefill program, each behind the one before it.

        The rows' states are copies of the sequence's, and only the last row's is kept (`RoundContext.continued`). False where
        a row needs what the one before it leaves in the state: then a program takes in one block of a sequence at most.
        """
        return True

    @property
    def slack(self) -> int:
        """Slots beyond the committed length that a round may write."""
        return 1

    @property
    def max_accept(self) -> int:
        """Most tokens that one round can emit."""
        return 1

    def with_tree(self, **tree: int) -> Drafter:
        """The same drafter with another tree on the same state: so the tree may change between launches.

        Pages are granted and results laid out for the largest tree, which is the one that `init` is asked of.

        Args:
          **tree: num_steps, topk, num_draft_tokens, none of them larger than this drafter's.

        Raises:
          ConfigError: this drafter has no such parameter, or a value is larger.
        """
        names = {f.name for f in dataclasses.fields(self)}
        for name, value in tree.items():
            if name not in names:
                raise ConfigError(f"{self.name} has no {name} that could change between launches")
            if not 1 <= value <= getattr(self, name):
                raise ConfigError(f"{name}={value} must be at least 1 and at most {getattr(self, name)}, the largest tree's")
        if "most_steps" in names:
            tree["most_steps"] = max(self.most_steps, self.num_steps)
        smaller = dataclasses.replace(self, **tree)
        if smaller.slack > self.slack or smaller.max_accept > self.max_accept:
            raise ConfigError(f"{self.name}: {tree} takes more slots a round than the largest tree")
        return smaller

    def init(self, params, batch: int, num_pages: int, page_size: int, max_len: int, dtype) -> Any:
        """A fresh state; every leaf has the batch in front or is a page pool."""
        del params, batch, num_pages, page_size, max_len, dtype
        return ()

    def prefill(
        self,
        params,
        state,
        ctx: RoundContext,
        tokens: Int[Array, "B C"],
        following: Int[Array, "B lookahead"],
        features: Float[Array, "B C E"] | None,
        n_valid: Int[Array, " B"],
    ) -> Any:
        """Takes in one chunk of the prompt.

        Args:
          ctx: `ctx.cache.length` counts the tokens before this chunk.
          tokens: the chunk; the first n_valid of each row are real.
          following: the tokens behind the chunk: prompt tokens, or the first sampled token where the prompt ends.
          features: the taps at the chunk's positions.
          n_valid: may be 0: then the row's state must not change.
        """
        del params, ctx, tokens, following, features, n_valid
        return state

    def propose(self, params, state, ctx: RoundContext) -> Proposal:
        """Drafts a tree whose root is `ctx.bonus`."""
        del params
        return self.proposal(root_only(ctx.bonus), state, ctx)

    def update(
        self,
        params,
        state,
        ctx: RoundContext,
        accepted: Int[Array, "B A"],
        features: Float[Array, "B A E"] | None,
        n_accepted: Int[Array, " B"],
    ) -> Any:
        """Catches up with what the round committed ("draft extend").

        Args:
          ctx: as in the `propose` of this round: `ctx.cache.length` is the committed length *before* it.
          accepted: the emitted tokens: accepted drafts, then the new bonus token.
          features: the taps of the rows that chose them: features[:, i] belong to position length + i (counted behind
            `exact` tokens), accepted[:, i] to the position after it.
          n_accepted: how many of them count; 0 for a sequence that is done, whose state must not change.
        """
        del params, ctx, accepted, features, n_accepted
        return state

    @staticmethod
    def proposal(tree: DraftTree, state, ctx: RoundContext) -> Proposal:
        """A proposal without exact tokens."""
        batch = ctx.bonus.shape[0]
        none = jnp.zeros((batch, 0), jnp.int32)
        return Proposal(tree=tree, state=state, layers=ctx.cache.layers, exact=none, num_exact=jnp.zeros(batch, jnp.int32))


def check_tree(drafter: Drafter, tree: DraftTree) -> None:
    """Checks, while a round is traced, that a proposed tree fits what its drafter announced.

    Pages are granted by `slack`, results are laid out by `max_accept`: a tree beyond them would write into nowhere and lose
    tokens without a word.

    Raises:
      ConfigError: the tree has more nodes than `slack` has slots, or a full path emits more than `max_accept` tokens; exact
        tokens count in both.
    """
    nodes = drafter.num_exact + tree.num_nodes
    if nodes > drafter.slack:
        raise ConfigError(
            f"{drafter.name}: a proposal of {nodes} nodes ({drafter.num_exact} of them exact tokens) does not fit its "
            f"slack={drafter.slack}: slack must be at least as large"
        )
    emitted = drafter.num_exact + min(tree.max_depth, tree.num_nodes - 1) + 1
    if emitted > drafter.max_accept:
        raise ConfigError(
            f"{drafter.name}: a tree of depth {tree.max_depth} and {drafter.num_exact} exact tokens can emit {emitted} tokens "
            f"a round, more than max_accept={drafter.max_accept}: max_accept must be at least as large"
        )
