"""EAGLE-1's static draft tree: which ranks are tried behind which is fixed beforehand (Li et al. 2024, section 3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.config import ConfigError
from jaxspec.trees.tree import DraftTree, from_parents, pack_bits

# The tree that EAGLE-1's repository calls mc_sim_7b_63, node by node: "02" is the third best continuation of the best first
# token.
EAGLE1_TREE = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"


@dataclasses.dataclass(frozen=True)
class StaticTree:
    """A tree of ranks: a node (r_1, …, r_d) is the r_d-th best continuation of the node (r_1, …, r_{d-1}), counted from 0.

    Attributes:
      paths: its nodes without the root, by depth, then by ranks.

    Raises:
      ConfigError: a node is named twice or its parent is missing.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        nodes = sorted((tuple(int(r) for r in path) for path in self.paths), key=lambda p: (len(p), p))
        known = {()}
        for node in nodes:
            if not node or node in known or node[:-1] not in known or min(node) < 0:
                raise ConfigError(f"static tree: node {node} is empty, negative, named twice or has no parent")
            known.add(node)
        if not nodes:
            raise ConfigError("a static tree needs at least one node beside the root")
        object.__setattr__(self, "paths", tuple(nodes))

    @classmethod
    def parse(cls, text: str) -> StaticTree:
        """From words of one-digit ranks, as in `EAGLE1_TREE`."""
        return cls(tuple(tuple(int(c) for c in word) for word in text.split()))

    @classmethod
    def of(cls, value: StaticTree | str | Iterable[Iterable[int]]) -> StaticTree:
        """From a tree, from text (`parse`) or from rank paths."""
        if isinstance(value, StaticTree):
            return value
        return cls.parse(value) if isinstance(value, str) else cls(tuple(tuple(p) for p in value))

    @property
    def max_depth(self) -> int:
        """Levels below the root."""
        return len(self.paths[-1])

    @property
    def num_ranks(self) -> int:
        """Continuations that a node must be asked for."""
        return 1 + max(max(p) for p in self.paths)

    @property
    def inner(self) -> tuple[int, ...]:
        """Nodes (counted with the root as 0) that have children, without the root, in order."""
        with_children = {p[:-1] for p in self.paths}
        return tuple(i + 1 for i, p in enumerate(self.paths) if p in with_children)

    @property
    def num_inner(self) -> int:
        """Draft forwards rows, all levels together."""
        return len(self.inner)

    @property
    def parents(self) -> tuple[int, ...]:
        """Parent of every node, the root first with -1."""
        index = {(): 0} | {p: i + 1 for i, p in enumerate(self.paths)}
        return (-1, *(index[p[:-1]] for p in self.paths))


# (level, tokens [B,n], parent row of the level before [B,n], visible [B,n,W], levels of all entries so far, aux)
#   -> (tokens [B,n,num_ranks], aux)
ExpandStatic = Callable[[int, Array, Array, Array, tuple[int, ...], Any], tuple[Array, Any]]


def grow_static(
    root: Int[Array, " B"], first: Int[Array, "B R"], expand: ExpandStatic, aux: Any, shape: StaticTree
) -> tuple[DraftTree, Any]:
    """Fills a static tree level by level: one draft forward over the inner nodes of each level.

    Args:
      root: the bonus token.
      first: its best continuations, best first.
      expand: see `ExpandStatic`; in-flight entries are the inner nodes in order.
      aux: the drafter's own state, threaded through.
      shape: the tree.
    """
    batch = root.shape[0]
    parents, inner = shape.parents, shape.inner
    depth = [0, *map(len, shape.paths)]
    tokens: list[Array] = [root]
    best = {0: first}
    for level in range(shape.max_depth):
        for node in (i for i in range(1, len(depth)) if depth[i] == level + 1):
            tokens.append(best[parents[node]][:, shape.paths[node - 1][-1]])
        rows = [i for i in inner if depth[i] == level + 1]
        if not rows:
            continue
        entries = [i for i in inner if depth[i] <= level + 1]
        before = [i for i in inner if depth[i] == level]
        visible = np.array([[e in ancestors(parents, node) for e in entries] for node in rows])
        above = np.array([before.index(parents[node]) if before else 0 for node in rows], np.int32)
        ids, aux = expand(
            level,
            jnp.stack([tokens[node] for node in rows], 1),
            jnp.broadcast_to(above, (batch, len(rows))),
            pack_bits(jnp.broadcast_to(visible, (batch, *visible.shape))),
            tuple(depth[e] - 1 for e in entries),
            aux,
        )
        best |= {node: ids[:, i] for i, node in enumerate(rows)}
    nodes = jnp.stack(tokens, 1)
    tree = from_parents(
        nodes,
        jnp.broadcast_to(np.array(parents, np.int32), nodes.shape),
        jnp.ones(nodes.shape, bool),
        max_depth=shape.max_depth,
    )
    return tree, aux


def ancestors(parents: tuple[int, ...], node: int) -> set[int]:
    """A node and all above it."""
    seen = set()
    while node >= 0:
        seen.add(node)
        node = parents[node]
    return seen
