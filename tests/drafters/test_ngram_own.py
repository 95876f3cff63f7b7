"""Matching in a request's own tokens, against a search written with plain lists."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config import ConfigError
from jaxspec.drafters.ngram import match as ngram_match
from jaxspec.drafters.ngram.config import NgramConfig
from jaxspec.drafters.ngram.match import match_own_tokens

WIDTH, DEPTH, DRAFTS = 24, 4, 6


def search(text: list[int], depth: int, count: int) -> tuple[list[int], int]:
    """The longest, then newest earlier end of the text's suffix, continued by copying."""
    found = []
    for place in range(len(text) - 1):
        matched = 0
        while matched < min(depth, place + 1) and text[place - matched] == text[-1 - matched]:
            matched += 1
        if matched:
            found.append((-matched, -place))
    if not found:
        return [], 0
    matched, place = min(found)
    copied = list(text)
    for step in range(count):
        copied.append(copied[-place + 1 + step])
    return copied[len(text) :], -matched


def matcher():
    return jax.jit(lambda t, n: match_own_tokens(t, n, depth=DEPTH, num_drafts=DRAFTS))


@cache
def in_blocks(block: int):
    """The match with blocks of another size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_match, "BLOCK", block)
        run = matcher()
        run(jnp.zeros((3, WIDTH), jnp.int32), jnp.zeros(3, jnp.int32))
    return run


@pytest.mark.parametrize("block", [4, 7, 512])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=WIDTH), min_size=3, max_size=3), st.integers(-2, 3))
def test_equals_a_plain_search(block, texts, behind):
    tokens = np.full((3, WIDTH), behind, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    paths, matched = in_blocks(block)(jnp.asarray(tokens), jnp.asarray([len(t) - 1 for t in texts], jnp.int32))
    for b, text in enumerate(texts):
        path, length = search(text, DEPTH, DRAFTS)
        assert matched[b] == length
        assert not length or paths[b].tolist() == path


@pytest.mark.parametrize("alphabet", [2, 40, 10**6])
def test_blocks_change_no_bit(monkeypatch, alphabet):
    width = 3 * ngram_match.BLOCK + 100
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, alphabet, (4, width)), jnp.int32)
    length = jnp.asarray([0, 511, 1024, width - 2])
    blocks = [matcher()(tokens, length - back) for back in (0, 1)]
    monkeypatch.setattr(ngram_match, "BLOCK", width)
    for back, found in enumerate(blocks):
        for x, y in zip(found, matcher()(tokens, length - back), strict=True):
            np.testing.assert_array_equal(x, y)


def test_periodic_text_is_continued_with_its_period():
    tokens = jnp.asarray([[7, 5, 6, 5, 6, 0, 0, 0]], jnp.int32)
    paths, matched = match_own_tokens(tokens, jnp.asarray([4]), depth=3, num_drafts=5)
    assert matched.tolist() == [2]
    assert paths.tolist() == [[5, 6, 5, 6, 5]]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"max_trie_depth": 1}, "max_trie_depth=1"),
        ({"min_bfs_breadth": 0}, "min_bfs_breadth=0"),
        ({"min_bfs_breadth": 4, "max_bfs_breadth": 3}, "max_bfs_breadth=3"),
        ({"match_type": "DFS"}, "match_type='DFS'"),
        ({"capacity": 17}, "capacity=17.*at least 18"),
        ({"external_corpus_path": "x.jsonl"}, "external_sam_budget=0"),
        ({"external_sam_budget": -1}, "external_sam_budget=-1"),
        ({"external_corpus_max_tokens": 0}, "external_corpus_max_tokens=0"),
    ],
)
def test_config_errors_name_the_parameter(change, word):
    with pytest.raises(ConfigError, match=word):
        NgramConfig(**change)


def test_budget_must_fit_the_tree():
    config = NgramConfig(external_sam_budget=8, match_type="prob")
    assert config.match_type == "PROB"
    config.check_num_draft_tokens(9)
    with pytest.raises(ConfigError, match="external_sam_budget=8.*num_draft_tokens=8"):
        config.check_num_draft_tokens(8)
    with pytest.raises(ConfigError, match="num_draft_tokens=1"):
        NgramConfig().check_num_draft_tokens(1)
