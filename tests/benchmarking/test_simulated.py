"""Simulated acceptance: the wanted mean, along real paths, and the real verifier where it accepts enough."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.benchmarking.simulated import SimulatedAcceptance
from jaxspec.config import ConfigError
from jaxspec.sampling import SamplingParams, row_keys, sampling_state
from jaxspec.trees.tree import chain, from_parents, root_only
from jaxspec.verify import Verifier

VOCAB = 16
# 0 ─ 1 ─ 3 ─ 5, 0 ─ 2 ─ 4: the deepest node is 5.
PARENTS, TOKENS = [-1, 0, 0, 1, 2, 3], [9, 1, 2, 3, 4, 5]


@functools.partial(jax.jit, static_argnums=(0, 1))
def tree_of(batch: int, max_depth: int = 3):
    tokens, parents = jnp.tile(jnp.array(TOKENS), (batch, 1)), jnp.tile(jnp.array(PARENTS), (batch, 1))
    return from_parents(tokens, parents, jnp.ones(tokens.shape, bool), max_depth=max_depth)


def run(length: float, tree, wanted_by_target):
    """The acceptance with a target whose argmax behind every node is `wanted_by_target`."""
    batch, nodes = tree.tokens.shape
    logits = jnp.zeros((batch, nodes, VOCAB)).at[:, :, wanted_by_target].set(1.0)
    sampling = sampling_state([SamplingParams(temperature=0.0)] * batch, VOCAB, [[]] * batch, [True] * batch)
    keys = row_keys(range(batch))
    lengths = jnp.arange(batch, dtype=jnp.int32)
    return jax.tree.map(np.asarray, jax.jit(SimulatedAcceptance(length))(tree, logits, sampling, keys, lengths))


@pytest.mark.parametrize(("length", "path"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 3]), (4, [0, 1, 3, 5]), (9, [0, 1, 3, 5])])
def test_whole_lengths_follow_the_path_to_the_deepest_node(length, path):
    found = run(length, tree_of(3), wanted_by_target=7)
    drafts = len(path) - 1
    assert found.num_drafts.tolist() == [drafts] * 3
    assert found.path.tolist() == [path + [-1] * (4 - len(path))] * 3
    expected = [TOKENS[n] for n in path[1:]] + [7]
    assert found.tokens[:, : drafts + 1].tolist() == [expected] * 3
    assert (found.tokens[:, drafts + 1 :] == 0).all()


def test_fractions_mix_floor_and_ceiling_to_the_wanted_mean():
    found = run(2.3, tree_of(4000), wanted_by_target=7)
    assert set(found.num_drafts.tolist()) == {1, 2}
    mean = found.num_drafts.mean() + 1
    assert abs(mean - 2.3) < 4 * np.sqrt(0.3 * 0.7 / 4000)


def test_the_real_path_is_taken_where_it_is_long_enough():
    # The target wants token 2 behind the root: node 2 is accepted, which is not on the deepest path.
    found = run(2, tree_of(2), wanted_by_target=2)
    assert found.path.tolist() == [[0, 2, -1, -1]] * 2
    assert run(3, tree_of(2), wanted_by_target=2).path.tolist() == [[0, 1, 3, -1]] * 2


def test_chains_and_single_roots_give_what_they_have():
    drafts = chain(jnp.array([[9, 1, 2]]), jnp.array([[True, True, False]]))
    assert run(3, drafts, wanted_by_target=7).tokens.tolist() == [[1, 7, 0]]
    alone = run(3, root_only(jnp.array([4, 5])), wanted_by_target=7)
    assert alone.num_drafts.tolist() == [0, 0]
    assert alone.tokens.tolist() == [[7], [7]]


def test_a_real_acceptance_of_the_wanted_length_is_reproduced_exactly():
    tree = chain(jnp.array([[9, 7, 7, 7]]))
    logits = jnp.zeros((1, 4, VOCAB)).at[:, :, 7].set(1.0)
    sampling = sampling_state([SamplingParams(temperature=0.0)], VOCAB, [[]], [True])
    arguments = (tree, logits, sampling, row_keys([0]), jnp.array([5]))
    for ours, real in zip(jax.jit(SimulatedAcceptance(4))(*arguments), jax.jit(Verifier())(*arguments), strict=True):
        np.testing.assert_array_equal(ours, real)


def test_less_than_one_token_a_round_is_refused():
    with pytest.raises(ConfigError, match="0.5"):
        SimulatedAcceptance(0.5)
