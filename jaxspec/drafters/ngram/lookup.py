"""The trie and the corpora as arrays, and their matching on the device.

The host writes its contents into arrays of fixed size between two programs; inside a program every suffix of the text
is looked up at once and every anchor grows at once. The outcome is a list of candidate nodes, preferred ones first, of
which `keep_first` and `build_tree` take as many as the tree holds. A node is known by a hash of the tokens on its path:
two 32-bit words, so that two different paths are taken for one about once in 10^19 pairs.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.drafters.ngram.config import NgramConfig
from jaxspec.drafters.ngram.corpus import SEPARATOR, Corpus
from jaxspec.drafters.ngram.hash import FACTORS, bucket, extend, mix
from jaxspec.drafters.ngram.match import suffix_tokens
from jaxspec.drafters.ngram.trie import breadths
from jaxspec.pytree import pytree
from jaxspec.trees.tree import DraftTree, from_parents

HOPS = 8
"""Nodes of a chain that are looked at. With two buckets a node, at most one node in a hundred million stands further back."""


@pytree()
class TrieArrays:
    """A trie of at most M - 1 nodes, read-only and shared by all sequences. Node 0 is the root.

    Attributes:
      key: the words of the nodes' path hashes, the second one in front.
      table: the first node of each of R buckets' chains, 0 where there is none.
      next: the node behind each one in its chain.
      token: each node's token.
      share: its frequency over the sum of those of its parent's max_bfs_breadth most frequent children here; 0 for BFS.
      children: the preferred max_bfs_breadth children, preferred ones first.
      child_count: how many children there are, also beyond these.
    """

    key: UInt32[Array, "M 2"]
    table: Int[Array, " R"]
    next: Int[Array, " M"]
    token: Int[Array, " M"]
    share: Float[Array, " M"]
    children: Int[Array, "M W"]
    child_count: Int[Array, " M"]


@pytree()
class CorpusArrays:
    """A corpus, read-only and shared by all sequences: see `ngram_corpus`. M is a power of two, so that shapes are few.

    The first `size` entries of `order` are the places that a token follows, sorted by the text that ends there.
    """

    tokens: Int[Array | np.ndarray, " M"]
    order: Int[Array | np.ndarray, " M"]
    size: Int[Array | np.ndarray, ""]


@pytree()
class HistoryArrays:
    """What a history holds, read-only and shared by all sequences: the parameters of an NGRAM drafter."""

    trie: TrieArrays
    corpora: tuple[CorpusArrays, ...]


@pytree()
class Candidates:
    """Nodes that could enter the tree, in order of preference; a parent stands before its children.

    Attributes:
      token: their tokens.
      path: hash of the tokens from the root, left out, to the node; 0 is the root.
      above: the parent's path.
      valid: which exist.
    """

    token: Int[Array, "B C"]
    path: UInt32[Array, "B C 2"]
    above: UInt32[Array, "B C 2"]
    valid: Bool[Array, "B C"]


def export_corpus(corpus: Corpus) -> CorpusArrays:
    """A corpus as NumPy arrays, padded to a power of two; places where a document ends, which nothing follows, are left out."""
    size = corpus.tokens.size
    length = 1 << max(10, (size - 1).bit_length())
    tokens = np.pad(corpus.tokens, (0, length - size), constant_values=SEPARATOR)
    following = np.append(corpus.tokens[1:], SEPARATOR)
    order = corpus.order[(following[corpus.order] != SEPARATOR) & (corpus.tokens[corpus.order] != SEPARATOR)]
    return CorpusArrays(tokens=tokens, order=np.pad(order, (0, length - order.size)), size=np.asarray(order.size, np.int32))


def find_anchors(trie: TrieArrays, tokens: Int[Array, "B L"], last: Int[Array, " B"], depth: int) -> Int[Array, "B D"]:
    """The node of each suffix of 1 … depth tokens that end at index `last`; -1 where it is not stored or ends the trie."""
    suffix = suffix_tokens(tokens, last, depth)
    hashes = []
    for word in range(2):
        power = np.cumprod(np.full(depth, FACTORS[word], np.uint64) % 2**32, dtype=np.uint32)
        power = np.concatenate([np.ones(1, np.uint32), power[:-1]])
        hashes.append(jnp.cumsum(mix(suffix.astype(jnp.uint32), word) * power, axis=1, dtype=jnp.uint32))
    node = trie.table[bucket(hashes[0], hashes[1], trie.table.size.bit_length() - 1)]
    found = jnp.full(node.shape, -1, jnp.int32)
    for _ in range(HOPS):
        key = trie.key[node]
        hit = (key[..., 0] == hashes[1]) & (key[..., 1] == hashes[0]) & (node > 0)
        found, node = jnp.where(hit, node, found), trie.next[node]
    found = jnp.where(suffix >= 0, found, -1)
    return jnp.where(trie.child_count[jnp.maximum(found, 0)] > 0, found, -1)


def grow_anchors(trie: TrieArrays, anchors: Int[Array, "B D"], config: NgramConfig, count: int) -> Candidates:
    """The first `count` nodes below every anchor in the order of `ngram_trie.grow`, all anchors at once.

    Both orders are one loop: take the best waiting node, let its children wait. For BFS all are equally good and the one that
    has waited longest goes first.

    Returns:
      [B, D * count] candidates, those of anchor d (matched length d + 1) at d * count …
    """
    width, (batch, depth) = config.max_bfs_breadth, anchors.shape
    recency = config.match_type == "BFS"
    breadth = jnp.asarray(breadths(config, count + 1)[1:])
    slots = jnp.arange(width)

    def wait(node, score, allowed):
        child = trie.children[node]
        there = (slots < jnp.minimum(trie.child_count[node], allowed)[..., None]) & (score >= 0)[..., None]
        child = jnp.where(there, child, 0)
        return child, jnp.where(there, 1.0 if recency else trie.share[child] * score[..., None], -1.0)

    def step(i, carry):
        nodes, scores, parents, levels, out = carry
        best = jnp.argmax(scores, -1)[..., None]
        pick = partial(jnp.take_along_axis, indices=best, axis=-1)
        node, score, parent, level = (pick(x)[..., 0] for x in (nodes, scores, parents, levels))
        scores = jnp.put_along_axis(scores, best, -1.0, -1, inplace=False)
        token = trie.token[node]
        above = jnp.take_along_axis(out["path"], parent[..., None, None], 2)[:, :, 0]
        path = jnp.stack([extend(above[..., word], token, word) for word in range(2)], -1)
        made = {"token": token, "path": path, "above": above, "valid": score >= 0}
        out = {name: jax.lax.dynamic_update_index_in_dim(out[name], made[name], i + 1, 2) for name in out}
        allowed = jnp.take_along_axis(breadth[None], level[..., None] + 1, -1)[..., 0] if recency else width
        child, child_score = wait(node, score, allowed)
        values = (child, child_score, jnp.broadcast_to(i + 1, child.shape), jnp.broadcast_to(level[..., None] + 1, child.shape))
        pools = (nodes, scores, parents, levels)
        pools = [jax.lax.dynamic_update_slice_in_dim(p, v, (i + 1) * width, -1) for p, v in zip(pools, values, strict=True)]
        return *pools, out

    shape = (batch, depth)
    first, first_score = wait(jnp.maximum(anchors, 0), jnp.where(anchors >= 0, 1.0, -1.0), breadth[:, 0] if recency else width)
    pool = jnp.zeros((*shape, (count + 1) * width), jnp.int32)
    scores = jnp.full(pool.shape, -1.0).at[..., :width].set(first_score)
    out = {
        "token": jnp.zeros((*shape, count + 1), jnp.int32),
        "path": jnp.zeros((*shape, count + 1, 2), jnp.uint32),
        "above": jnp.zeros((*shape, count + 1, 2), jnp.uint32),
        "valid": jnp.zeros((*shape, count + 1), bool),
    }
    start = (pool.at[..., :width].set(first), scores, pool, pool, out)
    *_, out = jax.lax.fori_loop(0, count, step, start)
    return Candidates(**{name: x[:, :, 1:].reshape(batch, depth * count, *x.shape[3:]) for name, x in out.items()})


def chain_candidates(paths: Int[Array, "B R M"], valid: Bool[Array, "B R M"]) -> Candidates:
    """Candidates for R chains, one after another. A chain ends at its first invalid token."""
    valid = jnp.cumprod(valid, axis=-1).astype(bool)

    def step(above, token):
        path = jnp.stack([extend(above[..., word], token, word) for word in range(2)], -1)
        return path, (above, path)

    root = jnp.zeros((*paths.shape[:2], 2), jnp.uint32)
    above, path = (jnp.moveaxis(x, 0, 2) for x in jax.lax.scan(step, root, jnp.moveaxis(paths, -1, 0))[1])
    flat = (paths.shape[0], -1)
    return Candidates(paths.reshape(flat), path.reshape(*flat, 2), above.reshape(*flat, 2), valid.reshape(flat))


def corpus_candidates(
    corpus: CorpusArrays, tokens: Int[Array, "B L"], last: Int[Array, " B"], config: NgramConfig, count: int
) -> Candidates:
    """Continuations of places in a corpus whose text before them is most like the end of the request's text.

    As in REST (He et al. 2023, section 3): one bisection in the sorted contexts, then the max_bfs_breadth neighbours with
    the longest match, the latest in the corpus first. Unlike the host's `Corpus.match`, which counts all places, it looks
    at that many. Longer matches come before shorter ones, within one length nodes come level by level.
    """
    depth, width = config.max_trie_depth, config.max_bfs_breadth
    suffix = suffix_tokens(tokens, last, depth)

    def context(rank):
        place = corpus.order[jnp.clip(rank, 0, corpus.order.size - 1)]
        index = place[..., None] - jnp.arange(depth)
        return place, jnp.where(index >= 0, corpus.tokens[jnp.maximum(index, 0)], SEPARATOR)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        _, there = context(middle)
        differs = there != suffix
        first = jnp.argmax(differs, -1)[..., None]
        less = (jnp.take_along_axis(there, first, -1) < jnp.take_along_axis(suffix, first, -1))[..., 0]
        less &= differs.any(-1) & (low < high)
        return jnp.where(less, middle + 1, low), jnp.where(less, high, jnp.where(low < high, middle, high))

    zero = jnp.zeros_like(last)
    low, _ = jax.lax.fori_loop(0, corpus.order.size.bit_length(), halve, (zero, zero + corpus.size))
    rank = low[:, None] + jnp.arange(-width, width)
    place, there = context(rank)
    matched = jnp.sum(jnp.cumprod((there == suffix[:, None]) & (suffix >= 0)[:, None], axis=-1), -1)
    matched = jnp.where((rank >= 0) & (rank < corpus.size), matched, 0)
    best = jnp.lexsort((-place, -matched), axis=-1)[:, :width]
    place, matched = (jnp.take_along_axis(x, best, 1) for x in (place, matched))
    ahead = place[..., None] + 1 + jnp.arange(count)
    paths = jnp.where(ahead < corpus.tokens.size, corpus.tokens[jnp.minimum(ahead, corpus.tokens.size - 1)], SEPARATOR)
    found = chain_candidates(paths, (paths != SEPARATOR) & (matched > 0)[..., None])
    level = jnp.broadcast_to(jnp.arange(count), paths.shape).reshape(paths.shape[0], -1)
    return reorder(found, jnp.lexsort((level, -jnp.repeat(matched, count, axis=1)), axis=-1))


def reorder(candidates: Candidates, order: Int[Array, "B C"]) -> Candidates:
    """The candidates in another order."""
    take = lambda x: jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), 1)  # noqa: E731
    return jax.tree.map(take, candidates)


def join(parts: list[Candidates]) -> Candidates:
    """Candidates of several sources, earlier ones preferred."""
    return jax.tree.map(lambda *x: jnp.concatenate(x, 1), *parts)


def keep_first(candidates: Candidates, limit: int) -> Candidates:
    """Leaves the first `limit` distinct nodes valid. A kept node's parent is kept, since it stands before it."""
    path, valid = candidates.path, candidates.valid
    same = (path[:, :, None] == path[:, None]).all(-1)
    index = jnp.arange(path.shape[1])
    seen = (same & valid[:, None] & (index < index[:, None])).any(-1)
    valid &= ~seen
    return dataclasses.replace(candidates, valid=valid & (jnp.cumsum(valid, 1) <= limit))


