"""What holds for a session with any drafter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import generation
from jaxspec.kvcache import LayerKV
from jaxspec.round import run_rounds


def pools_of(state) -> list[LayerKV]:
    """The pools of the target's layers and of the drafter's."""
    drafts = jax.tree.leaves(state.draft, is_leaf=lambda x: isinstance(x, LayerKV))
    return [*state.cache.layers, *(x for x in drafts if isinstance(x, LayerKV))]


def assert_caches_are_updated_in_place(session) -> None:
    """The loop's output aliases both caches, and its temporaries are smaller than one layer's pool."""

    def widen(x):
        return jax.tree.map(lambda pool: jnp.zeros((4096, *pool.shape[1:]), pool.dtype), x) if isinstance(x, LayerKV) else x

    state = jax.tree.map(widen, session.state, is_leaf=lambda x: isinstance(x, LayerKV))
    args = (session.params.tree, session.draft_tree, state, jnp.int32(9))
    memory = run_rounds.lower(*args, program=session.program).compile().memory_analysis()
    sizes = [pool.size * pool.dtype.itemsize for layer in pools_of(state) for pool in layer]
    assert memory.alias_size_in_bytes >= sum(sizes)
    assert memory.temp_size_in_bytes < min(sizes)


def assert_every_draft_is_accepted(session, answers, steps: int) -> None:
    """Runs a session whose drafter knows the answers, of 1 + 6 * (steps + 1) tokens: six full rounds."""
    session.prefill()
    session.run()
    for answer, expected in zip(generation.read_answers(session, ()), answers, strict=True):
        assert answer.tokens == expected.tokens
        assert np.bincount(answer.round_of).tolist() == [1] + [steps + 1] * 6
        assert answer.from_draft.sum() == 6 * steps
