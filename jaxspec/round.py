"""The round: draft → verify → accept → commit, one compiled program for every algorithm, and the device loop over it.

`RoundState` is a donated pytree: every leaf has the batch in front or is a page pool (`kvcache.is_pool`), so that rows
move, join and leave with one gather.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxspec.config import ModelConfig
from jaxspec.drafters.base import Drafter, RoundContext, check_tree
from jaxspec.kvcache import PagedKVCache, compact
from jaxspec.models import decoder
from jaxspec.models.paged import paged_forward
from jaxspec.pytree import pytree
from jaxspec.sampling import FULL, SamplingState, process_logits, round_keys
from jaxspec.trees.tree import DraftTree
from jaxspec.verify import Acceptance, Verifier


@dataclasses.dataclass(frozen=True)
class Program:
    """The static half of a round: hashable, one compilation for each (program, shapes).

    Attributes:
      config: the target.
      drafter: the algorithm.
      verifier: how trees are verified; benchmarks put one here that simulates an accept length.
      sampling: which requests the program serves, one of `sampling.CLASSES`.
    """

    config: ModelConfig
    drafter: Drafter
    verifier: Callable[..., Acceptance] = Verifier()
    sampling: str = FULL


@pytree()
class RoundState:
    """Everything that changes between rounds.

    Attributes:
      cache: the target's cache; `cache.length` committed tokens.
      draft: the drafter's state.
      tokens: prompt and output; once a row has output, the bonus token stands at index `cache.length` and nothing counts
        behind it.
      from_draft: output tokens that a draft proposed (the others were chosen by the target alone).
      round_of: the round that emitted an output token; 0 for the one that prefill gave.
      proposed_upto: drafts that had been proposed to the sequence when a token was emitted. All statistics follow from
        these three, so that whatever cuts the tokens (a stop string, found later on the host) cuts them too.
      keys: one random key per sequence.
      done: sequences that emit nothing any more.
      stopped: whether `done` came from a stop id (else from the length limit or from outside).
      broken: whether `done` came from activations that are not numbers.
      prompt_length: tokens of the prompt.
      fill: positions that prefill has to take in: the prompt's, or all committed ones of a request that is resumed.
      resumed: the token at index `fill` is known, so that the end of prefill emits nothing.
      limit: tokens that prompt and output may have together.
      capacity: slots of the pages in the row's table; a row that would pass them waits.
      rounds_left: rounds that the row may still take part in before the host looks at it.
      drafting: False: only the root of the row's tree is verified.
      seen: index behind the last token that a report has carried to the host.
      rounds: rounds that a sequence took part in.
      proposed: draft tokens that were proposed to it.
      sampling: the requests' sampling parameters.
    """

    cache: PagedKVCache
    draft: Any
    tokens: Int[Array, "B max_len"]
    from_draft: Bool[Array, "B max_len"]
    round_of: Int[Array, "B max_len"]
    proposed_upto: Int[Array, "B max_len"]
    keys: Key[Array, " B"]
    done: Bool[Array, " B"]
    stopped: Bool[Array, " B"]
    broken: Bool[Array, " B"]
    prompt_length: Int[Array, " B"]
    fill: Int[Array, " B"]
    resumed: Bool[Array, " B"]
    limit: Int[Array, " B"]
    capacity: Int[Array, " B"]
    rounds_left: Int[Array, " B"]
    drafting: Bool[Array, " B"]
    seen: Int[Array, " B"]
    rounds: Int[Array, " B"]
    proposed: Int[Array, " B"]
    sampling: SamplingState

    @property
    def bonus(self) -> Int[Array, " B"]:
        """The last token of every sequence: the root of the next tree."""
        return jnp.take_along_axis(self.tokens, self.cache.length[:, None], 1)[:, 0]


def takes_part(program: Program, state: RoundState) -> Bool[Array, " B"]:
    """Which rows the next round is for: prefilled, not done, within their pages and their allowance of rounds."""
    length = state.cache.length
    fits = length + program.drafter.slack <= state.capacity
    return ~state.done & (length >= state.fill) & fits & (state.rounds_left > 0)


def context(
    program: Program, params: dict, state: RoundState, active: Bool[Array, " B"], allowed: UInt32[Array, "B W"] | None = None
) -> RoundContext:
    """The drafter's view of the state, in a program that `active` rows take part in."""
    return RoundContext(
        params=params,
        cache=state.cache,
        tokens=state.tokens,
        bonus=state.bonus,
        keys=round_keys(state.keys, state.cache.length),
        sampling=state.sampling.at_class(program.sampling),
        prompt_length=state.prompt_length,
        active=active,
        config=program.config,
        allowed=allowed,
    )


