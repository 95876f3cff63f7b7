"""The trie on the device against the trie on the host, and trees that mix the request's own text with other sources."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxspec.drafters.ngram.config import NgramConfig
from jaxspec.drafters.ngram.drafter import NgramDrafter, propose_tree
from jaxspec.drafters.ngram.history import NgramHistory
from jaxspec.drafters.ngram.lookup import build_tree, find_anchors, grow_anchors, reorder
from jaxspec.drafters.ngram.match import match_own_tokens
from jaxspec.drafters.ngram.mirror import TrieMirror

WIDTH = 16
texts = st.lists(st.lists(st.integers(0, 4), max_size=12), max_size=5)
contexts = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=3, max_size=3)


def config_of(match_type: str, **more) -> NgramConfig:
    defaults = {"max_trie_depth": 5, "min_bfs_breadth": 1, "max_bfs_breadth": 4, "device_nodes": 512}
    return NgramConfig(match_type=match_type, **(defaults | more))


def pad(rows: list[list[int]], behind: int = 3) -> tuple[jax.Array, jax.Array]:
    """Texts in a [B, WIDTH] array with something behind them, and the index of their last token."""
    tokens = np.full((len(rows), WIDTH), behind, np.int32)
    for row, text in zip(tokens, rows, strict=True):
        row[: len(text)] = text
    return jnp.asarray(tokens), jnp.asarray([len(text) - 1 for text in rows])


def paths_of(tree, b: int) -> set[tuple[int, ...]]:
    """Root-to-node paths of one sequence; checks that siblings differ and that padding is nobody's child."""
    tokens, parent, valid = (np.asarray(x)[b] for x in (tree.tokens, tree.parent, tree.valid))
    found = {0: ()}
    for i in range(1, len(tokens)):
        if valid[i]:
            found[i] = (*found[int(parent[i])], int(tokens[i]))
    assert len(set(found.values())) == len(found)
    return set(found.values()) - {()}


@lru_cache
def trie_matcher(config: NgramConfig, num_draft_tokens: int):
    """The device's trie alone, without the request's own text."""

    @jax.jit
    def run(trie, tokens, last):
        count = num_draft_tokens - 1
        anchors = find_anchors(trie, tokens, last, config.max_trie_depth)
        grown = grow_anchors(trie, anchors, config, count)
        backwards = jnp.arange(config.max_trie_depth)[::-1, None] * count + jnp.arange(count)
        order = jnp.broadcast_to(backwards.reshape(-1), grown.token.shape)
        return build_tree(jnp.take_along_axis(tokens, last[:, None], 1)[:, 0], reorder(grown, order), num_draft_tokens)

    return run


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
@settings(max_examples=50, deadline=None)
@given(history_texts=texts, rows=contexts, num_draft_tokens=st.sampled_from([2, 9]))
def test_device_trie_equals_host_trie(match_type, history_texts, rows, num_draft_tokens):
    config = config_of(match_type)
    history = NgramHistory(config)
    for text in history_texts:
        history.insert(text)
    trie = history.arrays().trie
    tree = trie_matcher(config, num_draft_tokens)(trie, *pad(rows))
    for b, row in enumerate(rows):
        assert paths_of(tree, b) == history.match(row, num_draft_tokens).paths()


@lru_cache
def proposer(drafter: NgramDrafter):
    return jax.jit(
        lambda history, tokens, last: propose_tree(drafter, history, tokens, last, tokens[jnp.arange(len(last)), last])
    )


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
@settings(max_examples=25, deadline=None)
@given(history_texts=texts, rows=contexts)
def test_own_text_and_trie_share_the_tree(match_type, history_texts, rows):
    drafter = NgramDrafter(9, config_of(match_type))
    history = NgramHistory(drafter.config)
    for text in history_texts:
        history.insert(text)
    tokens, last = pad(rows)
    tree = proposer(drafter)(history.arrays(), tokens, last)
    own, matched = match_own_tokens(tokens, last, depth=5, num_drafts=8)
    for b, row in enumerate(rows):
        found, anchors = paths_of(tree, b), history.trie.anchors(row)
        if not matched[b]:
            assert found == history.match(row, 9).paths()
        elif not anchors or anchors[0][0] <= matched[b]:
            assert tuple(own[b].tolist()) in found
        else:
            assert {token for token, _, _ in history.trie.children(anchors[0][1], 99)} & {path[0] for path in found}


def test_without_history_the_tree_is_the_own_chain_alone():
    tokens, last = pad([[1, 2, 3, 1, 2], [1, 2, 3]])
    drafter = NgramDrafter(5, config_of("BFS"))
    tree = proposer(drafter)(None, tokens, last)
    assert tree.is_chain and tree.max_depth == 4
    assert tree.tokens[0].tolist() == [2, 3, 1, 2, 3]
    assert tree.valid.tolist() == [[True] * 5, [True] + [False] * 4]
    other = proposer(drafter)(NgramHistory(drafter.config).arrays(), tokens, last)
    assert not other.is_chain
    assert paths_of(other, 0) == paths_of(tree, 0) and paths_of(other, 1) == set()


