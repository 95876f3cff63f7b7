"""Prefill: prompts are taken in by chunks, and each gets its first token from the target."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.kvcache import PagedKVCache
from jaxspec.models import decoder
from jaxspec.models.paged import paged_forward
from jaxspec.round import Program, RoundState, context, emit, give_up, not_numbers
from jaxspec.sampling import process_logits
from jaxspec.trees.tree import root_only
from jaxspec.verify import Verifier
from pallas_kernels.attention.rows import Library


@partial(jax.jit, static_argnames=("program", "chunk", "fresh", "ends"), donate_argnames="state")
def prefill_chunk(
    params: dict,
    draft_params: Any,
    state: RoundState,
    continued: Bool[Array, " B"] | None = None,
    *,
    program: Program,
    chunk: int,
    fresh: Library | None = None,
    ends: int | None = None,
) -> RoundState:
    """`prefill_step` as one program."""
    with decoder.full_precision(params):
        return prefill_step(program, params, draft_params, state, chunk, fresh, continued, ends)


def prefill_step(
    program: Program,
    params: dict,
    draft_params: Any,
    state: RoundState,
    chunk: int,
    fresh: Library | None = None,
    continued: Bool[Array, " B"] | None = None,
    ends: int | None = None,
) -> RoundState:
    """Takes in the next `chunk` positions of every row that still has some; one whose prompt ends there gets its first token.

    A row begins at its own committed length. Shorter rests are padded on the right: padded rows write nothing. One text may
    stand in several rows that share a page table, each beginning where the one before it ends: in every layer all keys are
    written before any is read.

    Args:
      fresh: a library that attends over the chunk alone (`PagedAttend`); every row must be at its beginning.
      continued: rows whose text goes on in another row; None: none. What this leaves of their state must not be kept.
      ends: at most so many rows end their prompt in this chunk; None: any number. The head is run for so many.
    """
    config, table, length = program.config, state.cache.page_table, state.cache.length
    batch, max_len = state.tokens.shape
    n_valid = jnp.where(state.done, 0, jnp.clip(state.fill - length, 0, chunk))
    positions = length[:, None] + jnp.arange(chunk)
    tokens = jnp.take_along_axis(state.tokens, jnp.minimum(positions, max_len - 1), 1)
    valid = jnp.arange(chunk)[None] < n_valid[:, None]
    tokens = jnp.where(valid, tokens, 0)
    ctx = dataclasses.replace(context(program, params, state, n_valid > 0), fresh=fresh, continued=continued)
    last, taps = jnp.maximum(n_valid - 1, 0)[:, None], program.drafter.taps
    only_last = all(0 <= tap < config.num_layers for tap in taps)
    out = paged_forward(
        params,
        config,
        decoder.embed(params, config, tokens),
        state.cache.layers,
        table,
        length,
        positions,
        valid,
        taps=taps,
        fresh=fresh,
        rows=last if only_last else None,
    )

    hidden = out.hidden if only_last else jnp.take_along_axis(out.hidden, last[..., None], 1)
    broken = (n_valid > 0) & not_numbers(hidden)
    state = give_up(state, broken)
    emits = (n_valid > 0) & (length + n_valid >= state.fill) & ~state.resumed & ~broken
    first = first_tokens(program, params, state, hidden, jnp.take_along_axis(tokens, last, 1)[:, 0], emits, ends)
    state, _ = emit(state, first[:, None], jnp.zeros((batch, 1), bool), emits.astype(jnp.int32), state.fill)

    behind = (length + n_valid)[:, None] + jnp.arange(program.drafter.lookahead)[None]
    following = jnp.take_along_axis(state.tokens, jnp.minimum(behind, max_len - 1), 1)
    draft_state = program.drafter.prefill(draft_params, state.draft, ctx, tokens, following, out.features, n_valid)
    committed = length + jnp.where(broken, 0, n_valid)
    return dataclasses.replace(state, cache=PagedKVCache(out.layers, table, committed), draft=draft_state)


def first_tokens(
    program: Program,
    params: dict,
    state: RoundState,
    hidden: Float[Array, "B 1 E"],
    roots: Int[Array, " B"],
    emits: Bool[Array, " B"],
    ends: int | None,
) -> Int[Array, " B"]:
    """What the target chooses behind the last prompt token, for at most `ends` rows that emit; 0 for the others."""
    batch, tokens, sampling = hidden.shape[0], state.tokens, state.sampling.at_class(program.sampling)
    fill, prompt_length, keys = state.fill, state.prompt_length, state.keys
    rows = None
    if ends is not None and ends < batch:
        rows = jnp.nonzero(emits, size=ends, fill_value=batch)[0]
        every = (hidden, roots, tokens, sampling, fill, prompt_length, keys)
        hidden, roots, tokens, sampling, fill, prompt_length, keys = jax.tree.map(
            lambda x: x[jnp.minimum(rows, batch - 1)], every
        )
    logits = decoder.unembed(params, program.config, hidden, exact=True)
    tree = root_only(roots)
    logits = process_logits(logits, sampling, tree, tokens, fill, prompt_length)
    chosen = Verifier()(tree, logits, sampling, keys, fill - 1).tokens[:, 0]
    return chosen if rows is None else jnp.zeros(batch, jnp.int32).at[rows].set(chosen, mode="drop")