def cut(
    emitted: Int[Array, "B A"], count: Int[Array, " B"], remaining: Int[Array, " B"], sampling: SamplingState
) -> tuple[Int[Array, " B"], Bool[Array, " B"], Bool[Array, " B"]]:
    """The single point at which an accepted run ends: at its first stop id, or where the length limit is reached.

    A stop that lies beyond the limit does not count.

    Returns:
      How many tokens are emitted (the stop included), whether the sequence is done, and whether a stop id ended it.
    """
    order = jnp.arange(emitted.shape[1])[None]
    stops = sampling.stop_ids[:, None, :]
    hit = ((emitted[..., None] == stops) & (stops >= 0)).any(-1) & (order < count[:, None]) & ~sampling.ignore_eos[:, None]
    upto = jnp.where(hit.any(1), jnp.argmax(hit, 1) + 1, emitted.shape[1] + 1)
    stopped = (upto <= count) & (upto <= remaining)
    kept = jnp.minimum(jnp.minimum(count, upto), remaining)
    return kept, stopped | (kept >= remaining), stopped


def not_numbers(hidden: Float[Array, "B R E"]) -> Bool[Array, " B"]:
    """Whether one of a row's final hidden states holds a NaN; behind the final norm an infinity before it is one, too."""
    return jnp.isnan(hidden).any((1, 2))


def give_up(state: RoundState, broken: Bool[Array, " B"]) -> RoundState:
    """Ends rows whose output means nothing."""
    return dataclasses.replace(state, done=state.done | broken, broken=state.broken | broken)


def emit(
    state: RoundState, emitted: Int[Array, "B A"], drafted: Bool[Array, "B A"], count: Int[Array, " B"], at: Int[Array, " B"]
) -> tuple[RoundState, Int[Array, " B"]]:
    """Appends an accepted run behind index `at` - 1, cut by `cut`; sequences with count 0 do not change."""
    kept, done, stopped = cut(emitted, count, state.limit - at, state.sampling)
    order = jnp.arange(emitted.shape[1])[None]
    active = count > 0
    index = jnp.where((order < kept[:, None]) & active[:, None], at[:, None] + order, state.tokens.shape[1])
    rows = jnp.arange(emitted.shape[0])[:, None]
    return (
        dataclasses.replace(
            state,
            tokens=state.tokens.at[rows, index].set(emitted, mode="drop"),
            from_draft=state.from_draft.at[rows, index].set(drafted, mode="drop"),
            round_of=state.round_of.at[rows, index].set(state.rounds[:, None], mode="drop"),
            proposed_upto=state.proposed_upto.at[rows, index].set(state.proposed[:, None], mode="drop"),
            done=state.done | (active & done),
            stopped=state.stopped | (active & stopped),
        ),
        jnp.where(active, kept, 0),
    )


