"""The round: draft → verify → accept → commit, one compiled program for every algorithm, and the device loop over it.

`RoundState` is a donated pytree: every leaf has the batch in front or is a page pool (a history that all rows share,
NGRAM's trie, is the one exception), so that a scheduler can move rows with one gather.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray, UInt32

from jaxspec.config import ModelConfig
from jaxspec.drafters.base import Drafter, Proposal, RoundContext
from jaxspec.fused_attention import Implementation
from jaxspec.kvcache import PagedKVCache, compact
from jaxspec.models import decoder
from jaxspec.models.paged import paged_forward
from jaxspec.pytree import pytree
from jaxspec.sampling import SamplingState, process_logits, round_keys
from jaxspec.tree import DraftTree, root_only
from jaxspec.verify import Acceptance, accept


@dataclasses.dataclass(frozen=True)
class Program:
    """The static half of a round: hashable, one compilation for each (program, shapes).

    Attributes:
      config: the target.
      drafter: the algorithm.
      threshold_single, threshold_acc, verification: see `jaxspec.verify.accept`.
      acceptance: the verifier; benchmarks put one here that simulates an accept length.
    """

    config: ModelConfig
    drafter: Drafter
    threshold_single: float = 1.0
    threshold_acc: float = 1.0
    verification: str = "target_only"
    acceptance: Callable[..., Acceptance] = accept


@pytree()
class RoundState:
    """Everything that changes between rounds.

    Attributes:
      cache: the target's cache; `cache.length` committed tokens.
      draft: the drafter's state.
      tokens: prompt and output; the bonus token stands at index `cache.length`, nothing counts behind it.
      from_draft: output tokens that a draft proposed (the others were chosen by the target alone).
      round_of: the round that emitted an output token; 0 for the one that prefill gave.
      proposed_upto: drafts that had been proposed to the sequence when a token was emitted. All statistics follow from
        these three, so that whatever cuts the tokens (a stop string, found later on the host) cuts them too.
      keys: one random key per sequence.
      done: sequences that emit nothing any more.
      stopped: whether `done` came from a stop id (else from the length limit or from outside).
      prompt_length: tokens of the prompt.
      limit: tokens that prompt and output may have together.
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
    keys: PRNGKeyArray
    done: Bool[Array, " B"]
    stopped: Bool[Array, " B"]
    prompt_length: Int[Array, " B"]
    limit: Int[Array, " B"]
    rounds: Int[Array, " B"]
    proposed: Int[Array, " B"]
    sampling: SamplingState

    @property
    def bonus(self) -> Int[Array, " B"]:
        """The last token of every sequence: the root of the next tree."""
        return jnp.take_along_axis(self.tokens, self.cache.length[:, None], 1)[:, 0]


@pytree()
class RoundOutput:
    """What one round emitted: `count` of `tokens` (0 for a sequence that was done), `num_drafts` of them drafted."""

    tokens: Int[Array, "B A"]
    count: Int[Array, " B"]
    num_drafts: Int[Array, " B"]


def context(program: Program, params: dict, state: RoundState, allowed: UInt32[Array, "B W"] | None = None) -> RoundContext:
    """The drafter's view of the state."""
    return RoundContext(
        params=params,
        cache=state.cache,
        tokens=state.tokens,
        bonus=state.bonus,
        keys=round_keys(state.keys, state.cache.length),
        sampling=state.sampling,
        prompt_length=state.prompt_length,
        active=~state.done,
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
    program: Program,
    params: dict,
    draft_params: Any,
    state: RoundState,
    allowed: UInt32[Array, "B W"] | None = None,
) -> Proposal:
    """The first half of a round: the drafter proposes a tree.

    Args:
      allowed: a grammar's bit mask of what may follow the bonus token, for drafters with exact tokens; None for all.
    """
    with jax.named_scope("draft"):
        return program.drafter.propose(draft_params, state.draft, context(program, params, state, allowed))


