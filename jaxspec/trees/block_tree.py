"""Trees over a block: every depth has the same candidates on every path, as one-pass drafters give them.

A path's score is the sum of its candidates' log-probabilities, so the best nodes are found without running anything. Two ways
give the same tree: a search that finds one node a step, and, for small trees, one ranking of all nodes that could be in it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.trees.tree import DraftTree, from_parents, root_only

NONE = jnp.iinfo(jnp.int32).max

LARGEST_TABLE = 4096
"""Most nodes that are ranked at once (enough for 32 nodes over any block). A search takes a dozen small kernels a node, which
launches alone make slow on a GPU; the ranking takes half a dozen in all."""


class Nodes(NamedTuple):
    """Nodes of a growing tree, or entries of its frontier; `score` is -inf where there is none."""

    score: Float[Array, "B n"]
    token: Int[Array, "B n"]
    depth: Int[Array, "B n"]
    rank: Int[Array, "B n"]
    parent: Int[Array, "B n"]


def best_first(
    root: Int[Array, " B"],
    log_probs: Float[Array, "B D K"],
    tokens: Int[Array, "B D K"],
    *,
    num_nodes: int,
    whole_families: bool = False,
) -> DraftTree:
    """The tree of the `num_nodes` most probable nodes, root included, in the order in which a best-first search finds them.

    Ties go to the smaller depth, then the lower rank (which is the token's place in its row, so a token adds nothing), then
    the earlier parent.

    Args:
      root: the bonus token.
      log_probs: of the K candidates at each of D depths, best first; never renormalised over the candidates.
      tokens: their target ids, distinct within a depth.
      num_nodes: the budget; nodes beyond what D and K allow are padding.
      whole_families: JetSpec's way (arXiv 2606.18394): expanding a node adds all its K children at once until the budget is
        full. Fewer steps, but not the best tree of its size; impossible candidates take up room as padding.
    """
    if num_nodes == 1:
        return root_only(root)
    _, depths, width = log_probs.shape
    log_probs = log_probs.astype(jnp.float32)
    table = None if whole_families else _reachable(depths, width, num_nodes)
    if whole_families:
        nodes = _families(root, log_probs, tokens, num_nodes)
    elif table is not None:
        nodes = _ranked(root, log_probs, tokens, num_nodes, table)
    else:
        nodes = _singles(root, log_probs, tokens, num_nodes)
    return from_parents(nodes.token, nodes.parent, jnp.isfinite(nodes.score), max_depth=min(depths, num_nodes - 1))


def _empty(batch: int, count: int) -> Nodes:
    zero = jnp.zeros((batch, count), jnp.int32)
    return Nodes(jnp.full((batch, count), -jnp.inf), zero, zero, zero, jnp.full((batch, count), -1, jnp.int32))


def _put(nodes: Nodes, at: Array | int, new: Nodes) -> Nodes:
    """Writes `new` [B, m] at columns at … at + m - 1."""
    return Nodes(*(jax.lax.dynamic_update_slice_in_dim(x, y.astype(x.dtype), at, 1) for x, y in zip(nodes, new, strict=True)))


def _take(nodes: Nodes, index: Int[Array, " B"]) -> Nodes:
    return Nodes(*(jnp.take_along_axis(x, index[:, None], 1) for x in nodes))


def _best(nodes: Nodes, open_: Bool[Array, "B n"], width: int) -> Int[Array, " B"]:
    """Index of the best open entry by (score, depth, rank, parent)."""
    score = jnp.where(open_, nodes.score, -jnp.inf)
    tied = open_ & (score == jnp.max(score, 1, keepdims=True))
    order = nodes.depth * width + nodes.rank
    order = jnp.where(tied, order, NONE)
    tied &= order == jnp.min(order, 1, keepdims=True)
    return jnp.argmin(jnp.where(tied, nodes.parent, NONE), 1)


class Reachable(NamedTuple):
    """Nodes that a tree of given size can hold, whatever the probabilities; in the order of ties.

    Attributes:
      ranks: rank of the candidate at every depth of the node's path; -1 behind its end.
      parent: index of the node's parent, -1 for children of the root.
    """

    ranks: np.ndarray
    parent: np.ndarray


@functools.cache
def _reachable(depths: int, width: int, num_nodes: int) -> Reachable | None:
    """The table for `_ranked`; None when it would be too large.

    A node is at most as probable as each node whose path is no longer and nowhere of a higher rank. Of these there are
    Π (rank + 1) at every depth, so only nodes where they all fit into the tree can be among the best.
    """
    found: list[tuple[int, ...]] = []
    paths = [((), 1, 0)]
    while paths:
        path, count, total = paths.pop()
        for rank in range(width if len(path) < depths else 0):
            better = count * (rank + 1)
            if total + better > num_nodes - 1:
                break
            found.append((*path, rank))
            if len(found) > LARGEST_TABLE:
                return None
            paths.append((found[-1], better, total + better))
    found.sort(key=lambda path: (len(path), path[::-1]))
    index = {path: i for i, path in enumerate(found)}
    ranks = np.full((len(found), depths), -1, np.int32)
    for row, path in zip(ranks, found, strict=True):
        row[: len(path)] = path
    return Reachable(ranks, np.array([index.get(path[:-1], -1) for path in found], np.int32))


def _ranked(root: Array, log_probs: Array, tokens: Array, num_nodes: int, table: Reachable) -> Nodes:
    """The best of all reachable nodes at once."""
    batch, depths, _ = log_probs.shape
    count = min(num_nodes - 1, len(table.parent))
    nodes = _empty(batch, num_nodes)
    zero = jnp.zeros((batch, 1), jnp.int32)
    nodes = _put(nodes, 0, Nodes(jnp.zeros((batch, 1)), root[:, None], zero, zero, zero - 1))
    scores = jnp.zeros((batch, len(table.parent)))
    for i in range(depths):
        ranks = table.ranks[:, i]
        scores += jnp.where(ranks >= 0, log_probs[:, i, np.maximum(ranks, 0)], 0.0)
    scores, kept = jax.lax.top_k(scores, count)
    depth = (table.ranks >= 0).sum(1).astype(np.int32)
    rank = table.ranks[np.arange(len(depth)), depth - 1]
    depth, rank, wanted = (jnp.asarray(x)[kept] for x in (depth, rank, table.parent))
    token = tokens[jnp.arange(batch)[:, None], depth - 1, rank]
    match = wanted[:, :, None] == kept[:, None, :]
    parent = jnp.where(wanted < 0, 0, jnp.where(match.any(-1), jnp.argmax(match, -1) + 1, -1))
    return _put(nodes, 1, Nodes(scores, token, depth, rank, parent))


def _singles(root: Array, log_probs: Array, tokens: Array, num_nodes: int) -> Nodes:
    """One node a step: the frontier holds the next sibling and the first child of every node so far."""
    batch, depths, width = log_probs.shape

    def entry(score: Array, depth: Array, rank: Array, parent: Array) -> Nodes:
        """Frontier entry: candidate `rank` of `depth` (from 1) behind a path of that score; none where there is no such."""
        exists = (depth <= depths) & (rank < width)
        flat = (jnp.clip(depth - 1, 0, depths - 1) * width + jnp.clip(rank, 0, width - 1))[:, None]
        own = jnp.take_along_axis(log_probs.reshape(batch, -1), flat, 1)[:, 0]
        token = jnp.take_along_axis(tokens.reshape(batch, -1), flat, 1)[:, 0]
        fields = (jnp.where(exists, score + own, -jnp.inf), token, depth, rank, parent)
        return Nodes(*(x[:, None] for x in fields))

    zero = jnp.zeros(batch, jnp.int32)
    first = Nodes(jnp.zeros((batch, 1)), root[:, None], zero[:, None], zero[:, None], zero[:, None] - 1)
    nodes = _put(_empty(batch, num_nodes), 0, first)
    frontier = _put(_empty(batch, 2 * num_nodes), 0, entry(zero.astype(jnp.float32), zero + 1, zero, zero))

    def grow(i: Array, carry):
        nodes, frontier = carry
        at = _best(frontier, jnp.isfinite(frontier.score), width)
        chosen = _take(frontier, at)
        score, _, depth, rank, parent = (x[:, 0] for x in chosen)
        above = jnp.take_along_axis(nodes.score, jnp.maximum(parent, 0)[:, None], 1)[:, 0]
        above = jnp.where(jnp.isfinite(score), above, -jnp.inf)  # an empty frontier has no siblings either
        nodes = _put(nodes, i, chosen)
        used = jnp.arange(2 * num_nodes)[None] == at[:, None]
        frontier = frontier._replace(score=jnp.where(used, -jnp.inf, frontier.score))
        frontier = _put(frontier, 2 * i - 1, entry(above, depth, rank + 1, parent))
        return nodes, _put(frontier, 2 * i, entry(score, depth + 1, zero, zero + i))

    return jax.lax.fori_loop(1, num_nodes, grow, (nodes, frontier))[0]


def _families(root: Array, log_probs: Array, tokens: Array, num_nodes: int) -> Nodes:
    """K nodes a step: the children of the best node that has none yet."""
    batch, depths, width = log_probs.shape
    steps = -(-(num_nodes - 1) // width)
    nodes = _empty(batch, 1 + steps * width)
    zero = jnp.zeros((batch, 1), jnp.int32)
    nodes = _put(nodes, 0, Nodes(jnp.zeros((batch, 1)), root[:, None], zero, zero, zero - 1))
    rank = jnp.broadcast_to(jnp.arange(width), (batch, width))

    def grow(i: Array, carry):
        nodes, open_ = carry
        index = _best(nodes, open_ & (nodes.depth < depths) & jnp.isfinite(nodes.score), width)
        parent = _take(nodes, index)
        depth = jnp.minimum(parent.depth, depths - 1)
        own = jnp.take_along_axis(log_probs, depth[..., None], 1)[:, 0]
        token = jnp.take_along_axis(tokens, depth[..., None], 1)[:, 0]
        fine = jnp.take_along_axis(open_ & (nodes.depth < depths), index[:, None], 1)
        children = Nodes(
            jnp.where(fine, parent.score + own, -jnp.inf),
            token,
            jnp.broadcast_to(depth + 1, token.shape),
            rank,
            jnp.broadcast_to(index[:, None], token.shape).astype(jnp.int32),
        )
        open_ &= jnp.arange(open_.shape[1])[None] != index[:, None]
        return _put(nodes, 1 + i * width, children), open_

    nodes, _ = jax.lax.fori_loop(0, steps, grow, (nodes, jnp.ones(nodes.score.shape, bool)))
    return Nodes(*(x[:, :num_nodes] for x in nodes))
