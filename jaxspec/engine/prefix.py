"""The prefix cache: a trie with one node a page, whose references on pages are its only locks.

A drafter's entries at a position depend on up to `lookahead` tokens behind it, so an edge holds the tokens of its page *and*
the next `lookahead` ones; neighbouring edges overlap by these. A page is shared only between texts that agree in all of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

import numpy as np

from jaxspec.engine.pages import PagePool


def edges(tokens: np.ndarray, first: int, last: int, page_size: int, lookahead: int) -> list[bytes]:
    """Edges of the pages first … last − 1 of a text, each the int32 bytes of its page's tokens and of the next `lookahead`."""
    data = tokens[first * page_size : last * page_size + lookahead].tobytes()
    step, width = 4 * page_size, 4 * (page_size + lookahead)
    return [data[at : at + width] for at in range(0, (last - first) * step, step)]


def immutable(known: int, tokens: int, lookahead: int) -> int:
    """Positions that nothing writes again, of a row that has committed `known` of them and whose first `tokens` are known.

    Compaction moves entries behind `known` only; a drafter that looks ahead repairs its last entries in the next round.
    """
    return min(known, tokens - lookahead)


class Node:
    """A page in the trie; the parent of a removed node is itself."""

    __slots__ = ("children", "edge", "last_used", "page", "parent", "queued")

    def __init__(self, edge: bytes, page: int, parent: Node | None, last_used: int):
        self.edge, self.page, self.parent, self.last_used = edge, page, parent, last_used
        self.children: dict[bytes, Node] = {}
        self.queued = False


class PrefixCache:
    """Page trie of a pool; `clock` is the time that `touch` and `insert` write down, in launches."""

    def __init__(self, pool: PagePool, page_size: int, lookahead: int):
        self.pool, self.page_size, self.lookahead = pool, page_size, lookahead
        self.clock = 0
        self._clear()

    def _clear(self) -> None:
        self._roots: dict[tuple, Node] = {}
        self._of_page: dict[int, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []
        self._ids = count()

    def match(self, namespace: tuple, tokens: np.ndarray, most: int) -> list[Node]:
        """The nodes of the first pages of a text, at most `most`."""
        node = self._roots.get(namespace)
        found: list[Node] = []
        if node is None or most < 1:
            return found
        for edge in edges(tokens, 0, most, self.page_size, self.lookahead):
            node = node.children.get(edge)
            if node is None:
                break
            found.append(node)
        return found

    def touch(self, path: list[Node]) -> None:
        """Notes that the nodes were used now."""
        for node in path:
            node.last_used = self.clock

    def insert(
        self, namespace: tuple, tokens: np.ndarray, pages: list[int], positions: int, start: tuple[Node, int] | None = None
    ) -> tuple[Node, int]:
        """Enters the full pages below `positions` of a row's text, and returns the last node with its depth.

        A page whose node exists already stays the row's own. `start` is what an earlier call for the same row returned, or
        the end of its hit: the walk goes on from there if that node is still in the trie.
        """
        node, depth = start if start is not None and start[0].parent is not start[0] else (None, 0)
        if node is None:
            node = self._roots.get(namespace)
            if node is None:
                node = self._roots[namespace] = Node(b"", 0, None, 0)
        full = positions // self.page_size
        if full <= depth:
            return node, depth
        clock = self.clock
        for page, edge in zip(pages[depth:full], edges(tokens, depth, full, self.page_size, self.lookahead), strict=True):
            child = node.children.get(edge)
            if child is None:
                self.pool.keep(page)
                child = node.children[edge] = self._of_page[page] = Node(edge, page, node, clock)
            else:
                child.last_used = clock
            node = child
        # A row may have walked over nodes whose pages it does not hold: such a leaf can be evicted at once.
        self._offer(node)
        return node, full

    def released(self, pages: list[int]) -> None:
        """Hears which pages only the trie holds since a row dropped them."""
        for page in pages:
            self._offer(self._of_page[page])

    def _offer(self, node: Node) -> None:
        if not node.children and not node.queued and self.pool.is_cached(node.page):
            node.queued = True
            heapq.heappush(self._heap, (node.last_used, next(self._ids), node))

    def evict(self, wanted: int) -> int:
        """Frees up to `wanted` pages, the least recently used leaves first, and returns how many it freed."""
        before = self.pool.free
        goal = before + wanted
        while self.pool.free < goal and self._heap:
            used, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.parent is node or node.children or not self.pool.is_cached(node.page):
                continue
            if node.last_used != used:
                self._offer(node)
                continue
            parent = node.parent
            self._remove(node)
            if parent.parent is not None:
                self._offer(parent)
        if self.pool.free < goal and self.pool.cached:
            self._evict_above_rows(goal)
        return self.pool.free - before

    def _remove(self, node: Node) -> None:
        del node.parent.children[node.edge]
        node.parent = node
        del self._of_page[node.page]
        self.pool.drop(node.page)

    def _evict_above_rows(self, goal: int) -> None:
        """Frees pages above nodes that a row holds: the row has duplicates of them, and its own pages leave the trie, too.

        A page that several rows hold stays in the trie, and so does all above it.
        """
        for node in sorted((node for node in self.nodes() if self.pool.is_cached(node.page)), key=lambda node: node.last_used):
            if self.pool.free >= goal:
                return
            below = [] if node.parent is node else list(self._below(node))
            if below and all(self.pool.holders(other.page) < 2 for other in below):
                for other in reversed(below):
                    self._remove(other)

    @staticmethod
    def _below(node: Node) -> Iterator[Node]:
        """The node and all under it, parents first."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def nodes(self) -> Iterator[Node]:
        """All nodes with a page, parents first."""
        for root in self._roots.values():
            for child in root.children.values():
                yield from self._below(child)

    def reset(self) -> None:
        """Drops everything."""
        for node in list(self.nodes()):
            node.parent = node
            self.pool.drop(node.page)
        self._clear()

    def check(self) -> None:
        """Raises AssertionError unless every edge has its full width and begins with what its parent's looked ahead to."""
        ahead = 4 * self.lookahead
        for node in self.nodes():
            assert len(node.edge) == 4 * (self.page_size + self.lookahead), f"page {node.page} has an edge of unknown tokens"
            assert self._of_page[node.page] is node and node.parent.children[node.edge] is node
            if ahead and node.parent.parent is not None:
                assert node.parent.edge[-ahead:] == node.edge[:ahead], f"page {node.page} does not follow its parent"
            evictable = not node.children and self.pool.is_cached(node.page)
            assert node.queued or not evictable, f"page {node.page} could be evicted and is in no queue"