def verify(
    program: Program,
    params: dict,
    draft_params: Any,
    state: RoundState,
    proposal: Proposal,
    allowed: UInt32[Array, "B T W"] | None = None,
) -> tuple[RoundState, RoundOutput]:
    """The second half: the target checks the tree, the accepted path is emitted and committed, the drafter catches up.

    Args:
      allowed: for every node a bit mask over the vocabulary of tokens that may follow it (a grammar's); None for all.
    """
    tree, ctx = proposal.tree, context(program, params, state)
    table, length, active = state.cache.page_table, state.cache.length, ~state.done
    base = length + proposal.num_exact
    tokens = put_exact(state.tokens, proposal, length)

    with jax.named_scope("target"):
        out = paged_forward(
            params, program.config, decoder.embed(params, program.config, tree.tokens), proposal.layers, table, base,
            base[:, None] + tree.depth, tree.valid & active[:, None],
            inflight_positions=jnp.where(tree.valid, base[:, None] + tree.depth, -1),
            visible=None if tree.is_chain else tree.ancestors, taps=program.drafter.taps,
        )  # fmt: skip
    with jax.named_scope("head"):
        logits = decoder.unembed(params, program.config, out.hidden, exact=True)
    with jax.named_scope("accept"):
        logits = process_logits(logits, state.sampling, tree, tokens, base + 1, state.prompt_length, allowed=allowed)
        accepted = program.acceptance(
            tree, logits, state.sampling, state.keys, base,
            threshold_single=program.threshold_single, threshold_acc=program.threshold_acc, mode=program.verification,
        )  # fmt: skip
    with jax.named_scope("commit"):
        emitted, drafted, count = join_exact(proposal, accepted)
        state = dataclasses.replace(
            state,
            rounds=state.rounds + active,
            proposed=state.proposed + jnp.where(active, tree.valid.sum(1, dtype=jnp.int32) - 1, 0),
        )
        state, kept = emit(state, emitted, drafted, jnp.where(active, count, 0), length + 1)
        of_path = jnp.maximum(kept - proposal.num_exact, 0)
        layers = out.layers
        if not tree.is_chain:
            layers = compact(layers, table, base, accepted.path, of_path)
    with jax.named_scope("extend"):
        features = None
        if out.features is not None:
            features = jnp.take_along_axis(out.features, jnp.maximum(accepted.path, 0)[..., None], 1)
        draft_state = program.drafter.update(draft_params, proposal.state, ctx, accepted.tokens, features, of_path)
    correct = jnp.minimum(accepted.num_drafts, of_path)
    state = dataclasses.replace(state, cache=PagedKVCache(layers, table, length + kept), draft=draft_state)
    return state, RoundOutput(emitted, kept, jnp.where(active, correct, 0))


def put_exact(tokens: Int[Array, "B max_len"], proposal: Proposal, length: Int[Array, " B"]) -> Int[Array, "B max_len"]:
    """The token history as the tree's nodes must see it: with the tokens that drafting already settled."""
    if not proposal.exact.shape[1]:
        return tokens
    order = jnp.arange(proposal.exact.shape[1])[None]
    index = jnp.where(order < proposal.num_exact[:, None], length[:, None] + 1 + order, tokens.shape[1])
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], index].set(proposal.exact, mode="drop")


def join_exact(proposal: Proposal, accepted: Acceptance) -> tuple[Array, Array, Array]:
    """The run that a round emits: exact tokens, accepted drafts, bonus; which of them were drafted; how many there are."""
    order = jnp.arange(accepted.tokens.shape[1])[None]
    drafted = order < accepted.num_drafts[:, None]
    if not proposal.exact.shape[1]:
        return accepted.tokens, drafted, accepted.num_drafts + 1
    batch, m = proposal.exact.shape
    rows = jnp.arange(batch)[:, None]
    at = proposal.num_exact[:, None] + order
    run = jnp.zeros((batch, m + order.shape[1]), accepted.tokens.dtype).at[:, :m].set(proposal.exact)
    flags = jnp.zeros(run.shape, bool).at[rows, at].set(drafted)
    return run.at[rows, at].set(accepted.tokens), flags, proposal.num_exact + accepted.num_drafts + 1


