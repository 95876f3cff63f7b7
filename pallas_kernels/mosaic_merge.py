"""Adding up the splits of tree attention on Pallas' Mosaic GPU back end."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.inflight import last_slot

MASKED = -1e30
WARPGROUP_ROWS = 64  # wgmma's M
MERGE_CHUNK = 16  # splits that are read at once


def divide(x, by: int):
    """Quotient of numbers that are not negative."""
    return lax.div(x, jnp.asarray(by, x.dtype))


def merge(
    part_ref,  # [B, splits, K, rows * Dv] float32
    lse_ref,  # [B, splits, K, rows]
    length_ref,  # [B]
    position_ref,  # [B, T]
    out_ref,  # [B, K, T * G * Dv], or [B, T, H * Dv] where a program's rows are neighbours there too
    *,
    together: int,
    neighbours: bool,
    tokens: int | None,
    G: int,
    Dv: int,
    T: int,
    split: int,
    causal: bool,
    num_inflight: int,
    num_slots: int,
    window: int | None,
    sink: int,
):
    """The kernel of one program: the same `together` rows of all splits, weighted by their log-sum-exp in base 2."""
    b, group, head = (lax.axis_index(a) for a in ("batch", "rows", "kv_head"))
    splits = part_ref.shape[1]
    size = together * Dv
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=1)
    row = place = group * together
    t_first, t_last = divide(row, G), divide(row + (together - 1), G)
    if tokens is not None:  # the rows of a warpgroup are ordered by head, then token
        tile = divide(t_first, tokens)
        place = tile * WARPGROUP_ROWS + lax.rem(row, jnp.int32(G)) * tokens + (t_first - tile * tokens)
    length = length_ref[b]
    stop = last_slot(length, t_last + 1, causal=causal, M=num_inflight, T=T, num_slots=num_slots)
    stop = divide(stop + (split - 1), split)
    first, sinks = jnp.int32(0), 0
    if window is not None:
        nearest = functools.reduce(jnp.minimum, [position_ref[b, divide(row + j, G)] for j in range(together)])
        first = divide(jnp.minimum(jnp.maximum(nearest - (window - 1), 0), length), split)
        sinks = -(-sink // split)
    lower = jnp.int32(0) if sinks else divide(first, MERGE_CHUNK)
    element = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)

    def spread(scalars):  # one value per row to every channel of that row
        out = plgpu.layout_cast(jnp.full((size,), scalars[0]), layout)
        for j, x in enumerate(scalars[1:], 1):
            out = jnp.where(element < j * Dv, out, plgpu.layout_cast(jnp.full((size,), x), layout))
        return out

    def add(i, carry):
        acc, tops, totals = carry
        at = [jnp.minimum(i * MERGE_CHUNK + c, splits - 1) for c in range(MERGE_CHUNK)]
        live = [(s < stop) & ((s >= first) | (s < sinks)) for s in (i * MERGE_CHUNK + c for c in range(MERGE_CHUNK))]
        lses = [[lse_ref[b, s, head, place + j] for j in range(together)] for s in at]
        values = [plgpu.load(part_ref.at[b, s, head, pl.ds(place * Dv, size)], layout=layout, optimized=False) for s in at]
        lses = [[jnp.where(ok, x, MASKED) for x in xs] for ok, xs in zip(live, lses, strict=True)]
        new_tops = [functools.reduce(jnp.maximum, [xs[j] for xs in lses], tops[j]) for j in range(together)]
        acc = acc * spread([jnp.exp2(old - new) for old, new in zip(tops, new_tops, strict=True)])
        totals = [n * jnp.exp2(old - new) for n, old, new in zip(totals, tops, new_tops, strict=True)]
        for value, xs in zip(values, lses, strict=True):
            weights = [jnp.where(x > MASKED, jnp.exp2(x - top), 0.0) for x, top in zip(xs, new_tops, strict=True)]
            totals = [n + w for n, w in zip(totals, weights, strict=True)]
            weight = spread(weights)
            acc = acc + jnp.where(weight > 0, value * weight, jnp.zeros_like(value))  # what nobody wrote may be NaN
        return acc, tuple(new_tops), tuple(totals)

    carry = (spread([jnp.float32(0)] * together), (jnp.float32(MASKED),) * together, (jnp.float32(0),) * together)
    acc, _, totals = lax.fori_loop(lower, divide(stop + (MERGE_CHUNK - 1), MERGE_CHUNK), add, carry)
    acc = acc / spread([jnp.where(n == 0, 1.0, n) for n in totals])
    acc = acc.astype(out_ref.dtype)
    if neighbours:
        channel = (head * G + lax.rem(row, jnp.int32(G))) * Dv
        out_ref[b, t_first, pl.ds(channel, size)] = acc
    else:
        out_ref[b, head, pl.ds(row * Dv, size)] = acc
