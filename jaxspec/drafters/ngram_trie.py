"""The host's n-gram trie and the two ways to grow a draft tree from matches, with SGLang's semantics.

A *source* of n-grams (the trie here, a corpus in `ngram_corpus`) finds anchors: states in which a suffix of the context ends,
longest suffix first. `grow` spends a budget of nodes on what follows them. Everything here is plain Python; what a
device does with the same contents is in `ngram_lookup`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from jaxspec.drafters.ngram_config import NgramConfig


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


class Node:
    """An n-gram: the path from the root. `children` is ordered from the least to the most recently used."""

    __slots__ = ("children", "freq", "parent", "token")

    def __init__(self, token: int, parent: Node | None):
        self.token = token
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.freq = 1


class NgramTrie:
    """All n-grams of up to max_trie_depth tokens of what was inserted, at most `capacity` of them.

    A full trie forgets its least recently used leaves; a parent is always used after its children, so that the oldest
    node is a leaf.
    """

    def __init__(self, config: NgramConfig):
        self.config = config
        self.root = Node(-1, None)
        self.version = 0
        self._used: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        """Stored n-grams."""
        return len(self._used)

    def insert(self, tokens: Sequence[int]) -> None:
        """Stores the n-grams that start at every position of `tokens`."""
        tokens = [int(t) for t in tokens]
        depth, used = self.config.max_trie_depth, self._used
        for start in range(len(tokens)):
            gram = tokens[start : start + depth]
            while len(used) + len(gram) > self.config.capacity:
                self._forget_oldest()
            node, path = self.root, []
            for token in gram:
                children = node.children
                child = children.pop(token, None)
                if child is None:
                    child = Node(token, node)
                    used[child] = None
                else:
                    child.freq += 1
                children[token] = child
                path.append(child)
                node = child
            for node in reversed(path):
                used.move_to_end(node)
        self.version += bool(tokens)

    def _forget_oldest(self) -> None:
        node, _ = self._used.popitem(last=False)
        del node.parent.children[node.token]

    def recent(self, count: int) -> list[Node]:
        """The most recently used nodes, newest first; with a node its parent is always among them."""
        return list(islice(reversed(self._used), count))

    def anchors(self, context: Sequence[int]) -> list[tuple[int, Node]]:
        """See `Source`."""
        found = []
        for depth in range(min(len(context), self.config.max_trie_depth), 0, -1):
            node = self.root
            for token in context[len(context) - depth :]:
                node = node.children.get(int(token))
                if node is None:
                    break
            if node is not None and node.children:
                found.append((depth, node))
        return found

    def children(self, state: Node, limit: int) -> list[tuple[int, Node, int]]:
        """See `Source`: the most recent ones for BFS, the most frequent ones (lower token first) for PROB."""
        if self.config.match_type == "BFS":
            chosen = islice(reversed(state.children.values()), limit)
        else:
            chosen = heapq.nsmallest(limit, state.children.values(), key=lambda node: (-node.freq, node.token))
        return [(node.token, node, node.freq) for node in chosen]

    def match(self, context: Sequence[int], budget: int) -> MatchTree:
        """The draft tree behind a context; see `grow`."""
        return grow(self, context, self.config, budget)
