"""The nodes of the host's trie as NumPy arrays: 36 to 40 bytes each, changed by whole texts at a time.

A node is found by the hash of its path, in chained buckets. The order of use is a ring of node numbers: a node's `stamp` is
the ring's last entry that names it, earlier ones are void. So using nodes appends to the ring, the most recently used ones are
read from its end, and the least recently used ones leave at its front.
"""

from __future__ import annotations

import numpy as np

from jaxspec.drafters.ngram import hash as ngram_hash

LEAST = 1 << 10
"""Nodes that there is room for at first."""

MOST = 1 << 16
"""N-grams of the host's trie that are used at once, if its capacity is not smaller."""


class NodeStore:
    """At most `capacity` nodes, numbered from 1; number 0 is the root, which is not stored, and means "none" in a chain.

    Attributes:
      key: uint64, the hash of each node's path; 0 where a number is free.
      token, parent, freq: int32.
      table, next: int32, the first node of each bucket's chain and the node after each node, 0 at the end.
      stamp: int32, a node's place in `ring`.
      size: stored nodes.
      uses: entries that were ever made in the ring.
    """

    def __init__(self, capacity: int, room: int = LEAST, most: int = MOST, spread: int = 0):
        """No nodes, but room for some.

        Args:
          capacity: the most nodes.
          room: how many can be stored before arrays must grow.
          most: how many are used at once.
          spread: each one more doubles the buckets, of which there are half as many as nodes, or as many, with 0.
        """
        self.capacity, self.most, self.spread = capacity, most, spread
        self.size = self.uses = 0
        self.key = np.zeros(1, np.uint64)
        self.token = np.full(1, -1, np.int32)
        self.parent, self.freq, self.stamp, self.next = (np.zeros(1, np.int32) for _ in range(4))
        self.ring, self.table = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._front = self._used = 0  # the ring's first entry, and how many there are
        self._untouched = 1  # numbers from here on were never given out
        self._free = np.zeros(0, np.int32)
        self._grow(min(room, capacity))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.key, self.token, self.parent, self.freq, self.stamp, self.next, self.ring, self.table, self._free)
        return sum(array.nbytes for array in arrays)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The node of each key, 0 where there is none. Key 0 finds nothing."""
        found = self.table[self._bucket(keys)]
        waiting = np.flatnonzero((self.key[found] != keys) & (found != 0))
        while waiting.size:
            node = self.next[found[waiting]]
            found[waiting] = node
            waiting = waiting[(self.key[node] != keys[waiting]) & (node != 0)]
        return found

    def use(
        self, keys: np.ndarray, counts: np.ndarray, tokens: np.ndarray, parent: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Counts occurrences of n-grams and makes them the most recently used ones, storing those that are missing.

        Args:
          keys: [n] distinct path hashes in order of use, a parent behind its children; n is at most `capacity` and `most`.
          counts: how often each occurred.
          tokens: their last tokens.
          parent: index in `keys` of each one's parent, -1 for the root.

        Returns:
          The nodes of the n-grams, and the nodes below which some were forgotten, both with numbers that may repeat.
        """
        count = keys.size
        nodes = self.find(keys)
        missing = np.flatnonzero(nodes == 0)
        wanted = min(self.size + missing.size, self.capacity)
        if wanted >= self.key.size:
            self._grow(min(self.capacity, max(wanted, self.key.size + max(LEAST, self.key.size // 8))))
        if self._used + count > self.ring.size:
            self._tidy()
        places = (self._front + self._used + np.arange(count, dtype=np.int64)) % self.ring.size
        known, lost = np.flatnonzero(nodes), np.zeros(0, np.int32)
        self.stamp[nodes[known]] = places[known]  # before others are forgotten, so that these are not
        if missing.size:
            lost = self._forget(self.size + missing.size - self.capacity)
            made = nodes[missing] = self._numbers(missing.size)
            self.stamp[made] = places[missing]
            self.key[made], self.token[made], self.freq[made] = keys[missing], tokens[missing], 0
            self.parent[made] = np.where(parent[missing] >= 0, nodes[parent[missing]], 0)
            self._chain(made)
            self.size += missing.size
        self.freq[nodes] += counts
        self.ring[places] = nodes
        self._used += count
        self.uses += count
        return nodes, lost

    def recent(self, count: int, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The most recently used nodes, latest first, and where each node's parent stands among them (-1: the root).

        With a node its parent is always among them. `length`: how many entries of the ring count, all unless given.
        """
        end = self._used if length is None else min(self._used, length)
        length = min(end, count + count // 4)
        while True:
            places = (self._front + self._used - 1 - np.arange(length, dtype=np.int64)) % self.ring.size
            nodes = self.ring[places]
            live = self.stamp[nodes] == places
            if length == end or np.count_nonzero(live) >= count:
                break
            length = min(end, 2 * length)
        rank = np.cumsum(live, dtype=np.int32) - 1
        nodes = nodes[live][:count]
        above = self.parent[nodes]
        back = (self._front + self._used - 1 - self.stamp[above].astype(np.int64)) % self.ring.size
        return nodes, np.where(above == 0, -1, rank[np.where(above == 0, 0, back)])

    def order_of_use(self, nodes: np.ndarray) -> np.ndarray:
        """Numbers that are larger for nodes that were used later."""
        return (self.stamp[nodes].astype(np.int64) - self._front) % self.ring.size

    def nodes(self) -> np.ndarray:
        """All stored nodes, in no order."""
        return np.flatnonzero(self.key[: self._untouched]).astype(np.int32)

    def _bucket(self, keys: np.ndarray) -> np.ndarray:
        return ngram_hash.bucket(*ngram_hash.words(keys), self.table.size.bit_length() - 1)

    def _numbers(self, count: int) -> np.ndarray:
        """Numbers for further nodes."""
        reused, self._free = self._free[:count], self._free[count:]
        first, self._untouched = self._untouched, self._untouched + count - reused.size
        return np.concatenate([reused, np.arange(first, self._untouched, dtype=np.int32)])

    def _chain(self, nodes: np.ndarray) -> None:
        """Puts nodes at the heads of their buckets' chains."""
        bucket = self._bucket(self.key[nodes])
        while nodes.size:
            head = self.table[bucket]
            self.table[bucket] = nodes
            last = self.table[bucket] == nodes  # of several for one bucket the last is written; the others come next
            self.next[nodes[last]] = head[last]
            nodes, bucket = nodes[~last], bucket[~last]

    def _forget(self, count: int) -> np.ndarray:
        """Removes the `count` least recently used nodes, if that is more than 0, and returns their parents.

        A parent is used after its children, so that they are leaves.
        """
        if count <= 0:
            return np.zeros(0, np.int32)
        gone = []
        while count:
            places = (self._front + np.arange(min(self._used, 2 * count), dtype=np.int64)) % self.ring.size
            live = np.flatnonzero(self.stamp[self.ring[places]] == places)[:count]
            gone.append(self.ring[places[live]])
            count -= live.size
            taken = places.size if count else int(live[-1]) + 1
            self._front, self._used = (self._front + taken) % self.ring.size, self._used - taken
        nodes = np.concatenate(gone)
        bucket = self._bucket(self.key[nodes])
        self.key[nodes] = 0
        self.stamp[nodes] = -1
        self.size -= nodes.size
        self._free = np.concatenate([self._free, nodes])
        # Each bucket's chain is written anew without the nodes whose key is 0. Equal buckets do the same twice.
        head = self._skip(self.table[bucket])
        self.table[bucket] = head
        while (head := head[head != 0]).size:
            after = self._skip(self.next[head])
            self.next[head] = after
            head = after
        return self.parent[nodes]

    def _skip(self, nodes: np.ndarray) -> np.ndarray:
        """The first node that is not forgotten, in chains from the given nodes on."""
        gone = np.flatnonzero((self.key[nodes] == 0) & (nodes != 0))
        while gone.size:
            after = self.next[nodes[gone]]
            nodes[gone] = after
            gone = gone[(self.key[after] == 0) & (after != 0)]
        return nodes

    def _grow(self, room: int) -> None:
        """Makes room for more nodes: longer arrays, a longer ring, more buckets."""
        for name in ("key", "token", "parent", "freq", "stamp", "next"):
            setattr(self, name, _longer(getattr(self, name), room + 1))
        length = room + max(room // 2, min(room, self.most))
        if self._front + self._used <= self.ring.size:
            self.ring = _longer(self.ring, length)
        else:
            self._tidy(length)
        buckets = 2 << max(0, room.bit_length() - 2 + self.spread)
        if buckets != self.table.size:
            self.table = np.zeros(buckets, np.int32)
            self._chain(self.nodes())

    def _tidy(self, length: int | None = None) -> None:
        """Leaves only valid entries in the ring, at its beginning; another ring if its length changes."""
        places = (self._front + np.arange(self._used, dtype=np.int64)) % max(1, self.ring.size)
        nodes = self.ring[places]
        nodes = nodes[self.stamp[nodes] == places]
        if length is not None:
            self.ring = np.zeros(length, np.int32)
        self.ring[: nodes.size] = nodes
        self.stamp[nodes] = np.arange(nodes.size, dtype=np.int32)
        self._front, self._used = 0, nodes.size


def _longer(array: np.ndarray, size: int) -> np.ndarray:
    longer = np.zeros(size, array.dtype)
    longer[: array.size] = array
    return longer
