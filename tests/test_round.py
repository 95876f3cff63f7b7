"""What the compiled round must never do: leak, read what is not its own, run past a stop, copy its caches."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxspec
from jaxspec.engine.batch import Batch, open_batch
from jaxspec.kvcache import LayerKV
from jaxspec.round import cut
from jaxspec.sampling import MAX_STOP_IDS, SamplingParams, sampling_state
from tests import tiny
from tests.drafters.batch_checks import assert_caches_are_updated_in_place, count_traces, pools_of

TREE = {"num_steps": 3, "topk": 2, "num_draft_tokens": 7}
DRAFTERS = {
    "plain": lambda: {"algorithm": "none"},
    "ngram": lambda: {"algorithm": "ngram", "num_draft_tokens": 6},
    "standalone": lambda: {"draft": tiny.small_draft(), **TREE},
}


def batch_for(prompts, **options) -> Batch:
    return open_batch(tiny.target(), prompts, **{"max_new_tokens": 24, **options})


def outputs(batch) -> list[list[int]]:
    return [log.tokens for log in batch.logs()]


def map_pools(state, change):
    """The state with `change` applied to every pool array [P, S, K, D]."""

    def layer(x):
        return LayerKV(change(x.k), change(x.v)) if isinstance(x, LayerKV) else x

    def is_layer(x):
        return isinstance(x, LayerKV)

    cache = dataclasses.replace(state.cache, layers=tuple(layer(x) for x in state.cache.layers))
    return dataclasses.replace(state, cache=cache, draft=jax.tree.map(layer, state.draft, is_leaf=is_layer))


@pytest.mark.parametrize("name", DRAFTERS)
def test_nan_in_free_pages_scratch_and_padding_reaches_nothing(name):
    prompts = tiny.prompts(3)
    clean = batch_for(prompts, **DRAFTERS[name]())
    clean.prefill()
    clean.run()
    poisoned = batch_for(prompts, **DRAFTERS[name]())
    poisoned.state = map_pools(poisoned.state, lambda x: jnp.full_like(x, jnp.nan))
    poisoned.prefill()
    for _ in range(40):
        # Every slot behind the committed positions, and the scratch page, is poisoned again before each round.
        keep = np.zeros(pools_of(poisoned.state)[0].k.shape[:2], bool)
        table, length = jax.device_get((poisoned.state.cache.page_table, poisoned.state.cache.length))
        for row, n in zip(table, length, strict=True):
            extra = 1 if name == "standalone" else 0  # its cache covers the bonus token too
            slots = np.arange(n + extra)
            keep[row[slots // keep.shape[1]], slots % keep.shape[1]] = True
        poisoned.state = map_pools(
            poisoned.state, lambda x, keep=keep: jnp.where(jnp.asarray(keep)[..., None, None], x, jnp.nan)
        )
        poisoned.run(1)
    assert bool(poisoned.state.done.all())
    assert outputs(poisoned) == outputs(clean)
    np.testing.assert_array_equal(poisoned.state.tokens, clean.state.tokens)


@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_write_only_pages_that_their_sequence_owns(name):
    batch = batch_for(tiny.prompts(3), page_size=4, **DRAFTERS[name]())
    granted = np.unique(np.asarray(batch.state.cache.page_table))
    foreign = np.setdiff1d(np.arange(pools_of(batch.state)[0].k.shape[0]), granted)
    assert foreign.size
    mark = jnp.asarray(np.isin(np.arange(pools_of(batch.state)[0].k.shape[0]), foreign))[:, None, None, None]
    batch.state = map_pools(batch.state, lambda x: jnp.where(mark, 7.0, x))
    batch.prefill()
    while not bool(batch.state.done.all()):
        batch.run(1)
        for layer in pools_of(batch.state):
            for pool in layer:
                assert (np.asarray(pool)[foreign] == 7.0).all()
        table = np.asarray(batch.state.cache.page_table)
        assert np.unique(table[table > 0]).size == (table > 0).sum()
        owned = (table > 0).sum(1) * 4
        np.testing.assert_array_equal(batch.state.capacity, owned)
        assert (np.asarray(batch.state.cache.length) + batch.program.drafter.slack <= owned).all()


def test_every_stop_position_and_length_limit_inside_an_accepted_run():
    """Stops at each place of a run of 4, limits on each side of it: tokens, reason and cache agree with plain decoding."""
    prompt = tiny.prompts(1)[0]
    full = jaxspec.generate(tiny.target(), prompt, algorithm="none", max_new_tokens=14).tokens
    for limit in range(1, 11):
        batch = batch_for([prompt] * len(full), draft=tiny.target(), max_new_tokens=limit)
        stops = jnp.full((len(full), MAX_STOP_IDS), -1, jnp.int32).at[:, 0].set(jnp.asarray(full))
        batch.state = dataclasses.replace(batch.state, sampling=dataclasses.replace(batch.state.sampling, stop_ids=stops))
        batch.prefill()
        batch.run()
        for stop, answer, length in zip(full, batch.logs(), batch.state.cache.length, strict=True):
            end = full.index(stop) + 1
            expected = full[: min(end, limit)]
            assert answer.tokens == expected
            assert answer.finish_reason == ("stop" if end <= limit else "length")
            assert int(length) == len(prompt) + len(expected) - 1
            assert answer.round_of[-1] == -(-(len(expected) - 1) // 4)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=6, max_size=6),
    st.integers(0, 6),
    st.integers(0, 8),
    st.lists(st.integers(0, 5), max_size=3),
    st.booleans(),
)
def test_cut_agrees_with_reading_token_by_token(tokens, count, remaining, stops, ignore):
    sampling = sampling_state([SamplingParams()], 6, [stops], [ignore])
    kept, done, stopped = cut(jnp.array([tokens]), jnp.array([count]), jnp.array([remaining]), sampling)
    expected, reason = 0, None
    for token in tokens[:count]:
        if expected == remaining:
            break
        expected += 1
        if token in stops and not ignore:
            reason = "stop"
            break
    assert int(kept[0]) == expected
    assert bool(stopped[0]) == (reason == "stop")
    assert bool(done[0]) == (reason == "stop" or expected >= remaining)


@pytest.mark.parametrize("name", DRAFTERS)
def test_caches_are_updated_in_place(name):
    batch = batch_for(tiny.prompts(2), max_new_tokens=200, page_size=64, **DRAFTERS[name]())
    assert_caches_are_updated_in_place(batch)


def test_one_program_for_each_shape(monkeypatch):
    traces = count_traces(monkeypatch)
    options = {"draft": tiny.small_draft(seed=3), **TREE, "max_new_tokens": 12}
    for seed in range(3):
        jaxspec.generate(tiny.target(), tiny.prompts(2, seed=seed), **options)
    assert traces["rounds"] == [2]
    jaxspec.generate(tiny.target(), tiny.prompts(3), **options)
    assert traces["rounds"] == [2, 4]
    assert len(set(traces["prefill"])) == len(traces["prefill"])
