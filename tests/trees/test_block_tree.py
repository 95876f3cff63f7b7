"""Best-first trees over a block against a heap on the host, with ties, impossible candidates and budgets of every size."""

import heapq
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.trees import block_tree
from jaxspec.trees.block_tree import best_first
from jaxspec.trees.tree import unpack_bits

BUILD = jax.jit(best_first, static_argnames=("num_nodes", "whole_families"))
DEPTHS, WIDTH, BATCH = 3, 3, 4


def on_the_host(root: int, log_probs: np.ndarray, tokens: np.ndarray, num_nodes: int) -> list[tuple]:
    """(token, parent, depth) of the best nodes, in the order (score, depth, rank, token, parent)."""
    nodes, heap = [(root, -1, 0)], []
    scores = [np.float32(0)]

    def push(parent: int) -> None:
        depth = nodes[parent][2]
        if depth < len(log_probs):
            for rank, (own, token) in enumerate(zip(log_probs[depth], tokens[depth], strict=True)):
                if np.isfinite(own):
                    score = np.float32(scores[parent] + own)
                    heapq.heappush(heap, (-score, depth + 1, rank, int(token), parent))

    push(0)
    while heap and len(nodes) < num_nodes:
        score, depth, _, token, parent = heapq.heappop(heap)
        nodes.append((token, parent, depth))
        scores.append(-score)
        push(len(nodes) - 1)
    return nodes


def families_on_the_host(root: int, log_probs: np.ndarray, tokens: np.ndarray, num_nodes: int) -> list[tuple]:
    """JetSpec's way: the best node without children gets them all."""
    nodes, heap, scores = [(root, -1, 0)], [(np.float32(0), 0, 0, -1, 0)], [np.float32(0)]
    while heap and len(nodes) < num_nodes:
        *_, index = heapq.heappop(heap)
        depth = nodes[index][2]
        if depth == len(log_probs):
            continue
        for rank, (own, token) in enumerate(zip(log_probs[depth], tokens[depth], strict=True)):
            if len(nodes) < num_nodes:
                scores.append(np.float32(scores[index] + own))
                nodes.append((int(token), index, depth + 1))
                heapq.heappush(heap, (-scores[-1], depth + 1, rank, index, len(nodes) - 1))
    return nodes


# Few distinct values: many ties. The last is no candidate at all.
VALUES = st.sampled_from([-0.25, -0.5, -0.5, -1.0, -2.0, -np.inf])
ROWS = st.lists(VALUES, min_size=BATCH * DEPTHS * WIDTH, max_size=BATCH * DEPTHS * WIDTH)


def searched(*args, num_nodes: int):
    """The search, also where a ranking would do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_tree, "LARGEST_TABLE", 0)
        block_tree._reachable.cache_clear()
        tree = SEARCH(*args, num_nodes=num_nodes)
        block_tree._reachable.cache_clear()
        return tree


SEARCH = jax.jit(lambda *args, num_nodes: best_first(*args, num_nodes=num_nodes), static_argnames="num_nodes")
WAYS = {"ranked": BUILD, "searched": searched, "families": partial(BUILD, whole_families=True)}


@pytest.mark.parametrize("num_nodes", [1, 2, 9, 45])  # 45 exceeds 1 + 3 + 9 + 27
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(values=ROWS)
def test_equals_a_heap_on_the_host(num_nodes, way, values):
    whole_families = way == "families"
    values = np.array(values, np.float32)
    values = np.where(np.isfinite(values), values, -4.0) if whole_families else values  # there they would take up room
    log_probs = -np.sort(-values.reshape(BATCH, DEPTHS, WIDTH), axis=-1).astype(np.float32)
    tokens = np.random.default_rng(0).permuted(np.tile(np.arange(9), (BATCH, DEPTHS, 1)), axis=-1)[..., :WIDTH].astype(np.int32)
    root = np.arange(BATCH, dtype=np.int32)
    tree = WAYS[way](root, log_probs, tokens, num_nodes=num_nodes)
    assert tree.num_nodes == num_nodes
    for row in range(BATCH):
        reference = families_on_the_host if whole_families else on_the_host
        expected = reference(int(root[row]), log_probs[row], tokens[row], num_nodes)
        count = int(tree.valid[row].sum())
        got = zip(tree.tokens[row].tolist(), tree.parent[row].tolist(), tree.depth[row].tolist(), strict=True)
        assert list(got)[:count] == expected
        assert np.asarray(tree.valid[row]).tolist() == [i < count for i in range(num_nodes)]


def test_the_best_tree_holds_more_mass_than_whole_families():
    """What a tree of given size is worth is the sum of its nodes' probabilities: the expected accepted drafts."""
    rng = np.random.default_rng(1)
    log_probs = -np.sort(-np.log(rng.dirichlet(np.full(9, 0.3), (BATCH, DEPTHS)) + 1e-9), axis=-1)[..., :WIDTH].astype(
        np.float32
    )
    tokens = np.broadcast_to(np.arange(WIDTH, dtype=np.int32), log_probs.shape)
    worth = []
    for whole_families in (False, True):
        tree = BUILD(np.zeros(BATCH, np.int32), log_probs, tokens, num_nodes=9, whole_families=whole_families)
        assert bool(tree.valid.all())
        assert tree.max_depth == DEPTHS
        depth, token = np.maximum(np.asarray(tree.depth) - 1, 0), np.asarray(tree.tokens)
        own = np.where(np.asarray(tree.depth) > 0, log_probs[np.arange(BATCH)[:, None], depth, token], 0)
        paths = np.einsum("BTU,BU->BT", np.asarray(unpack_bits(tree.ancestors, 9)), own)
        worth.append(np.exp(paths).sum(1))
    assert (worth[0] >= worth[1]).all()
    assert (worth[0] > worth[1]).any()


def test_a_node_is_a_chain_when_there_is_one_candidate():
    log_probs = np.full((1, DEPTHS, 1), -0.5, np.float32)
    tree = BUILD(np.zeros(1, np.int32), log_probs, np.array([[[4], [5], [6]]], np.int32), num_nodes=4)
    assert tree.tokens[0].tolist() == [0, 4, 5, 6]
    assert tree.parent[0].tolist() == [-1, 0, 1, 2]


def test_large_trees_are_searched():
    assert block_tree._reachable(15, 8, 32) is not None
    assert block_tree._reachable(15, 8, 64) is None
