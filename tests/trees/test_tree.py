from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from jaxspec.models.layers import gated as activated
from jaxspec.trees.tree import (
    candidate_parents,
    chain,
    from_parents,
    grow,
    pack_bits,
    root_only,
    select_candidates,
    unpack_bits,
)
from pallas_kernels.product.api import product
from pallas_kernels.vocabulary.api import top_k, top_k_probabilities

NODES, DEPTH = 8, 4
build = jax.jit(partial(from_parents, max_depth=DEPTH))


def as_numpy(tree):
    mask = np.asarray(unpack_bits(tree.ancestors, tree.num_nodes))
    return [np.asarray(x) for x in (tree.tokens, tree.parent, tree.depth, tree.valid)] + [mask]


def assert_sound(tree):
    """What every other module relies on."""
    _, parent, depth, valid, mask = as_numpy(tree)
    for b in range(len(parent)):
        assert valid[b, 0] and parent[b, 0] == -1 and depth[b, 0] == 0
        for i in range(tree.num_nodes):
            if not valid[b, i]:
                assert parent[b, i] == -1 and depth[b, i] == 0
                assert np.flatnonzero(mask[b, i]).tolist() == [i]
            elif i:
                up = parent[b, i]
                assert 0 <= up < i and valid[b, up]
                assert depth[b, i] == depth[b, up] + 1 <= tree.max_depth
                assert (mask[b, i] == (mask[b, up] | (np.arange(tree.num_nodes) == i))).all()


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(-3, NODES + 2), min_size=NODES, max_size=NODES),
    st.lists(st.booleans(), min_size=NODES, max_size=NODES),
)
def test_any_links_give_a_sound_tree(parent, valid):
    tree = build(jnp.arange(NODES)[None], jnp.asarray([parent], jnp.int32), jnp.asarray([valid]))
    assert_sound(tree)
    kept = np.asarray(tree.valid)[0]
    for i in range(1, NODES):  # nothing that hangs properly is lost
        steps, node = 0, i
        while node > 0 and valid[node] and 0 <= parent[node] < node:
            node, steps = parent[node], steps + 1
        assert kept[i] == (node == 0 and steps <= DEPTH)


@pytest.mark.parametrize(
    "parent, kept",
    [
        ([-1, 1, 0, 2], [1, 0, 1, 1]),  # self-link
        ([-1, 2, 1, 0], [1, 0, 0, 1]),  # cycle of two
        ([-1, 3, 0, 1], [1, 0, 1, 0]),  # child before its parent
        ([-1, 0, 9, 2], [1, 1, 0, 0]),  # link out of range and its orphan
        ([3, 0, 1, 2], [1, 1, 1, 1]),  # a link at the root is ignored
        ([-1, -1, -1, -1], [1, 0, 0, 0]),  # nothing but the root
    ],
)
def test_malformed_links_become_padding(parent, kept):
    build = jax.jit(partial(from_parents, max_depth=3))
    tree = build(jnp.arange(4)[None], jnp.asarray([parent]), jnp.ones((1, 4), bool))
    assert np.asarray(tree.valid)[0].tolist() == [bool(k) for k in kept]
    assert_sound(tree)


def test_depth_is_bounded():
    build = jax.jit(partial(from_parents, max_depth=3))
    tree = build(jnp.arange(6)[None], jnp.arange(-1, 5)[None], jnp.ones((1, 6), bool))
    assert np.asarray(tree.valid)[0].tolist() == [True] * 4 + [False] * 2
    assert_sound(tree)


def test_chain_ends_at_the_first_invalid_node():
    tree = chain(jnp.arange(5)[None], jnp.asarray([[False, True, False, True, True]]))
    assert np.asarray(tree.valid)[0].tolist() == [True, True, False, False, False]
    assert np.asarray(tree.parent)[0].tolist() == [-1, 0, -1, -1, -1]
    assert tree.max_depth == 4 and tree.is_chain


def test_root_only_is_a_chain_of_one():
    tree = root_only(jnp.asarray([4, 5]))
    assert tree.num_nodes == 1 and tree.max_depth == 0 and tree.is_chain
    assert_sound(tree)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([1, 7, 31, 32, 33, 64, 65]), st.integers(0, 2**32 - 1))
