"""Products of hundreds of rows with big weights on Hopper: Pallas' Mosaic GPU back end, jax 0.11 and later.

    y[R, N] = x[R, K] @ w[K, N]      R up to 512 tokens; what counts is energy, as the chip is at its power limit

64 tokens fill wgmma's rows and up to 256 columns of w its columns; two warpgroups multiply, each 64 of a tile's 128 tokens by
all of its columns, a third fetches by TMA. What costs energy besides the multiplications, and what is done about it:

* Operands are read from shared memory once per instruction: 10 KB for 64 x 256 x 16, 12 for 64 x 128 x 16, so wide tiles.
* The programs of a cluster work on the same columns for different tokens: each fetches a part of w's block and TMA hands it
  to all. Programs that run at the same time work on neighbouring tiles, tokens first, so that w is read from memory once.
* Multiprocessors that idle in a last, partly filled wave make the others run at a higher clock, hence a higher voltage, for
  the same time. Widths that leave no such wave: 224 for 28672 columns (four waves of 128 programs), 192 for 6144 and
  128 for 4096 (one); `parts` cuts along K where wide tiles are too few.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.skinny_product import AVAILABLE, MOST_STAGES, SMEM_BYTES, add_parts, available, serves, tiled

__all__ = ["AVAILABLE", "ROWS", "Tiling", "add_parts", "available", "partial_products", "serves"]

ROWS = 512  # at most
CONSUMERS, UNIT = 2, 64  # warpgroups that multiply; tokens of each: wgmma's M
TOKENS = CONSUMERS * UNIT  # of a tile
AT_ONCE = {1: 132, 2: 66, 4: 28}
"""Programs or clusters, by their size, that an H200 runs at once: not all of its 132 multiprocessors form clusters of four."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut. `cuts` alone fixes the order of additions, the rest only speed.

    Attributes:
      columns: of w in a tile.
      depth: rows of w per pipeline stage.
      cuts: partial sums of each result, of equal shares of K.
      cluster: programs that share the columns they fetch, each with tokens of its own.
      chunk: columns of a tile's results that are handed to TMA at once.
    """

    columns: int
    depth: int = 64
    cuts: int = 1
    cluster: int = 2
    chunk: int = 64

    def fits(self, rows: int, inputs: int, outputs: int) -> bool:
        """Whether the kernel can run a product of so many tokens, inputs and outputs."""
        whole = outputs % self.columns == 0 and inputs % (self.depth * self.cuts) == 0
        units = self.columns % 16 == 0 and self.columns <= 256 and self.depth % 64 == 0 and self.columns % self.chunk == 0
        runs = self.cluster in AT_ONCE and self.stages() >= 2
        return whole and units and self.chunk % 16 == 0 and rows <= ROWS and runs

    def gates(self, rows: int, inputs: int, outputs: int) -> bool:
        """Whether the kernel can end in silu(gate) · value: half of each tile gates and half values."""
        return self.fits(rows, inputs, outputs) and self.cuts == 1 and self.columns // 2 % self.chunk == 0

    def places(self, gated: bool = False) -> int:
        """Pieces of results that may be on their way out at once; the next tile begins at the first place again."""
        return 1 if self.columns // (2 if gated else 1) // self.chunk % 2 else 2

    def stages(self, itemsize: int = 4, gated: bool = False) -> int:
        """Depth of the pipeline: what shared memory holds beside results of so many bytes, for 16-bit operands."""
        out = CONSUMERS * self.places(gated) * UNIT * self.chunk * itemsize
        return min(MOST_STAGES, (SMEM_BYTES - 2048 - out) // (2 * self.depth * (self.columns + TOKENS)))

    def parts(self, inputs: int, outputs: int) -> np.ndarray:
        """How many partial sums each column tile has."""
        return np.full(outputs // self.columns, self.cuts)


@dataclasses.dataclass(frozen=True)
class _Work:
    """A cluster's tiles: its own number and every `clusters`-th behind it; tokens change fastest, then columns, then cuts."""

    groups: int  # of tokens, one tile of them per program of a cluster
    tiles: int  # of columns
    cuts: int
    steps: int  # pipeline stages of a tile
    most: int  # clusters that run at once

    @property
    def total(self) -> int:
        return self.groups * self.tiles * self.cuts

    @property
    def clusters(self) -> int:
        """As few as need no more turns than the most."""
        return pl.cdiv(self.total, pl.cdiv(self.total, self.most))

    def turns(self, cluster):
        """How many tiles a cluster works on."""
        return lax.div(self.total - 1 - cluster, jnp.int32(self.clusters)) + 1

    def at(self, cluster, turn):
        """(group of tokens, column tile, cut)."""
        tile = cluster + turn * self.clusters
        rest = lax.div(tile, jnp.int32(self.groups))
        return lax.rem(tile, jnp.int32(self.groups)), lax.rem(rest, jnp.int32(self.tiles)), lax.div(rest, jnp.int32(self.tiles))


