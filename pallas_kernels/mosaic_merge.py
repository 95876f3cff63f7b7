"""Adding up the sums of tree attention's workers on Pallas' Mosaic GPU back end: in a program, in a cluster, and of splits."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.inflight import last_slot

LOG2E = 1.4426950408889634
MASKED = -1e30
WARPGROUP_ROWS = 64  # wgmma's M
MERGE_CHUNK = 16  # splits that are read at once


def divide(x, by: int):
    """Quotient of numbers that are not negative."""
    return lax.div(x, jnp.asarray(by, x.dtype))


def over(x, columns: int):
    """One value per row to every column of that row."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


def give(acc, m, total, spare, joined):
    """Leaves sums [R, Dv], maxima [R] (base 2) and totals [R] in `spare`, and arrives at `joined`."""
    for place, value in zip(spare, (acc, m, total), strict=True):
        place[...] = value
    plgpu.commit_smem()
    plgpu.barrier_arrive(joined)


def join(acc, m, total, spare, joined):
    """One's own sums, maxima and totals together with those that another warpgroup gives."""
    plgpu.barrier_wait(joined)
    row, wgmma = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
    acc_, m_, total_ = (plgpu.load(x, layout=at, optimized=False) for x, at in zip(spare, (wgmma, row, row), strict=True))
    top = jnp.maximum(m, m_)
    mine, its = jnp.exp2(m - top), jnp.exp2(m_ - top)
    return acc * over(mine, acc.shape[1]) + acc_ * over(its, acc.shape[1]), top, total * mine + total_ * its


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Adds up the sums of a cluster's programs: each program takes its part of the channels from all of them.

    A program shows the part for the neighbour j places on in `sums[j]`, so that every place is read at a position that is
    known when compiling: from program `peer - j`, place j.

    Attributes:
      sums: `cluster` places [R, Dv / cluster] in shared memory.
      tops: log-sum-exps [R] in shared memory.
      hbm: in their stead, where interpreted, ([cluster, R, Dv], [cluster, R]) in global memory.
      shown: cluster barrier, one arrival a program.
      peer: this program's number in its cluster.
      cluster: programs.
    """

    sums: list
    tops: Any
    hbm: tuple | None
    shown: Any
    peer: Any
    cluster: int

    def __call__(self, acc, lse):
        """From a program's normalised sums [R, Dv] and log-sum-exps [R] to everyone's: ([R, Dv / cluster], [R])."""
        width = acc.shape[1] // self.cluster
        if self.hbm is None:
            pieces = self._rotated([acc[:, j * width : (j + 1) * width] for j in range(self.cluster)])
            for place, piece in zip(self.sums, pieces, strict=True):
                place[...] = piece
            self.tops[...] = lse
        else:
            self.hbm[0][self.peer], self.hbm[1][self.peer] = acc, lse
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.shown)
        plgpu.barrier_wait(self.shown)
        row, wgmma = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
        sources = [lax.rem(self.peer + (self.cluster - j), jnp.int32(self.cluster)) for j in range(self.cluster)]
        lses = [plgpu.load(self._of(self.tops, 1, c), layout=row, optimized=False) for c in sources]
        parts = []
        for j, c in enumerate(sources):
            place = self._of(self.sums[j], 0, c)
            if self.hbm is not None:
                place = place.at[:, pl.ds(self.peer * width, width)]
            parts.append(plgpu.load(place, layout=wgmma, optimized=False))
        top = functools.reduce(jnp.maximum, lses)
        weights = [jnp.exp2(x - top) for x in lses]
        total = functools.reduce(jnp.add, weights)
        acc = functools.reduce(jnp.add, (part * over(w / total, width) for part, w in zip(parts, weights, strict=True)))
        return acc, jnp.where(top > MASKED, top + jnp.log(total) * LOG2E, MASKED)

    def _of(self, place, which, peer):
        return plgpu.cluster_ref(place, {"peer": peer}) if self.hbm is None else self.hbm[which].at[peer]

    def _rotated(self, pieces: list):
        """pieces[(j + peer) % cluster] at j: registers cannot be indexed, so they move by powers of two or stay."""
        for bit in range((self.cluster - 1).bit_length()):
            moves = plgpu.layout_cast(jnp.full(pieces[0].shape, self.peer & (1 << bit), jnp.int32), plgpu.Layout.WGMMA) != 0
            n = self.cluster
            pieces = [jnp.where(moves, pieces[(j + (1 << bit)) % n], piece) for j, piece in enumerate(pieces)]
        return pieces


def merge(
    part_ref,  # [B, splits, K, rows * Dv] float32
    lse_ref,  # [B, splits, K, rows]
    length_ref,  # [B]
    out_ref,  # [B, K, T * G * Dv], or [B, T, H * Dv] where a program's rows are neighbours there too
    *,
    together: int,
    neighbours: bool,
    tokens: int | None,
    G: int,
    Dv: int,
    T: int,
    slots: int,
    causal: bool,
    num_inflight: int,
    num_slots: int,
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
    stop = jnp.minimum(divide(stop + (slots - 1), slots), splits)  # a split that had no turn has written nothing
    element = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)

    def spread(scalars):  # one value per row to every channel of that row
        out = plgpu.layout_cast(jnp.full((size,), scalars[0]), layout)
        for j, x in enumerate(scalars[1:], 1):
            out = jnp.where(element < j * Dv, out, plgpu.layout_cast(jnp.full((size,), x), layout))
        return out

    def add(i, carry):
        acc, tops, totals = carry
        at = [jnp.minimum(i * MERGE_CHUNK + c, splits - 1) for c in range(MERGE_CHUNK)]
        live = [i * MERGE_CHUNK + c < stop for c in range(MERGE_CHUNK)]
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
    acc, _, totals = lax.fori_loop(jnp.int32(0), divide(stop + (MERGE_CHUNK - 1), MERGE_CHUNK), add, carry)
    acc = acc / spread([jnp.where(n == 0, 1.0, n) for n in totals])
    acc = acc.astype(out_ref.dtype)
    if neighbours:
        channel = (head * G + lax.rem(row, jnp.int32(G))) * Dv
        out_ref[b, t_first, pl.ds(channel, size)] = acc
    else:
        out_ref[b, head, pl.ds(row * Dv, size)] = acc


def merge_splits(
    part: Float[Array, "B splits K rows Dv"],
    lse: Float[Array, "B splits K rows"],
    length: Int[Array, " B"],
    dtype,
    *,
    K: int,
    G: int,
    Dv: int,
    T: int,
    interpret,
    **limits,
) -> Float[Array, "B T H Dv"]:
    """The splits' normalised sums and log-sum-exps (base 2) as one result, by a kernel of its own; `limits` as in `merge`."""
    B, splits, _, rows, _ = part.shape
    together = 128 // math.gcd(128, Dv)  # rows of a program: a multiple of 128 channels
    neighbours = G % together == 0
    groups = pl.cdiv(T * G, together)
    merged = plgpu.kernel(
        functools.partial(merge, together=together, neighbours=neighbours, G=G, Dv=Dv, T=T, **limits),
        out_type=jax.ShapeDtypeStruct((B, T, K * G * Dv) if neighbours else (B, K, groups * together * Dv), dtype),
        grid=(B, groups, K),
        grid_names=("batch", "rows", "kv_head"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=not interpret),
        interpret=interpret or None,
    )(part.reshape(B, splits, K, rows * Dv), lse, length)
    if neighbours:
        return merged.reshape(B, T, K * G, Dv)
    merged = merged.reshape(B, K, groups * together, Dv)[:, :, : T * G].reshape(B, K, T, G, Dv)
    return merged.transpose(0, 2, 1, 3, 4).reshape(B, T, K * G, Dv)