def build_tree(root: Int[Array, " B"], candidates: Candidates, num_draft_tokens: int) -> DraftTree:
    """The tree of the first num_draft_tokens - 1 distinct candidates; what is missing becomes padding."""
    batch, count = root.shape[0], num_draft_tokens - 1
    kept = keep_first(candidates, count)
    slot = jnp.where(kept.valid, jnp.cumsum(kept.valid, 1) - 1, count)
    row = jnp.arange(batch)[:, None]
    place = lambda x: jnp.zeros((batch, count, *x.shape[2:]), x.dtype).at[row, slot].set(x, mode="drop")  # noqa: E731
    kept = jax.tree.map(place, kept)
    is_parent = (kept.above[:, :, None] == kept.path[:, None]).all(-1) & kept.valid[:, None]
    parent = jnp.where((kept.above == 0).all(-1), 0, jnp.where(is_parent.any(-1), jnp.argmax(is_parent, -1) + 1, -1))
    first = jnp.zeros((batch, 1), jnp.int32)
    return from_parents(
        jnp.concatenate([root[:, None], kept.token], 1).astype(jnp.int32),
        jnp.concatenate([first - 1, parent.astype(jnp.int32)], 1),
        jnp.concatenate([first == 0, kept.valid], 1),
        max_depth=count,
    )