def round_step(program: Program, params: dict, draft_params: Any, state: RoundState) -> tuple[RoundState, RoundOutput]:
    """One whole round."""
    return verify(program, params, draft_params, state, draft(program, params, draft_params, state))


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def run_rounds(
    params: dict, draft_params: Any, state: RoundState, max_rounds: Int[Array, ""], *, program: Program
) -> RoundState:
    """Rounds until every sequence is done, at most `max_rounds` of them: one program, the loop stays on the device."""

    def running(carry):
        count, state = carry
        return (count < max_rounds) & ~jnp.all(state.done)

    def body(carry):
        count, state = carry
        return count + 1, round_step(program, params, draft_params, state)[0]

    with decoder.full_precision(params):
        return jax.lax.while_loop(running, body, (jnp.int32(0), state))[1]


@partial(jax.jit, static_argnames=("program", "chunk", "fresh"), donate_argnames="state")
def prefill_chunk(
    params: dict, draft_params: Any, state: RoundState, start: Int[Array, ""], *, program: Program, chunk: int,
    fresh: Implementation | None = None,
) -> RoundState:  # fmt: skip
    """`prefill_step` as one program."""
    with decoder.full_precision(params):
        return prefill_step(program, params, draft_params, state, start, chunk, fresh)


def prefill_step(
    program: Program, params: dict, draft_params: Any, state: RoundState, start: Int[Array, ""], chunk: int,
    fresh: Implementation | None = None,
) -> RoundState:  # fmt: skip
    """Takes in prompt positions start … start + chunk - 1 of every sequence; one whose prompt ends there gets its first token.

    Shorter prompts are padded on the right: padded rows write to the scratch page and see nothing.
    With `fresh`, which needs start = 0, the target's attention is that of a library over the chunk alone (`PagedAttend`).
    """
    config, table, length = program.config, state.cache.page_table, state.cache.length
    batch, max_len = state.tokens.shape
    n_valid = jnp.clip(state.prompt_length - start, 0, chunk)
    index = start + jnp.arange(chunk)
    tokens = jnp.take(state.tokens, jnp.minimum(index, max_len - 1), axis=1)
    valid = jnp.arange(chunk)[None] < n_valid[:, None]
    tokens = jnp.where(valid, tokens, 0)
    positions = jnp.broadcast_to(index[None], (batch, chunk))
    ctx = dataclasses.replace(context(program, params, state), fresh=fresh)
    last, taps = jnp.maximum(n_valid - 1, 0)[:, None], program.drafter.taps
    only_last = all(0 <= tap < config.num_layers for tap in taps)
    out = paged_forward(
        params, config, decoder.embed(params, config, tokens), state.cache.layers, table, length, positions, valid,
        taps=taps, fresh=fresh, rows=last if only_last else None,
    )  # fmt: skip

    hidden = out.hidden if only_last else jnp.take_along_axis(out.hidden, last[..., None], 1)
    tree: DraftTree = root_only(jnp.take_along_axis(tokens, last, 1)[:, 0])
    logits = decoder.unembed(params, config, hidden, exact=True)
    logits = process_logits(logits, state.sampling, tree, state.tokens, state.prompt_length, state.prompt_length)
    first = accept(tree, logits, state.sampling, state.keys, state.prompt_length - 1).tokens[:, :1]
    ends = (n_valid > 0) & (start + chunk >= state.prompt_length)
    state, _ = emit(state, first, jnp.zeros_like(first, bool), ends.astype(jnp.int32), state.prompt_length)

    behind = start + n_valid[:, None] + jnp.arange(program.drafter.lookahead)[None]
    following = jnp.take_along_axis(state.tokens, jnp.minimum(behind, max_len - 1), 1)
    draft_state = program.drafter.prefill(draft_params, state.draft, ctx, tokens, following, out.features, n_valid)
    return dataclasses.replace(state, cache=PagedKVCache(out.layers, table, length + n_valid), draft=draft_state)
