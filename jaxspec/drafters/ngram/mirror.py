"""The part of the host's trie that is copied to the device, kept as the arrays that go there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.ngram.lookup import TrieArrays
from jaxspec.drafters.ngram.store import NodeStore
from jaxspec.drafters.ngram.trie import NgramTrie


class TrieMirror:
    """A trie's device_nodes - 1 most recently used nodes, in a small store of their own.

    What was used since the last export is used here again, in the same order, so that an export costs what has changed, not
    what there is.
    """

    def __init__(self, trie: NgramTrie):
        self.trie = trie
        config = trie.config
        most = min(config.device_nodes - 1, config.capacity)
        self.store = NodeStore(most, room=most, most=most, spread=2)
        self.share = np.zeros(most + 1, np.float32)
        self.children = np.zeros((most + 1, config.max_bfs_breadth), np.int32)
        self.child_count = np.zeros(most + 1, np.int32)
        self._seen = 0
        self._no_share = jnp.asarray(self.share) if config.match_type == "BFS" else None

    def export(self) -> TrieArrays:
        """The present contents on the device, in arrays that later changes here leave alone."""
        whole, store = self.trie.store, self.store
        nodes, above = whole.recent(store.capacity, whole.uses - self._seen)
        self._seen = whole.uses
        if nodes.size:
            nodes, above = nodes[::-1], above[::-1]
            parent = np.where(above < 0, -1, nodes.size - 1 - above)
            here, lost = store.use(whole.key[nodes], 0, whole.token[nodes], parent)
            store.freq[here] = whole.freq[nodes]
            self._order_children(here, lost)
        key = store.key.astype("<u8", copy=False).view("<u4").reshape(-1, 2)
        arrays = (key, store.table, store.next, store.token, self.children, self.child_count)
        key, table, after, token, children, count = jax.device_put([array.copy() for array in arrays])
        share = self._no_share if self._no_share is not None else jax.device_put(self.share.copy())
        return TrieArrays(key, table, after, token, share, children, count)

    def _order_children(self, used: np.ndarray, lost: np.ndarray) -> None:
        """Writes the children of every node that has other ones, or in another order, than before.

        These are the parents of nodes that were used or forgotten, and the nodes that were used: a number may be a new node's.
        """
        config, store = self.trie.config, self.store
        width = config.max_bfs_breadth
        changed = np.zeros(self.child_count.size, bool)
        changed[used] = changed[store.parent[used]] = changed[lost] = True
        self.children[changed], self.child_count[changed] = 0, 0
        nodes = np.flatnonzero(changed[store.parent] & (store.key != 0)).astype(np.int32)
        if config.match_type == "PROB":
            nodes = nodes[np.argsort(store.token[nodes])]
            after = np.int64(2**31) - store.freq[nodes]
        else:
            after = np.int64(2**31) - store.order_of_use(nodes)
        order = np.argsort(store.parent[nodes].astype(np.int64) << 32 | after, kind="stable")
        nodes = nodes[order]
        parent = store.parent[nodes]
        first = np.flatnonzero(np.diff(parent, prepend=-1))
        count = np.diff(first, append=nodes.size)
        rank = np.arange(nodes.size) - np.repeat(first, count)
        self.child_count[parent[first]] = count
        here = rank < width
        self.children[parent[here], rank[here]] = nodes[here]
        if config.match_type == "PROB":
            total = np.add.reduceat(np.where(here, store.freq[nodes], 0), first)
            self.share[nodes] = store.freq[nodes].astype(np.float32) / np.repeat(total, count).astype(np.float32)
