"""What holds for a batch with any drafter, and how often programs are traced."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine import device
from jaxspec.engine.batch import Batch
from jaxspec.kvcache import LayerKV
from jaxspec.round import run_rounds


def pools_of(state) -> list[LayerKV]:
    """The pools of the target's layers and of the drafter's."""
    drafts = jax.tree.leaves(state.draft, is_leaf=lambda x: isinstance(x, LayerKV))
    return [*state.cache.layers, *(x for x in drafts if isinstance(x, LayerKV))]


def assert_caches_are_updated_in_place(batch: Batch) -> None:
    """The loop's output aliases both caches, and its temporaries are smaller than one layer's pool."""

    def widen(x):
        return jax.tree.map(lambda pool: jnp.zeros((4096, *pool.shape[1:]), pool.dtype), x) if isinstance(x, LayerKV) else x

    state = jax.tree.map(widen, batch.state, is_leaf=lambda x: isinstance(x, LayerKV))
    args = (batch.tree, batch.draft_tree, state)
    memory = run_rounds.lower(*args, program=batch.program).compile().memory_analysis()
    sizes = [pool.size * pool.dtype.itemsize for layer in pools_of(state) for pool in layer]
    assert memory.alias_size_in_bytes >= sum(sizes)
    assert memory.temp_size_in_bytes < min(sizes)


def assert_every_draft_is_accepted(batch: Batch, answers, steps: int) -> None:
    """Runs a batch whose drafter knows the answers, of 1 + 6 * (steps + 1) tokens: six full rounds."""
    batch.prefill()
    batch.run()
    for log, expected in zip(batch.logs(), answers, strict=True):
        assert log.tokens == expected.tokens
        assert np.bincount(log.round_of).tolist() == [1] + [steps + 1] * 6
        assert log.from_draft.sum() == 6 * steps


def count_traces(monkeypatch) -> dict[str, list[int]]:
    """From now on the rows of each trace of the engine's programs, under "rounds" and "prefill"."""
    traces = {"rounds": [], "prefill": []}

    def counted(name: str, static: tuple[str, ...]):
        function = getattr(device, f"{name}_program").__wrapped__

        @functools.wraps(function)
        def traced(params, draft_params, pools, rows, *rest, **options):
            traces[name].append(rows.done.shape[0])
            return function(params, draft_params, pools, rows, *rest, **options)

        monkeypatch.setattr(
            device, f"{name}_program", jax.jit(traced, static_argnames=static, donate_argnames=("pools", "rows"))
        )

    counted("rounds", ("program",))
    counted("prefill", ("program", "chunk", "fresh", "ends"))
    return traces