def test_a_device_trie_that_is_too_small_keeps_the_recent_part():
    config = config_of("BFS", device_nodes=8, max_trie_depth=3)
    history = NgramHistory(config)
    history.insert([1, 2, 3, 4])
    history.insert([5, 6, 7])
    tree = trie_matcher(config, 4)(history.arrays().trie, *pad([[5], [1], [6]]))
    assert paths_of(tree, 0) == {(6,), (6, 7)} and paths_of(tree, 2) == {(7,)}
    assert paths_of(tree, 1) <= history.match([1], 4).paths()


def test_corpora_take_their_reserved_nodes():
    config = config_of("BFS", external_sam_budget=4)
    history = NgramHistory(config)
    history.insert([2, 3, 7, 8, 9, 10, 11])
    words = {"a": [2, 3, 40, 41, 42], "b": [2, 3, 50, 51, 52], "c": [3, 60]}
    history.add_corpus(["a", "b"], words.__getitem__, "first")
    history.add_corpus(["c"], words.__getitem__, "second")
    tree = proposer(NgramDrafter(8, config))(history.arrays(), *pad([[9, 2, 3], [40, 41]]))
    assert paths_of(tree, 0) == history.match([9, 2, 3], 8).paths()
    assert paths_of(tree, 0) == {(7,), (7, 8), (7, 8, 9), (50,), (40,), (60,)}
    assert paths_of(tree, 1) == {(42,)}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=4), contexts)
@example([[0, 0], [0], [0], [0]], [[0]] * 3)  # most places that match end their document
def test_corpus_on_the_device_continues_a_longest_match(documents, rows):
    config = config_of("BFS", external_sam_budget=3)
    history = NgramHistory(config)
    history.add_corpus([str(i) for i in range(len(documents))], lambda i: documents[int(i)])
    tokens, last = pad(rows)
    tree = proposer(NgramDrafter(9, config))(history.arrays(), tokens, last)
    _, matched = match_own_tokens(tokens, last, depth=5, num_drafts=8)
    corpus = history.corpora["corpus"]
    for b, row in enumerate(rows):
        if matched[b]:
            continue
        found, all_children = paths_of(tree, b), set()
        for _, ends in corpus.anchors(row):
            all_children |= {(token,) for token, _, _ in corpus.children(ends, 99)}
        assert {path for path in found if len(path) == 1} <= all_children
        assert bool(found) == bool(all_children)


def test_what_has_not_changed_stays_on_the_device():
    words = {"a": [2, 3, 40], "b": [2, 3, 50], "c": [7, 7]}
    history = NgramHistory(config_of("BFS", external_sam_budget=3))
    history.insert([1, 2, 3])
    history.add_corpus(["a"], words.__getitem__, "one")
    history.add_corpus(["b"], words.__getitem__, "two")
    first, again = history.arrays(), history.arrays()
    assert all(x is y for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(first))

    history.insert([4, 5])
    inserted = history.arrays()
    assert inserted.trie is not first.trie and int(inserted.trie.child_count[0]) == 5
    assert all(x is y for x, y in zip(inserted.corpora, first.corpora, strict=True))
    history.remove_corpus("one")
    assert history.arrays().corpora == (first.corpora[1],)
    history.add_corpus(["c"], words.__getitem__, "one")
    put_back = history.arrays().corpora
    assert put_back[0].tokens[:2].tolist() == [7, 7] and put_back[1] is first.corpora[1]


def device_grams(arrays) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The preferred children of every n-gram on the device, by path."""
    found, waiting = {}, [((), 0)]
    while waiting:
        path, node = waiting.pop()
        count = min(int(arrays.child_count[node]), arrays.children.shape[1])
        children = [int(child) for child in arrays.children[node][:count]]
        found[path] = tuple(int(arrays.token[child]) for child in children)
        waiting += [((*path, token), child) for token, child in zip(found[path], children, strict=True)]
    return found


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
@pytest.mark.parametrize("room", [dict(device_nodes=9), dict(device_nodes=40, capacity=24), dict(device_nodes=40)])
@settings(max_examples=40, deadline=None)
@given(calls=st.lists(texts, min_size=2, max_size=5))
def test_what_is_copied_piece_by_piece_equals_what_is_copied_at_once(match_type, room, calls):
    """Over evictions in the trie, on the device, in both and in none."""
    config = config_of(match_type, max_bfs_breadth=3, **room)
    history, other = NgramHistory(config), NgramHistory(config)
    for call in calls:
        for text in call:
            history.insert(text)
            other.insert(text)
            len(other.trie)  # takes the text in at once; those of `history` wait for each other
        piecewise = jax.device_get(history.arrays().trie)
    assert device_grams(piecewise) == device_grams(jax.device_get(TrieMirror(history.trie).export()))
    if "capacity" not in room:  # a full trie's frequencies depend on when it forgot
        assert device_grams(piecewise) == device_grams(jax.device_get(other.arrays().trie))


def test_arrays_of_an_earlier_call_do_not_change():
    history = NgramHistory(config_of("PROB"))
    history.insert([1, 2, 3, 1, 2, 4])
    earlier = history.arrays().trie
    before = jax.device_get(earlier)
    history.insert([1, 2, 4, 2, 4, 4])
    history.arrays()
    assert all((x == y).all() for x, y in zip(jax.tree.leaves(before), jax.device_get(jax.tree.leaves(earlier)), strict=True))
