"""The host's side: trie with eviction, corpora, their files and errors, and SGLang's golden trees."""

import importlib.util
import json
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config import ConfigError
from jaxspec.drafters.ngram.config import NgramConfig
from jaxspec.drafters.ngram.corpus import SEPARATOR, Corpus, CorpusError, read_jsonl
from jaxspec.drafters.ngram.history import NgramHistory
from jaxspec.drafters.ngram.store import NodeStore
from jaxspec.drafters.ngram.trie import NgramTrie

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "fixtures" / "ngram_match"


@pytest.fixture(scope="module")
def check_ngram():
    spec = importlib.util.spec_from_file_location("ngram_check", TESTS / "parity" / "checks" / "ngram.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.check_ngram


def test_trees_equal_sglang(check_ngram):
    assert check_ngram(GOLDEN) == 0


def test_the_check_notices_a_changed_tree(check_ngram, tmp_path):
    shutil.copy(GOLDEN / "case.json", tmp_path)
    arrays = dict(np.load(GOLDEN / "io.npz"))
    arrays["set1.bfs.tokens"][0, 3] += 1
    np.savez(tmp_path / "io.npz", **arrays)
    with pytest.raises(AssertionError, match="set1.bfs, row 0"):
        check_ngram(tmp_path)


def grams(trie: NgramTrie) -> dict[tuple[int, ...], int]:
    """Every stored n-gram with its frequency."""
    found, waiting = {}, [((), 0)]
    while waiting:
        path, state = waiting.pop()
        for token, child, freq in trie.children(state, 10**6):
            found[(*path, token)] = freq
            waiting.append(((*path, token), child))
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=10), max_size=5))
def test_trie_counts_every_ngram(texts):
    trie, expected = NgramTrie(NgramConfig(max_trie_depth=4)), {}
    for text in texts:
        trie.insert(text)
        for start in range(len(text)):
            for end in range(start + 1, min(start + 4, len(text)) + 1):
                expected[tuple(text[start:end])] = expected.get(tuple(text[start:end]), 0) + 1
    assert grams(trie) == expected and len(trie) == len(expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=10), min_size=1, max_size=6), st.integers(4, 20))
def test_a_full_trie_keeps_what_came_last(texts, capacity):
    trie = NgramTrie(NgramConfig(max_trie_depth=4, capacity=capacity))
    for text in texts:
        trie.insert(text)
        stored = grams(trie)
        assert len(stored) == len(trie) <= capacity
        assert tuple(text[-1:]) in stored
    recent = trie.recent(max(1, len(trie) // 2))
    assert set(trie.store.parent[recent].tolist()) <= {0, *recent.tolist()}


class PlainTrie:
    """The least recently used n-gram leaves when there is no room for another; one dictionary, oldest first."""

    def __init__(self, depth: int, capacity: int):
        self.depth, self.capacity, self.freq = depth, capacity, {}

    def insert(self, text: list[int]) -> None:
        for start in range(len(text)):
            paths = [tuple(text[start:end]) for end in range(min(start + self.depth, len(text)), start, -1)]
            known = {path: self.freq.pop(path) for path in paths if path in self.freq}
            while len(self.freq) + len(paths) > self.capacity:
                del self.freq[next(iter(self.freq))]
            self.freq |= {path: known.get(path, 0) + 1 for path in paths}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8), st.integers(3, 40))
def test_a_full_trie_forgets_the_least_recently_used(texts, capacity):
    """The same n-grams as one at a time. Frequencies too, where a text is inserted one start at a time."""
    trie, plain = NgramTrie(NgramConfig(max_trie_depth=3, capacity=capacity)), PlainTrie(3, capacity)
    for text in texts:
        trie.insert(text)
        plain.insert(text)
        stored = grams(trie)
        assert stored.keys() == plain.freq.keys()
        if capacity < 6:
            assert stored == plain.freq
    store = trie.store
    nodes, above = store.recent(capacity)
    assert [int(store.parent[n]) for n in nodes] == [0 if a < 0 else int(nodes[a]) for a in above]
    assert len(store.nodes()) == len(trie) == len(nodes)
    assert (store.find(store.key[nodes]) == nodes).all()


@pytest.mark.parametrize("capacity", [1, 7, 100, 5000])
def test_the_store_over_many_turns_of_its_ring(capacity):
    """Its contents are those of a dictionary whose oldest entries leave, whatever mix of old and other keys is used."""
    random, store, expected = np.random.default_rng(capacity), NodeStore(capacity), {}
    for _ in range(60):
        keys = np.unique(random.integers(1, 3 * capacity + 2, random.integers(1, capacity + 1)).astype(np.uint64))
        random.shuffle(keys)
        store.use(keys, 1, keys.astype(np.int32), np.full(keys.size, -1))
        for key in keys.tolist():
            expected[key] = expected.pop(key, 0) + 1
        while len(expected) > capacity:
            del expected[next(iter(expected))]
        nodes, _ = store.recent(capacity)
        assert dict(zip(store.key[nodes].tolist(), store.freq[nodes].tolist(), strict=True)) == expected
        assert store.key[nodes].tolist() == list(reversed(expected))


def answers(count: int, length: int) -> np.ndarray:
    """Token ids with the frequencies of words, so that short n-grams repeat and long ones do not."""
    return (np.random.default_rng(0).zipf(1.3, (count, length)) % 50_000).astype(np.int32)