def test_packing_round_trip(bits, seed):
    mask = np.random.default_rng(seed).random((3, 2, bits)) < 0.5
    words = jax.jit(pack_bits)(jnp.asarray(mask))
    assert words.shape == (3, 2, -(-bits // 32)) and words.dtype == jnp.uint32
    np.testing.assert_array_equal(jax.jit(unpack_bits, static_argnums=1)(words, bits), mask)
    for j in range(bits):
        np.testing.assert_array_equal((np.asarray(words)[..., j // 32] >> (j % 32)) & 1, mask[..., j])


@pytest.mark.parametrize("size, k", [(7, 7), (200, 3), (1500, 4), (1500, 20), (1601, 8), (3000, 40)])
def test_top_k_breaks_ties_towards_the_lower_index(size, k):
    values = np.random.default_rng(size).integers(0, 5, (3, size)).astype(np.float32)
    best, where = top_k(jnp.asarray(values), k)
    want = np.argsort(-values, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(where, want)
    np.testing.assert_array_equal(best, np.take_along_axis(values, want, 1))


def random_growth(seed, num_steps, topk, num_draft_tokens, decimals=None):
    """Grows a tree from random distributions over 50 tokens; also these, and what every level was told."""
    batch = 2
    random = np.random.default_rng(seed)
    draws = [np.sort(random.dirichlet(np.ones(50) * 0.3, (batch, topk)))[..., ::-1][..., :topk] for _ in range(num_steps)]
    if decimals is not None:  # makes ties
        draws = [np.maximum(np.round(d, decimals), 10.0**-decimals) for d in draws]
    draws = [jnp.asarray(np.ascontiguousarray(d).astype(np.float32)) for d in draws]
    ids = [jnp.asarray(np.argsort(random.random((batch, topk, 50)))[..., :topk].astype(np.int32)) for _ in range(num_steps)]

    @jax.jit
    def run():
        seen = []

        def expand(level, tokens, parent, visible, aux):
            seen.append((parent, visible))
            return draws[level + 1], ids[level + 1], aux

        sizes = {"num_steps": num_steps, "topk": topk, "num_draft_tokens": num_draft_tokens}
        tree, _ = grow(jnp.asarray([3, 4]), draws[0][:, 0], ids[0][:, 0], expand, None, **sizes)
        return tree, seen

    tree, seen = run()
    return tree, draws, ids, seen


@pytest.mark.parametrize("decimals", [None, 1])
@pytest.mark.parametrize("num_steps, topk, nodes", [(1, 4, 4), (3, 2, 6), (3, 3, 22), (4, 4, 8), (5, 1, 6)])
def test_grown_trees(num_steps, topk, nodes, decimals):
    """Also at the capacity boundary: (3, 3, 22) keeps every candidate."""
    tree, draws, ids, _ = random_growth(num_steps, num_steps, topk, nodes, decimals)
    assert_sound(tree)
    assert tree.num_nodes == nodes and tree.max_depth == num_steps
    tokens, parent, _, valid, _ = as_numpy(tree)
    assert valid.all()
    for b in range(2):
        siblings = [(parent[b, i], tokens[b, i]) for i in range(1, nodes)]
        assert len(set(siblings)) == nodes - 1


@pytest.mark.parametrize("num_steps, topk, nodes", [(3, 2, 6), (4, 4, 8), (4, 3, 16)])
def test_kept_candidates_are_the_best_ones(num_steps, topk, nodes):
    """A slow beam search over explicit paths gives the same set of paths."""
    tree, draws, ids, _ = random_growth(7, num_steps, topk, nodes)
    tokens, parent, *_ = as_numpy(tree)
    for b in range(2):
        beams = [((int(ids[0][b, 0, j]),), float(draws[0][b, 0, j])) for j in range(topk)]
        candidates = list(beams)
        for level in range(1, num_steps):
            children = [
                (path + (int(ids[level][b, i, j]),), score * float(draws[level][b, i, j]))
                for i, (path, score) in enumerate(beams)
                for j in range(topk)
            ]
            candidates += children
            beams = sorted(children, key=lambda c: -c[1])[:topk]
        want = {path for path, _ in sorted(candidates, key=lambda c: -c[1])[: nodes - 1]}
        got = set()
        for i in range(1, nodes):
            path, node = [], i
            while node > 0:
                path.append(int(tokens[b, node]))
                node = parent[b, node]
            got.add(tuple(path[::-1]))
        assert got == want


def test_beams_see_their_own_ancestors():
    topk = 3
    *_, seen = random_growth(11, 4, topk, 10)
    for b in range(2):
        lineages = [set() for _ in range(topk)]
        for level, (parent, visible) in enumerate(seen):
            before = lineages if level else [set()] * topk
            lineages = [before[int(parent[b, j])] | {level * topk + j} for j in range(topk)]
            mask = np.asarray(unpack_bits(visible, (level + 1) * topk))[b]
            assert [set(np.flatnonzero(row).tolist()) for row in mask] == lineages


def test_ties_keep_the_lower_index():
    scores = jnp.asarray([[0.5, 0.5, 0.5, 0.5, 0.5, 0.5]])
    select = jax.jit(partial(select_candidates, num_draft_tokens=4, max_depth=2))
    tree, kept = select(jnp.asarray([9]), scores, jnp.arange(6)[None], candidate_parents(jnp.asarray([[[0, 1]]]), 2))
    assert np.asarray(kept)[0].tolist() == [0, 1, 2]
    assert np.asarray(tree.parent)[0].tolist() == [-1, 0, 0, 1]


@pytest.mark.parametrize(
    "parents, valid",
    [
        ([-1, -1, 5, 0], [True, True, True, False, True]),  # parent not among the kept
        ([-1, 2, 1, 0], [True, True, False, False, True]),  # cycle
        ([0, -1, 1, 2], [True, False, True, True, True]),  # self-link
        ([-1, 0, 1, 2], [True, True, True, True, False]),  # too deep
        ([-1, 99, -5, 1], [True, True, False, True, False]),  # out of range; any negative index means the root
    ],
)
def test_malformed_candidates_become_padding(parents, valid):
    scores = jnp.asarray([[0.4, 0.3, 0.2, 0.1]])
    select = jax.jit(partial(select_candidates, num_draft_tokens=5, max_depth=3))
    tree, _ = select(jnp.asarray([9]), scores, jnp.arange(4)[None], jnp.asarray([parents]))
    assert np.asarray(tree.valid)[0].tolist() == valid
    assert_sound(tree)


def test_nan_scores_give_a_sound_tree():
    scores = jnp.asarray([[jnp.nan, 0.3, jnp.nan, 0.2, jnp.nan, 0.1]])
    parents = candidate_parents(jnp.asarray([[[0, 1]]]), 2)
    select = jax.jit(partial(select_candidates, num_draft_tokens=4, max_depth=2))
    tree, _ = select(jnp.asarray([9]), scores, jnp.arange(6)[None], parents)
    assert_sound(tree)


@pytest.mark.parametrize(
    "call",
    [
        lambda: chain(jnp.zeros((2, 3, 4), jnp.int32)),
        lambda: activated(jnp.zeros((2, 3), jnp.int32), {}, "silu"),
        lambda: product(jnp.zeros((2, 3)), jnp.zeros((4, 5))),
    ],
    ids=["trees", "models", "kernels"],
)
def test_shapes_are_checked_in_tests(call):
    pytest.importorskip("beartype")
    with pytest.raises(TypeCheckError):
        call()


@pytest.mark.parametrize(("size", "k"), [(50, 3), (5000, 3), (5000, 1), (5000, 9)])
def test_top_k_probabilities_are_those_of_the_softmax(size, k):
    logits = 3 * jax.random.normal(jax.random.key(size), (2, 3, size))
    probs, where = top_k_probabilities(logits, k)
    best, expected = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), k)
    np.testing.assert_array_equal(where, expected)
    np.testing.assert_allclose(probs, best, rtol=1e-5)
