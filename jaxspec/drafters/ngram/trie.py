"""The host's n-gram trie and the two ways to grow a draft tree from matches, with SGLang's semantics.

A *source* of n-grams (the trie here, a corpus in `ngram_corpus`) finds anchors: states in which a suffix of the context ends,
longest suffix first. `grow` spends a budget of nodes on what follows them. Everything here is plain Python; what a
device does with the same contents is in `ngram_lookup`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jaxspec.drafters.ngram.config import NgramConfig
from jaxspec.drafters.ngram.hash import ngram_keys
from jaxspec.drafters.ngram.store import MOST, NodeStore


class Source(Protocol):
    """Where matches come from."""

    def anchors(self, context: Sequence[int]) -> list[tuple[int, Any]]:
        """(matched length, state) of every usable suffix of the context, longest first."""

    def children(self, state: Any, limit: int) -> list[tuple[int, Any, int]]:
        """At most `limit` (token, state, frequency) that follow a state, preferred ones first."""


class MatchTree:
    """A draft tree under construction on the host: node 0 is the context's last token."""

    def __init__(self, root: int):
        self.tokens = [root]
        self.parents = [-1]
        self._child: dict[tuple[int, int], int] = {}

    @property
    def num_matched(self) -> int:
        """Nodes behind the root."""
        return len(self.tokens) - 1

    def add(self, parent: int, token: int, budget: int) -> int:
        """The node of `token` below `parent`, a new one if there is none yet; -1 if the budget is used up."""
        node = self._child.get((parent, token), -1)
        if node < 0 and self.num_matched < budget:
            node = self._child[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def merge(self, other: MatchTree, budget: int) -> None:
        """Adds the paths of another tree over the same root."""
        place = [0]
        for token, parent in zip(other.tokens[1:], other.parents[1:], strict=True):
            place.append(self.add(place[parent], token, budget) if place[parent] >= 0 else -1)

    def paths(self) -> set[tuple[int, ...]]:
        """The tokens from the root (left out) to every node: what two trees are compared by."""
        found: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens[1:], self.parents[1:], strict=True):
            found.append((*found[parent], token))
        return set(found[1:])


def breadths(config: NgramConfig, levels: int) -> np.ndarray:
    """[max_trie_depth + 1, levels]: children taken at each level below an anchor of each matched length, for BFS.

    A long matched suffix says much about what comes next, so that few branches do; each level below has fewer still.
    """
    longest = max(1, config.max_trie_depth - 1)
    step = (config.max_bfs_breadth - config.min_bfs_breadth) / longest
    table = np.ones((config.max_trie_depth + 1, levels), np.int32)
    for depth in range(config.max_trie_depth + 1):
        breadth = (longest - depth) * step + config.min_bfs_breadth
        for level in range(levels):
            table[depth, level] = min(max(1, int(breadth)), config.max_bfs_breadth)
            breadth -= step
    return table


def grow(source: Source, context: Sequence[int], config: NgramConfig, budget: int) -> MatchTree:
    """The draft tree of at most `budget` nodes behind the root that a source gives for a context.

    BFS takes children level by level, their number falling; PROB takes the most probable node anywhere below the anchor next,
    a node's probability being the product of relative frequencies among the max_bfs_breadth most frequent children.
    Shorter anchors get what longer ones left; what is already in the tree costs nothing. Products are float32, as on
    the device, and equal ones go in the order in which they were found.
    """
    tree = MatchTree(context[-1])
    table = breadths(config, budget + 1)
    for depth, state in source.anchors(context):
        walk = _by_breadth(source, state, table[depth]) if config.match_type == "BFS" else _by_frequency(source, state, config)
        nodes = [0]
        for _ in range(budget):  # at most this many nodes of one anchor fit into the tree, duplicates included
            step = next(walk, None)
            if step is None:
                break
            parent, token = step
            nodes.append(tree.add(nodes[parent], token, budget))
            if nodes[-1] < 0:
                return tree
    return tree


def _by_breadth(source: Source, anchor: Any, breadth: np.ndarray) -> Iterator[tuple[int, int]]:
    """(parent, token) of the nodes below an anchor, level by level; node 0 is the anchor itself."""
    queue, count = deque([(0, 0, anchor)]), 0
    while queue:
        parent, level, state = queue.popleft()
        for token, child, _ in source.children(state, int(breadth[level])):
            count += 1
            queue.append((count, level + 1, child))
            yield parent, token


def _by_frequency(source: Source, anchor: Any, config: NgramConfig) -> Iterator[tuple[int, int]]:
    """(parent, token) of the nodes below an anchor, most probable first; node 0 is the anchor itself."""
    heap: list = []
    found = count = 0
    node, state, probability = 0, anchor, np.float32(1)
    while True:
        children = source.children(state, config.max_bfs_breadth)
        total = np.float32(sum(frequency for _, _, frequency in children))
        for token, child, frequency in children:
            found += 1
            share = np.float32(frequency) / total * probability
            heapq.heappush(heap, (-share, found, node, token, child))
        if not heap:
            return
        negative, _, parent, token, state = heapq.heappop(heap)
        probability = -negative
        count += 1
        node = count
        yield parent, token


