"""Adding up the sums of tree attention's workers on Pallas' Mosaic GPU back end, in a program and in a cluster."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.merge_splits import MASKED

LOG2E = 1.4426950408889634
WARPGROUP_ROWS = 64  # wgmma's M


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