def _fetch(x_hbm, w_hbm, x_smem, w_smem, full, empty, *, cluster, peer, tiling, work, stages):
    """The producer: a ring of `stages` blocks of w and x, each refilled when all who read it are done."""
    count = work.turns(cluster) * work.steps
    halves, width = w_smem.shape[1], w_smem.shape[3]

    def fetch(i, slot):
        group, column, cut = work.at(cluster, lax.div(i, jnp.int32(work.steps)))
        inner = pl.ds((cut * work.steps + lax.rem(i, jnp.int32(work.steps))) * tiling.depth, tiling.depth)
        shared = {"collective_axes": "peer"} if tiling.cluster > 1 else {}
        for half in range(halves):  # gates, then values, which lie behind the middle
            columns = pl.ds(half * (w_hbm.shape[1] // 2) + column * width, width)
            plgpu.copy_gmem_to_smem(w_hbm.at[inner, columns], w_smem.at[slot, half], full.at[slot], **shared)
        tokens = pl.ds((group * tiling.cluster + peer) * TOKENS, TOKENS)
        plgpu.copy_gmem_to_smem(x_hbm.at[tokens, inner], x_smem.at[slot], full.at[slot])

    def refill(i, _):
        slot = lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(empty.at[slot])
        fetch(i, slot)

    def drain(i, _):
        plgpu.barrier_wait(empty.at[lax.rem(i, jnp.int32(stages))])

    for i in range(stages):
        pl.when(i < count)(functools.partial(fetch, jnp.int32(i), i))
    lax.fori_loop(stages, count, refill, None)
    lax.fori_loop(jnp.maximum(count - stages, 0), count, drain, None)


def _multiply(x_smem, w_smem, out_smem, p_hbm, full, empty, *, wg, cluster, peer, tiling, work, stages):
    """A consumer: 64 of each tile's tokens, the results on their way out while the next tile begins."""
    halves, width = w_smem.shape[1], w_smem.shape[3]
    mine = pl.ds(wg * UNIT, UNIT)
    pieces, places = width // tiling.chunk, tiling.places(halves == 2)

    def turn_over(turn, _):
        first = turn * work.steps

        def accumulate(*sums):
            def step(i, _):
                slot = lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(full.at[slot])
                for half, each in enumerate(sums):
                    plgpu.wgmma(each, x_smem.at[slot, mine], w_smem.at[slot, half])
                plgpu.wgmma_wait(halves)  # those of the step before are done
                pl.when(i > first)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(i - 1, jnp.int32(stages))]))

            lax.fori_loop(first, first + work.steps, step, None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(empty.at[lax.rem(first + work.steps - 1, jnp.int32(stages))])
            return [each[...] for each in sums]

        sums = pl.run_scoped(accumulate, *[plgpu.ACC((UNIT, width), jnp.float32)] * halves)
        if halves == 2:  # of rounded products, as they are elsewhere
            gate, value = (each.astype(p_hbm.dtype).astype(jnp.float32) for each in sums)
            root = lax.rsqrt(1 + jnp.exp(-gate))  # the reciprocal's: a division is some forty instructions for each element
            sums = [gate * root * root * value]
        result = sums[0].astype(p_hbm.dtype)
        group, column, cut = work.at(cluster, turn)
        tokens = pl.ds((group * tiling.cluster + peer) * TOKENS + wg * UNIT, UNIT)
        for i in range(pieces):
            plgpu.wait_smem_to_gmem(places - 1, wait_read_only=True)
            out_smem[wg, i % places] = result[:, i * tiling.chunk : (i + 1) * tiling.chunk]
            plgpu.commit_smem()
            columns = pl.ds(column * width + i * tiling.chunk, tiling.chunk)
            plgpu.copy_smem_to_gmem(out_smem.at[wg, i % places], p_hbm.at[cut, tokens, columns])

    lax.fori_loop(0, work.turns(cluster), turn_over, None)
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("tiling", "dtype", "gated", "interpret"))  # lowered once for all layers
def partial_products(
    x: Float[Array, "R K"],
    w: Float[Array, "K N"],
    tiling: Tiling,
    *,
    dtype=jnp.float32,
    gated: bool = False,
    interpret=None,
) -> Float[Array, "parts R N"]:
    """x @ w in partial sums. A row's result depends neither on the rows beside it nor on their number.

    Args:
      x: rows, of the type of w.
      w: weights.
      tiling: one that `fits`.
      dtype: of the sums, which are added up in float32.
      gated: the columns of w are gates and as many values; the result is silu(gate) · value, N / 2 columns in one part.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    (rows, inputs), outputs = x.shape, w.shape[1]
    if not tiling.fits(rows, inputs, outputs):
        raise ValueError(f"{tiling} does not fit a product of {rows} rows, {inputs} inputs and {outputs} outputs")
    if gated and not tiling.gates(rows, inputs, outputs):
        raise ValueError(f"{tiling} cannot gate a product of {inputs} inputs and {outputs} outputs")
    x = jnp.pad(x, ((0, max(-rows % 8, TOKENS - rows)), (0, 0)))  # TMA: whole eights, no box beyond the array
    halves = 2 if gated else 1
    width, stages = tiling.columns // halves, tiling.stages(jnp.dtype(dtype).itemsize, gated)
    work = _Work(
        groups=pl.cdiv(rows, TOKENS * tiling.cluster), tiles=outputs // tiling.columns, cuts=tiling.cuts,
        steps=inputs // tiling.depth // tiling.cuts, most=AT_ONCE[tiling.cluster],
    )  # fmt: skip

    def product_kernel(x_hbm, w_hbm, p_hbm, x_smem, w_smem, out_smem, full, empty):
        wg = lax.axis_index("wg")
        place = dict(
            cluster=lax.axis_index("cluster"), peer=lax.axis_index("peer") if tiling.cluster > 1 else 0,
            tiling=tiling, work=work, stages=stages,
        )  # fmt: skip

        @pl.when(wg == CONSUMERS)
        def _():
            _fetch(x_hbm, w_hbm, x_smem, w_smem, full, empty, **place)

        @pl.when(wg < CONSUMERS)
        def _():
            _multiply(x_smem, w_smem, out_smem, p_hbm, full, empty, wg=wg, **place)

    ring = {"num_barriers": stages, "num_arrivals": CONSUMERS}
    clusters = {"cluster": (tiling.cluster,), "cluster_names": ("peer",)} if tiling.cluster > 1 else {}
    lies = tiled(width, w.dtype)  # wgmma reads both operands with one swizzle
    places = tiling.places(gated)
    result = plgpu.kernel(
        product_kernel,
        out_type=jax.ShapeDtypeStruct((tiling.cuts, x.shape[0], outputs // halves), dtype),
        grid=(work.clusters,),
        grid_names=("cluster",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((stages, TOKENS, tiling.depth), x.dtype, transforms=lies),
            plgpu.SMEM((stages, halves, tiling.depth, width), w.dtype, transforms=lies),
            plgpu.SMEM((CONSUMERS, places, UNIT, tiling.chunk), dtype, transforms=tiled(tiling.chunk, dtype)),
            plgpu.Barrier(num_barriers=stages, num_arrivals=halves + 1),
            plgpu.ClusterBarrier(collective_axes=("peer",), **ring) if tiling.cluster > 1 else plgpu.Barrier(**ring),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=gated),
        interpret=interpret,
        **clusters,
    )(x, w)
    return result[:, :rows]


def wide_product(x: Float[Array, "R K"], w: Float[Array, "K N"], tiling: Tiling, *, interpret=None) -> Float[Array, "R N"]:
    """x @ w, sums in float32, rounded to the type of x."""
    p = partial_products(x, w, tiling, dtype=x.dtype if tiling.cuts == 1 else jnp.float32, interpret=interpret)
    return add_parts(p, tiling, w.shape[0]).astype(x.dtype)