class NgramTrie:
    """All n-grams of up to max_trie_depth tokens of what was inserted, at most `capacity` of them, in arrays.

    A full trie forgets its least recently used leaves; a parent is always used after its children, so that the oldest
    node is a leaf. A state is the number of a node in `store`.
    """

    def __init__(self, config: NgramConfig):
        self.config = config
        self.version = 0
        self._store = NodeStore(config.capacity)
        self._waiting: list[np.ndarray] = []
        self._num_waiting = 0
        self._family: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        """Stored n-grams."""
        return self.store.size

    @property
    def store(self) -> NodeStore:
        """The nodes, with everything that was inserted."""
        if self._waiting:
            texts, self._waiting, self._num_waiting = self._waiting, [], 0
            self._take_in(np.concatenate(texts), np.concatenate([np.arange(t.size, 0, -1) for t in texts]))
        return self._store

    def insert(self, tokens: Sequence[int]) -> None:
        """Stores the n-grams that start at every position of `tokens`. Texts wait for each other: many at once cost less."""
        tokens = np.array(tokens, np.int32).reshape(-1)
        if tokens.size:
            self._waiting.append(tokens)
            self._num_waiting += tokens.size
            self.version += 1
        if self._num_waiting * self.config.max_trie_depth >= MOST:
            _ = self.store

    def _take_in(self, tokens: np.ndarray, left: np.ndarray) -> None:
        """Stores the n-grams of texts, one behind another; `left` tokens of its text stand from each position on."""
        depth = min(self.config.max_trie_depth, int(left.max()))
        starts = max(1, min(self.config.capacity, MOST) // depth)
        for first in range(0, tokens.size, starts):
            self._use(tokens[first : first + starts + depth - 1], left[first : first + starts], depth)

    def _use(self, tokens: np.ndarray, left: np.ndarray, depth: int) -> None:
        """Stores the n-grams that start at the positions of `left`, in order; of one start the longest comes first."""
        keys = ngram_keys(tokens, depth)[: left.size]
        length = np.broadcast_to(np.arange(depth)[::-1], keys.shape)
        there = length < left[:, None]
        length, keys = length[there], keys[:, ::-1][there]
        place = np.nonzero(there)[0] + length
        order = np.argsort(keys)
        differs = np.ones(keys.size, bool)
        np.not_equal(keys[order[1:]], keys[order[:-1]], out=differs[1:])
        begin = np.flatnonzero(differs)
        last = np.maximum.reduceat(order, begin)  # each distinct n-gram's last occurrence
        counts = np.diff(begin, append=keys.size)
        group = np.empty(keys.size, np.int64)
        group[order] = np.cumsum(differs) - 1
        by_use = np.argsort(last)
        use = np.empty(by_use.size, np.int32)
        use[by_use] = np.arange(by_use.size, dtype=np.int32)
        last = last[by_use]
        above = use[group[np.minimum(last + 1, keys.size - 1)]]  # the n-gram behind one is the same without its last token
        self._store.use(keys[last], counts[by_use], tokens[place[last]], np.where(length[last] == 0, -1, above))

    def recent(self, count: int) -> np.ndarray:
        """The most recently used nodes, newest first; with a node its parent is always among them."""
        return self.store.recent(count)[0]

    def anchors(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """See `Source`."""
        end = np.asarray(context[-self.config.max_trie_depth :], np.int32)
        keys = ngram_keys(end, end.size)
        size = np.arange(end.size)
        nodes = self.store.find(keys[size, end.size - 1 - size])
        return [(int(end.size - i), int(nodes[i])) for i in size if nodes[i] and self._children(nodes[i]).size]

    def _children(self, state: int) -> np.ndarray:
        """All nodes below a state. The first call after an insertion sorts all nodes by their parents."""
        if self._family is None or self._family[0] != self.version:
            nodes = self.store.nodes()
            order = np.argsort(self.store.parent[nodes], kind="stable")
            self._family = (self.version, nodes[order], self.store.parent[nodes[order]])
        _, nodes, parent = self._family
        return nodes[np.searchsorted(parent, state) : np.searchsorted(parent, state, "right")]

    def children(self, state: int, limit: int) -> list[tuple[int, int, int]]:
        """See `Source`: the most recent ones for BFS, the most frequent ones (lower token first) for PROB."""
        store, nodes = self.store, self._children(state)
        if self.config.match_type == "BFS":
            order = np.argsort(-store.order_of_use(nodes))[:limit]
        else:
            order = np.lexsort((store.token[nodes], -store.freq[nodes]))[:limit]
        nodes = nodes[order]
        return list(zip(store.token[nodes].tolist(), nodes.tolist(), store.freq[nodes].tolist(), strict=True))

    def match(self, context: Sequence[int], budget: int) -> MatchTree:
        """The draft tree behind a context; see `grow`."""
        return grow(self, context, self.config, budget)