def test_insertions_cost_little():
    """At the default parameters: bytes a node of a full trie, and time of an answer with what goes to the device.

    It was 421 bytes and 0.9 s; the bounds leave room for busy processors.
    """
    history = NgramHistory(NgramConfig(capacity=300_000))
    for text in answers(100, 256):
        history.insert(text)
    assert len(history.trie) == 300_000 and history.trie.store.nbytes <= 40 * 300_000
    jax.block_until_ready(history.arrays())
    times = []
    for text in answers(20, 256):
        begun = time.process_time()
        history.insert(text[::-1].tolist())
        jax.block_until_ready(history.arrays())
        times.append(time.process_time() - begun)
    assert min(times) < 0.015, f"{min(times) * 1e3:.1f} ms"


@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_answers(count):
    """100,000 answers of 64 tokens go through a full trie in a minute."""
    history, texts = NgramHistory(), answers(count, 64)
    begun = time.process_time()
    for text in texts:
        history.insert(text)
    stored = len(history.trie)
    assert time.process_time() - begun < max(6e-4 * count, 6)
    assert tuple(texts[-1][40:49].tolist()) in history.match(texts[-1][:40], 10).paths()
    assert stored == min(stored, 10_000_000) and history.trie.store.nbytes <= 42 * max(stored, 10**6)


def occurrences(tokens: list[int], suffix: tuple[int, ...]) -> list[int]:
    return [i for i in range(len(tokens)) if i + 1 >= len(suffix) and tuple(tokens[i + 1 - len(suffix) : i + 1]) == suffix]


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=4),
    context=st.lists(st.integers(0, 3), min_size=1, max_size=8),
)
def test_corpus_equals_a_plain_search(match_type, documents, context):
    tokens = [token for document in documents for token in (*document, SEPARATOR)]
    config = NgramConfig(max_trie_depth=5, match_type=match_type)
    corpus, expected, last = Corpus.build(tokens, config), [], None
    for depth in range(min(5, len(context)), 0, -1):
        ends = occurrences(tokens, tuple(context[-depth:]))
        if ends and ends != last and any(tokens[end + 1] != SEPARATOR for end in ends):
            expected.append((depth, ends))
        last = ends
    assert [(depth, sorted(ends.tolist())) for depth, ends in corpus.anchors(context)] == expected
    for _, ends in corpus.anchors(context):
        following = [(tokens[end + 1], end) for end in ends if tokens[end + 1] != SEPARATOR]
        rank = {}
        for token, end in following:
            count, latest = rank.get(token, (0, -1))
            rank[token] = (count + 1, max(latest, end))
        if match_type == "BFS":
            order = sorted((-latest, t) for t, (_, latest) in rank.items())
        else:
            order = sorted((-count, t) for t, (count, _) in rank.items())
        assert [(t, n) for t, _, n in corpus.children(ends, 2)] == [(t, rank[t][0]) for _, t in order[:2]]


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_jsonl_corpus_is_loaded_without_special_tokens(tmp_path):
    calls = []

    class Tokenizer:
        def encode(self, text, add_special_tokens=True):
            calls.append(add_special_tokens)
            return list(text.encode())

    path = write(tmp_path / "c.jsonl", json.dumps("abc"), "", json.dumps("bcd"))
    config = NgramConfig(external_corpus_path=str(path), external_sam_budget=3)
    history = NgramHistory(config, Tokenizer())
    assert calls == [False, False] and history.corpora[str(path)].num_tokens == 6
    assert history.match(list(b"xb"), 8).paths() == {(99,), (99, 100)}
    assert "6 tokens" in repr(history)
    history.remove_corpus(str(path))
    assert history.match(list(b"xb"), 8).num_matched == 0
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        NgramHistory(config)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{oops", "line 2: not JSON"),
        ('{"text": "a"}', "line 2: a JSON dict"),
        ("[1]", "line 2: a JSON list"),
        ("7", "line 2: a JSON int"),
        ("[" * 100_000, "line 2: no document"),
        ("1" * 10_000, "line 2: no document"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path, line, words):
    with pytest.raises(CorpusError, match=words):
        list(read_jsonl(write(tmp_path / "c.jsonl", '"fine"', line)))


def test_jsonl_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(b'"fine"\n"caf\xe9"\n')
    with pytest.raises(CorpusError, match="line 2: not UTF-8"):
        list(read_jsonl(tmp_path / "c.jsonl"))


def test_corpus_errors(tmp_path):
    history = NgramHistory(NgramConfig(external_corpus_max_tokens=4, external_sam_budget=2))
    encode = lambda text: list(text.encode())  # noqa: E731
    assert issubclass(CorpusError, ConfigError)
    with pytest.raises(CorpusError, match="is not a file"):
        history.add_corpus(tmp_path / "none.jsonl", encode)
    with pytest.raises(CorpusError, match="empty"):
        history.add_corpus([""], encode)
    with pytest.raises(CorpusError, match="external_corpus_max_tokens=4"):
        history.add_corpus(["abc", "de"], encode)
    assert not history.corpora
    assert history.add_corpus(["ab", "cd"], encode, "mine") == 4
    assert history.add_corpus(["e"], encode, "second") == 1
    with pytest.raises(ConfigError, match="external_sam_budget=2.*'third'"):
        history.add_corpus(["f"], encode, "third")
    history.remove_corpus("second")
    with pytest.raises(CorpusError, match="'mine' exists already"):
        history.add_corpus(["x"], encode, "mine")
    with pytest.raises(CorpusError, match="'other'; there are: mine"):
        history.remove_corpus("other")