def draft(
    program: Program, params: dict, draft_params: Any, state: RoundState, allowed: UInt32[Array, "B W"] | None = None
) -> tuple[RoundState, DraftTree]:
    """The first half of a round: the drafter proposes a tree. Tokens that it settled on the way are emitted here.

    Args:
      allowed: a grammar's bit mask of what may follow the bonus token, for drafters with exact tokens; None for all.

    Returns:
      The state, and the tree; a row that takes no part in the round has no valid node, not even the root.
    """
    active = takes_part(program, state)
    with jax.named_scope("draft"):
        proposal = program.drafter.propose(draft_params, state.draft, context(program, params, state, active, allowed))
    check_tree(program.drafter, proposal.tree)
    length, exact = state.cache.length, proposal.exact
    state = dataclasses.replace(state, rounds=state.rounds + active, draft=proposal.state)
    if exact.shape[1]:
        state, kept = emit(state, exact, jnp.zeros(exact.shape, bool), jnp.where(active, proposal.num_exact, 0), length + 1)
        length = length + kept
    state = dataclasses.replace(state, cache=PagedKVCache(proposal.layers, state.cache.page_table, length))
    tree = proposal.tree
    drafting = state.drafting[:, None] | (jnp.arange(tree.num_nodes) == 0)
    return state, dataclasses.replace(
        tree, tokens=tree.tokens.at[:, 0].set(state.bonus), valid=tree.valid & drafting & (active & ~state.done)[:, None]
    )


def verify(
    program: Program,
    params: dict,
    draft_params: Any,
    state: RoundState,
    tree: DraftTree,
    allowed: UInt32[Array, "B T W"] | None = None,
) -> RoundState:
    """The second half: the target checks the tree, the accepted path is emitted and committed, the drafter catches up.

    Args:
      tree: from `draft`.
      allowed: for every node a bit mask over the vocabulary of tokens that may follow it (a grammar's); None for all.
    """
    active, table, length = tree.valid[:, 0], state.cache.page_table, state.cache.length
    ctx = context(program, params, state, active)
    positions = length[:, None] + tree.depth
    with jax.named_scope("target"):
        out = paged_forward(
            params,
            program.config,
            decoder.embed(params, program.config, tree.tokens),
            state.cache.layers,
            table,
            length,
            positions,
            tree.valid,
            inflight_positions=jnp.where(tree.valid, positions, -1),
            visible=None if tree.is_chain else tree.ancestors,
            taps=program.drafter.taps,
        )
    with jax.named_scope("head"):
        logits = decoder.unembed(params, program.config, out.hidden, exact=True)
    with jax.named_scope("accept"):
        logits = process_logits(logits, ctx.sampling, tree, state.tokens, length + 1, state.prompt_length, allowed=allowed)
        accepted = program.verifier(tree, logits, ctx.sampling, state.keys, length)
        on_path = jnp.take_along_axis(out.hidden, jnp.maximum(accepted.path, 0)[..., None], 1)
        broken = active & not_numbers(on_path)
    with jax.named_scope("commit"):
        drafts = jnp.where(active, tree.valid.sum(1, dtype=jnp.int32) - 1, 0)
        state = dataclasses.replace(state, proposed=state.proposed + drafts, rounds_left=state.rounds_left - active)
        drafted = jnp.arange(accepted.tokens.shape[1])[None] < accepted.num_drafts[:, None]
        count = jnp.where(active & ~broken, accepted.num_drafts + 1, 0)
        state, kept = emit(give_up(state, broken), accepted.tokens, drafted, count, length + 1)
        layers = out.layers if tree.is_chain else compact(out.layers, table, length, accepted.path, kept)
    with jax.named_scope("extend"):
        features = None
        if out.features is not None:
            features = jnp.take_along_axis(out.features, jnp.maximum(accepted.path, 0)[..., None], 1)
        draft_state = program.drafter.update(draft_params, state.draft, ctx, accepted.tokens, features, kept)
    return dataclasses.replace(state, cache=PagedKVCache(layers, table, length + kept), draft=draft_state)


def round_step(program: Program, params: dict, draft_params: Any, state: RoundState) -> RoundState:
    """One whole round."""
    return verify(program, params, draft_params, *draft(program, params, draft_params, state))


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def run_rounds(params: dict, draft_params: Any, state: RoundState, *, program: Program) -> RoundState:
    """Rounds until no row takes part any more: one program, the loop stays on the device."""

    def running(state):
        return jnp.any(takes_part(program, state))

    with decoder.full_precision(params):
        return jax.lax.while_loop(running, partial(round_step, program, params, draft_params), state)
