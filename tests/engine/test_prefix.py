import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxspec.engine.pages import PagePool
from jaxspec.engine.prefix import PrefixCache, edges, immutable


def text(*tokens):
    return np.asarray(tokens, np.int32)


def cached_text(cache, tokens, pages=None, namespace=(), used=0):
    """Enters all full pages of a text whose row has ended."""
    cache.clock = used
    positions = immutable(len(tokens), len(tokens), cache.lookahead)
    pages = pages if pages is not None else cache.pool.take(-(-len(tokens) // cache.page_size))
    cache.insert(namespace, tokens, pages, positions)
    cache.released(cache.pool.release(pages))
    return pages


def make(total=16, page_size=2, lookahead=0):
    return PrefixCache(PagePool(total), page_size, lookahead)


def test_edges_overlap_by_the_lookahead():
    tokens = text(1, 2, 3, 4, 5, 6)
    assert edges(tokens, 0, 2, 2, 1) == [text(1, 2, 3).tobytes(), text(3, 4, 5).tobytes()]
    assert edges(tokens, 1, 2, 2, 1) == [text(3, 4, 5).tobytes()]


@pytest.mark.parametrize("lookahead, hits", [(0, 2), (1, 1), (3, 1)])
def test_a_page_is_shared_only_if_the_tokens_behind_it_agree(lookahead, hits):
    """The bigram case: the texts differ right behind the second page."""
    cache = make(lookahead=lookahead)
    pages = cached_text(cache, text(1, 2, 3, 4, 5, 6, 7, 8))
    other = text(1, 2, 3, 4, 9, 6, 7, 8) if lookahead < 3 else text(1, 2, 3, 4, 5, 9, 7, 8)
    found = cache.match((), other, (len(other) - lookahead) // 2)
    assert [node.page for node in found] == pages[:hits]


def test_namespaces_share_nothing():
    cache = make()
    cached_text(cache, text(1, 2, 3, 4), namespace=("a",))
    assert not cache.match(("b",), text(1, 2, 3, 4), 2) and len(cache.match(("a",), text(1, 2, 3, 4), 2)) == 2


def test_a_duplicate_stays_the_rows_own_and_what_follows_goes_under_the_tries_node():
    cache = make()
    first = cached_text(cache, text(1, 2))
    pages = cache.pool.take(2)
    cache.insert((), text(1, 2, 3, 4), pages, 4)
    assert [node.page for node in cache.match((), text(1, 2, 3, 4), 2)] == [first[0], pages[1]]
    assert (cache.pool.owned, cache.pool.shared, cache.pool.cached) == (1, 1, 1)
    cache.check()


def test_the_least_recently_used_leaf_goes_first():
    cache = make()
    old = cached_text(cache, text(1, 1, 2, 2), used=1)
    recent = cached_text(cache, text(5, 5, 6, 6), used=2)
    cache.clock = 3
    cache.touch(cache.match((), text(1, 1), 1))
    assert cache.evict(1) == 1 and not cache.pool.is_cached(old[1])
    assert cache.evict(1) == 1 and not cache.pool.is_cached(recent[1])
    assert cache.evict(1) == 1 and not cache.pool.is_cached(recent[0])
    assert cache.evict(9) == 1 and cache.pool.free == cache.pool.total


def test_held_pages_are_not_evicted():
    cache = make()
    pages = cached_text(cache, text(1, 2, 3, 4))
    cache.pool.hold(pages[:1])
    assert cache.evict(9) == 1 and cache.pool.shared == 1
    cache.released(cache.pool.release(pages[:1]))
    assert cache.evict(9) == 1


def test_duplicates_above_a_rows_pages_can_be_evicted():
    """Else a text that fills the pool could lock the duplicates of its own pages, and wait for them for ever."""
    cache = make(total=3)
    cached_text(cache, text(1, 2))
    pages = cache.pool.take(2)
    end = cache.insert((), text(1, 2, 3, 4), pages, 4)
    assert cache.pool.free == 0
    assert cache.evict(1) == 1 and (cache.pool.owned, cache.pool.in_cache) == (2, 0)
    cache.insert((), text(1, 2, 3, 4), pages, 4, end)
    assert cache.pool.shared == 2
    cache.check()


def test_an_insertion_goes_on_where_the_last_one_ended():
    cache = make()
    pages = cache.pool.take(3)
    end = cache.insert((), text(1, 2, 3), pages, 3)
    assert end[1] == 1
    end = cache.insert((), text(1, 2, 3, 4, 5, 6), pages, 6, end)
    assert end[1] == 3 and [node.page for node in cache.match((), text(1, 2, 3, 4, 5, 6), 3)] == pages


def test_reset_frees_what_no_row_holds():
    cache = make()
    pages = cached_text(cache, text(1, 2, 3, 4))
    cache.pool.hold(pages[:1])
    cache.reset()
    assert cache.pool.owned == 1 and not list(cache.nodes())
    cache.pool.check([pages[:1]], [])


class PrefixCacheModel(RuleBasedStateMachine):
    """Against a dictionary of all cached prefixes and a list of rows with their pages."""

    @initialize(page_size=st.integers(1, 3), lookahead=st.integers(0, 3), total=st.integers(2, 12))
    def begin(self, page_size, lookahead, total):
        self.size, self.ahead = page_size, lookahead
        self.pool = PagePool(total)
        self.cache = PrefixCache(self.pool, page_size, lookahead)
        self.known: dict[tuple, list] = {}  # (namespace, tokens below a page's end and the look-ahead) -> [page, last used]
        self.rows: list[list] = []  # [namespace, tokens, pages, end of the last insertion]

    def key(self, namespace, tokens, page):
        return namespace, tuple(tokens[: (page + 1) * self.size + self.ahead].tolist())

    def held(self, page):
        return sum(page in row[2] for row in self.rows)

    def children(self, key):
        return [other for other in self.known if other[0] == key[0] and other[1][: -self.size] == key[1]]

    def hits(self, namespace, tokens, most):
        found = []
        for page in range(most):
            entry = self.known.get(self.key(namespace, tokens, page))
            if entry is None:
                break
            found.append(entry)
        return found

    def evicted(self, before, wanted, freed):
        """The trie has lost leaves that no row held, the least recently used first, and pages only if it had to."""
        left = {(space, node): page for space, node, page in self.in_trie()}
        assert set(left) <= set(before) and all(before[key][0] == page for key, page in left.items())
        gone = {key: before[key] for key in before if key not in left}
        assert freed == sum(not self.held(page) for page, _ in gone.values())
        cached = sum(not self.held(page) for page, _ in before.values())
        locked = any(self.held(page) for page, _ in gone.values())
        unheld = {key for key, (page, _) in before.items() if not self.held(page)}
        free_trees = {
            key
            for key in unheld
            if all(other in unheld for other in before if other[0] == key[0] and other[1][: len(key[1])] == key[1])
        }
        assert freed >= min(wanted, len(free_trees)) and freed <= cached
        if not locked:
            assert freed <= wanted
            leaves = [key for key in left if key in free_trees and not self.children(key)]
            assert all(before[leaf][1] >= used for leaf in leaves for _, used in gone.values())
        self.known = {key: before[key] for key in left}

    def in_trie(self):
        for namespace, root in self.cache._roots.items():
            waiting = [(child, ()) for child in root.children.values()]
            while waiting:
                node, prefix = waiting.pop()
                tokens = tuple(np.frombuffer(node.edge, np.int32).tolist())
                whole = prefix + tokens if not prefix else prefix + tokens[self.ahead :]
                yield namespace, whole, node.page
                waiting += [(child, whole) for child in node.children.values()]

    @rule(namespace=st.sampled_from([(), ("a",)]), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), data=st.data())
    def admit(self, namespace, tokens, data):
        self.cache.clock += 1
        tokens = np.asarray(tokens, np.int32)
        most = max(0, min(len(tokens) - 1, len(tokens) - self.ahead)) // self.size
        path = self.cache.match(namespace, tokens, most)
        expected = self.hits(namespace, tokens, most)
        assert [node.page for node in path] == [page for page, _ in expected]
        hit = [node.page for node in path]
        self.pool.hold(hit)
        self.rows.append([namespace, tokens, hit, (path[-1], len(path)) if path else None])
        own = -(-len(tokens) // self.size) - len(hit)
        if own > self.pool.free:
            before = {key: list(entry) for key, entry in self.known.items()}
            wanted = own - self.pool.free
            self.evicted(before, wanted, self.cache.evict(wanted))
        if own > self.pool.free:
            self.rows.pop()
            self.cache.released(self.pool.release(hit))
            return
        self.cache.touch(path)
        for page in range(len(hit)):
            if self.key(namespace, tokens, page) in self.known:
                self.known[self.key(namespace, tokens, page)][1] = self.cache.clock
        self.rows[-1][2] = hit + self.pool.take(own)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def insert(self, data):
        self.cache.clock += 1
        row = data.draw(st.sampled_from(self.rows))
        namespace, tokens, pages, start = row
        positions = immutable(data.draw(st.integers(0, len(tokens))), len(tokens), self.ahead)
        alive = start is not None and start[0].parent is not start[0]
        begin = start[1] if alive else 0
        row[3] = self.cache.insert(namespace, tokens, pages, positions, start)
        for page in range(begin, max(positions, 0) // self.size):
            entry = self.known.setdefault(self.key(namespace, tokens, page), [pages[page], 0])
            entry[1] = self.cache.clock

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data):
        row = data.draw(st.sampled_from(self.rows))
        self.rows = [other for other in self.rows if other is not row]
        self.cache.released(self.pool.release(row[2]))

    @rule(wanted=st.integers(1, 4))
    def evict(self, wanted):
        before = {key: list(entry) for key, entry in self.known.items()}
        self.evicted(before, wanted, self.cache.evict(wanted))

    @precondition(lambda self: not self.rows)
    @rule()
    def flush(self):
        self.cache.reset()
        self.known = {}
        assert self.pool.free == self.pool.total

    @invariant()
    def books_agree(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check([row[2] for row in self.rows], [node.page for node in self.cache.nodes()])
        self.cache.check()
        assert {(space, node): page for space, node, page in self.in_trie()} == {
            key: page for key, (page, _) in self.known.items()
        }
        held = {page for row in self.rows for page in row[2]}
        known = {page for page, _ in self.known.values()}
        assert self.pool.owned == len(held - known) and self.pool.shared == len(held & known)
        assert self.pool.cached == len(known - held)


PrefixCacheModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAgainstANaiveModel = PrefixCacheModel.TestCase
