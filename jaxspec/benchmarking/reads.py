"""The bytes that a round cannot avoid reading, counted in the program itself: weights of products and committed KV."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
from jax.extend import core

from jaxspec.benchmarking.parts import part_of
from jaxspec.kvcache import is_pool
from jaxspec.round import Program, RoundState, round_step

_MULTIPLY = {"dot_general", "pallas_call", "custom_vmap_call"}
"""Primitives that a weight enters to be multiplied: products, and our kernels on Triton and (wrapped by Pallas) Mosaic GPU."""
_VIEWS = {
    "convert_element_type",
    "transpose",
    "reshape",
    "broadcast_in_dim",
    "squeeze",
    "slice",
    "dynamic_slice",
    "concatenate",
}


def round_reads(program: Program, params: Any, draft_params: Any, state: RoundState, context: int) -> dict[str, int]:
    """Bytes by part: every weight once for each product it enters, every pool once for each attention over it.

    A pool counts with `context` committed positions per sequence (in layers with a window, with those the window holds),
    in-flight entries and everything a kernel could keep on the chip with nothing. Embedding rows are left out.

    Args:
      program, params, draft_params, state: as for `jaxspec.round.round_step`; only their shapes matter.
      context: committed tokens of every sequence.
    """
    batch = state.tokens.shape[0]
    closed = jax.make_jaxpr(lambda p, d, s: round_step(program, p, d, s))(params, draft_params, state)
    kinds = [
        *(("weight", None) for _ in jax.tree.leaves((params, draft_params))),
        *(kind for layers in _pools(state, program.config.windows) for kind in layers),
    ]
    tracer = _Tracer(batch, context)
    tracer.walk(closed.jaxpr, dict(zip(closed.jaxpr.invars, kinds, strict=True)), "")
    return dict(tracer.bytes)


def _pools(state: RoundState, windows: tuple[int | None, ...]) -> Iterable[list]:
    """The kind of each leaf of the state: ("pool", window, which contents) for KV pools, None for all else."""

    def of(tree: Any, windows: Iterable[int | None]) -> list:
        window = iter(windows)
        kinds = []
        for node in jax.tree.leaves(tree, is_leaf=is_pool):
            if is_pool(node):
                kinds += [("pool", next(window, None), object()) for _ in node]
            else:
                kinds.append(None)
        return kinds

    target = len(state.cache.layers)
    flat, _ = jax.tree_util.tree_flatten(state, is_leaf=is_pool)
    assert all(is_pool(x) for x in flat[:target]), "the target's cache comes first in a RoundState"
    yield of(flat[:target], windows)
    yield of(flat[target:], ())


class _Tracer:
    """Follows weights and pools through a program and adds up what is read.

    A pool's contents have an identity, renewed by every write: an attention reads them once, however its kernel is made.
    """

    def __init__(self, batch: int, context: int):
        self.bytes: Counter[str] = Counter()
        self.batch, self.context = batch, context
        self.seen: set = set()
        self.values = itertools.count()

    def walk(self, jaxpr: Any, kinds: dict, stack: str) -> list:
        """Runs through the equations of `jaxpr`, whose inputs have `kinds`; returns the kinds of its outputs."""
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            scope = f"{stack}/{eqn.source_info.name_stack}"
            given = [None if isinstance(v, core.Literal) else kinds.get(v) for v in eqn.invars]
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            inner = getattr(inner, "jaxpr", inner)
            transparent = inner is not None and name in ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
            pools = [(v, *kind[1:]) for v, kind in zip(eqn.invars, given, strict=True) if kind and kind[0] == "pool"]
            if transparent:
                found = self.walk(inner, dict(zip(inner.invars, given, strict=True)), scope)
                kinds |= {v: k for v, k in zip(eqn.outvars, found, strict=True) if k}
                continue
            if name in _MULTIPLY:
                for var, kind in zip(eqn.invars, given, strict=True):
                    if kind and kind[0] == "weight" and var.aval.ndim > 1:  # not a norm's scale
                        stored = kind[1] or var.aval.dtype.itemsize
                        self.bytes[part_of(scope, True)] += var.aval.size * stored
            if name == "dot_general":
                continue
            if "tree_attention" in scope:
                for var, window, value in pools:
                    if value not in self.seen:
                        self.seen.add(value)
                        length = self.context if window is None else min(window, self.context)
                        heads = var.aval.shape[-2] * var.aval.shape[-1] * var.aval.dtype.itemsize
                        self.bytes[part_of(scope, False)] += self.batch * length * heads
            elif name in _VIEWS and given[0] and given[0][0] == "weight" and (name != "concatenate" or all(given)):
                stored = given[0][1] or eqn.invars[0].aval.dtype.itemsize
                kinds[eqn.outvars[0]] = ("weight", stored)
            elif pools:  # a write: the pool of the same shape that comes out
                for out in eqn.outvars:
                    same = [window for v, window, _ in pools if v.aval.shape == out.aval.shape]
                    if same:
                        kinds[out] = ("pool", same[0], next(self.values))
        return [None if isinstance(v, core.Literal) else kinds.get(v) for v in jaxpr.outvars]
