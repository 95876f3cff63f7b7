"""Products of a few rows with big weights on Hopper: Pallas' Mosaic GPU back end, jax 0.11 and later.

    y[R, N] = x[R, K] @ w[K, N]      R up to 256 tokens; what counts is how fast w is read

Operands are swapped: columns of w fill wgmma's 64 rows and tokens are its columns, so that few tokens waste nothing. One
warpgroup fetches by TMA, one or two multiply. What limits such a product besides the memory:

* Every multiprocessor must have work for the same time: (column tile, step along K) pairs form one sequence that is cut
  into equal runs ("stream-K", Osama et al. 2023), one per program, at places that depend on K, N and the tiling alone. A
  tile that is cut leaves partial sums, added in their order by whatever XLA fuses behind. Cuts cost 4 · R · N bytes each
  way, so with many rows whole tiles are better, even if they leave some multiprocessors idle.
* The rows travel once per column tile: with 128 tokens and tiles of 64 columns twice as many bytes of x as of w leave the
  L2 cache, with 256 columns half as many. `cluster=2` halves that again: two neighbours work on neighbouring tiles, each
  fetches half of the tokens and TMA hands them to both.
* About 35 KB must be under way per multiprocessor to cover the latency: 3 to 8 stages, as many as shared memory holds.
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

from pallas_kernels import device
from pallas_kernels.shaped import Shaped

AVAILABLE = hasattr(plgpu, "InterpretGPUParams")  # the API as of jax 0.11
SMEM_BYTES = 227 * 1024  # what a program may use on Hopper
ROWS = (8, 16, 32, 64, 128, 256)  # tokens that a program is built for: a number of rows is rounded up to one of them
MOST_STAGES = 8
UNIT = 64  # columns: wgmma's M


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut. `columns`, `depth`, `steps` and `cluster` fix the order of additions, the rest only speed.

    Attributes:
      columns: of w that a program works on at a time, a multiple of 64 per consumer.
      depth: rows of w per pipeline stage.
      steps: pipeline stages that a program works off, the length of its run.
      consumers: warpgroups that multiply, each some of the columns.
      cluster: programs that share the tokens they fetch.
      chunk: tokens of a tile's results, 64 columns each, that are handed to TMA at once.
      begun: steps whose products a consumer begins before it waits for those of the step before: 0 or 1.
    """

    columns: int
    depth: int
    steps: int
    consumers: int = 1
    cluster: int = 1
    chunk: int = 32
    begun: int = 0

    def fits(self, rows: int, inputs: int, outputs: int) -> bool:
        """Whether the kernel can run a product of so many tokens, inputs and outputs."""
        whole = inputs % self.depth == 0 and outputs % (self.columns * self.cluster) == 0
        units = self.columns % (UNIT * self.consumers) == 0 and self.depth % 64 == 0
        if not (whole and units and rows <= ROWS[-1]):
            return False
        tokens = tokens_of(rows)
        registers = self.columns // self.consumers * tokens // 128  # of a thread, for the sums
        return registers <= 128 and tokens >= 8 * self.cluster and self.stages(tokens) >= 2

    def gates(self, rows: int, inputs: int, outputs: int) -> bool:
        """Whether the kernel can end in silu(gate) · value: of whole tiles, half of each gates and half values."""
        halves = self.columns % (2 * UNIT * self.consumers) == 0 and int(self.parts(inputs, outputs).max()) == 1
        return self.fits(rows, inputs, outputs) and halves

    def pieces(self, tokens: int, gated: bool = False) -> list[tuple[int, int]]:
        """First column and first token of the pieces in which a consumer hands out its part of a tile."""
        width = self.columns // self.consumers // (2 if gated else 1)
        return [(u, t) for u in range(0, width, UNIT) for t in range(0, tokens, min(self.chunk, tokens))]

    def places(self, tokens: int, gated: bool = False) -> int:
        """Pieces of a consumer that may be on their way out at once; the next tile begins at the first place again."""
        return 1 if len(self.pieces(tokens, gated)) % 2 else 2

    def stages(self, tokens: int, itemsize: int = 4, gated: bool = False) -> int:
        """Depth of the pipeline: what shared memory holds beside results of so many bytes, for 16-bit operands."""
        out = self.consumers * self.places(tokens, gated) * min(tokens, self.chunk) * UNIT * itemsize
        return min(MOST_STAGES, (SMEM_BYTES - 2048 - out) // (2 * self.depth * (self.columns + tokens)), self.steps)

    def parts(self, inputs: int, outputs: int) -> np.ndarray:
        """How many partial sums each column tile (of a cluster) has."""
        deep = inputs // self.depth
        first = np.arange(outputs // (self.columns * self.cluster)) * deep
        return (first + deep - 1) // self.steps - first // self.steps + 1


def tokens_of(rows: int) -> int:
    """The number of tokens that a program for so many rows is built for."""
    return next(t for t in ROWS if rows <= t)


def serves(x: Shaped, w: Shaped) -> bool:
    """Whether the kernel takes such operands: 16-bit floats of one type."""
    return x.dtype == w.dtype and x.dtype in (jnp.bfloat16, jnp.float16) and w.ndim == 2


def available() -> bool:
    """Whether the default device runs the kernel: Hopper, from jax 0.11 on."""
    return AVAILABLE and device.capability() == 9.0


def _tiled(size: int, dtype):
    """How a block [n, size] lies in shared memory: tiles of eight rows by one span of the swizzle."""
    bits = jnp.dtype(dtype).itemsize * 8
    span = plgpu.find_swizzle(size * bits)
    return plgpu.TilingTransform((8, span * 8 // bits)), plgpu.SwizzleTransform(span)


def _fetch(x_hbm, w_hbm, x_smem, w_smem, full, empty, *, start, stop, tile_steps, peer, tiling, stages, tokens, gated):
    """The producer: a ring of `stages` blocks of w and x, each refilled when all who read it are done.

    Half of a tile that is `gated` are columns of the first half of w, the other half the columns as far behind the middle.
    """
    every_row = pl.ds(start * 0, tokens)  # not a constant, which may not exceed the rows of x

    def fetch(unit, slot):
        tile, step = lax.div(unit, jnp.int32(tile_steps)), lax.rem(unit, jnp.int32(tile_steps))
        inner = pl.ds(step * tiling.depth, tiling.depth)
        shared = {"collective_axes": "peer"} if tiling.cluster > 1 else {}
        which = tile * tiling.cluster + peer
        whole = (pl.ds(which * tiling.columns, tiling.columns),)
        for i, columns in enumerate(_halves(w_hbm, which, tiling) if gated else whole):
            plgpu.copy_gmem_to_smem(w_hbm.at[inner, columns], w_smem.at[slot, i], full.at[slot])
        plgpu.copy_gmem_to_smem(x_hbm.at[every_row, inner], x_smem.at[slot], full.at[slot], **shared)

    def refill(unit, _):
        slot = lax.rem(unit - start, jnp.int32(stages))
        plgpu.barrier_wait(empty.at[slot])
        fetch(unit, slot)

    def drain(unit, _):
        plgpu.barrier_wait(empty.at[lax.rem(unit - start, jnp.int32(stages))])

    for i in range(stages):
        pl.when(start + i < stop)(functools.partial(fetch, start + i, i))
    lax.fori_loop(start + stages, stop, refill, None)
    lax.fori_loop(jnp.maximum(stop - stages, start), stop, drain, None)


def _halves(w_hbm, tile, tiling):
    """The gates' and the values' columns of a tile."""
    half = tiling.columns // 2
    return pl.ds(tile * half, half), pl.ds(w_hbm.shape[1] // 2 + tile * half, half)


def _multiply(
    x_smem, w_smem, out_smem, p_hbm, full, empty, *, run, start, stop, tile_steps, wg, peer, tiling, stages, tokens, gated
):
    """A consumer: its columns of every tile of the run, each tile's sums on their way out while the next one begins."""
    fold = 2 if gated else 1  # columns of w for one of the result
    width = tiling.columns // tiling.consumers // fold
    mine = pl.ds(wg * width, width)
    pieces, places, chunk = tiling.pieces(tokens, gated), tiling.places(tokens, gated), min(tokens, tiling.chunk)

    def slot_of(unit):
        return lax.rem(unit - start, jnp.int32(stages))

    def product(tile, _):
        first, last = jnp.maximum(tile * tile_steps, start), jnp.minimum((tile + 1) * tile_steps, stop)

        def accumulate(*sums):
            def step(unit, _):
                slot = slot_of(unit)
                plgpu.barrier_wait(full.at[slot])
                for i, each in enumerate(sums):
                    plgpu.wgmma(each, w_smem.at[slot, i, :, mine].T, x_smem.at[slot].T)
                plgpu.wgmma_wait(fold * tiling.begun)
                if tiling.begun:
                    pl.when(unit > first)(lambda: plgpu.barrier_arrive(empty.at[slot_of(unit - 1)]))
                else:
                    plgpu.barrier_arrive(empty.at[slot])

            lax.fori_loop(first, last, step, None)
            if tiling.begun:
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(empty.at[slot_of(last - 1)])
            return [each[...] for each in sums]

        sums = pl.run_scoped(accumulate, *[plgpu.ACC((width, tokens), jnp.float32)] * fold)
        if gated:  # of rounded products, as they are elsewhere
            gate, value = (each.astype(p_hbm.dtype).astype(jnp.float32) for each in sums)
            sums = [gate / (1 + jnp.exp(-gate)) * value]
        acc = sums[0].astype(p_hbm.dtype)
        part = run - lax.div(tile * tile_steps, jnp.int32(tiling.steps))
        column = (tile * tiling.cluster + peer) * (tiling.columns // fold) + wg * width
        for i, (u, t) in enumerate(pieces):
            plgpu.wait_smem_to_gmem(places - 1, wait_read_only=True)
            piece = plgpu.layout_cast(acc[u : u + UNIT, t : t + chunk], plgpu.Layout.WGMMA_TRANSPOSED)
            out_smem.at[wg, i % places].T[...] = piece
            plgpu.commit_smem()
            target = p_hbm.at[part, pl.ds(start * 0 + t, chunk), pl.ds(column + u, UNIT)]
            plgpu.copy_smem_to_gmem(out_smem.at[wg, i % places], target)

    tile = lax.div(start, jnp.int32(tile_steps))
    lax.fori_loop(tile, lax.div(stop - 1, jnp.int32(tile_steps)) + 1, product, None)
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("tiling", "dtype", "gated", "interpret"))  # lowered once for all layers
def partial_products(
    x: Float[Array, "R K"], w: Float[Array, "K N"], tiling: Tiling, *, dtype=jnp.float32, gated: bool = False, interpret=None
) -> Float[Array, "parts R M"]:
    """x @ w in partial sums; where `tiling.parts` has fewer for a tile than for others, what lies behind is not written.

    Args:
      x: rows, of the type of w.
      w: weights.
      tiling: one that `fits`.
      dtype: of the sums, which are added up in float32.
      gated: the columns of w are gates and as many values; the result is silu(gate) · value, N / 2 columns in one part.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    (rows, inputs), outputs = x.shape, w.shape[1]
    tokens = tokens_of(rows)
    if not tiling.fits(rows, inputs, outputs):
        raise ValueError(f"{tiling} does not fit a product of {rows} rows, {inputs} inputs and {outputs} outputs")
    if gated and not tiling.gates(rows, inputs, outputs):
        raise ValueError(f"{tiling} cannot gate a product of {inputs} inputs and {outputs} outputs")
    if rows > 8 and rows % 8:  # TMA splits the rows in eights, and 8 or fewer are one piece
        x = jnp.pad(x, ((0, -rows % 8), (0, 0)))
    tile_steps, parts = inputs // tiling.depth, tiling.parts(inputs, outputs)
    total = tile_steps * len(parts)
    stages, chunk = tiling.stages(tokens, jnp.dtype(dtype).itemsize, gated), min(tokens, tiling.chunk)
    axes = ("run", "peer") if tiling.cluster > 1 else ("run",)
    fold = 2 if gated else 1  # columns of w for one of the result
    wide = tiling.columns // fold

    def product_kernel(x_hbm, w_hbm, p_hbm, x_smem, w_smem, out_smem, full, empty):
        run, wg = lax.axis_index("run"), lax.axis_index("wg")
        peer = lax.axis_index("peer") if tiling.cluster > 1 else 0
        start = run * tiling.steps
        place = dict(
            start=start,
            stop=jnp.minimum(start + tiling.steps, total),
            tile_steps=tile_steps,
            peer=peer,
            tiling=tiling,
            stages=stages,
            tokens=tokens,
            gated=gated,
        )

        @pl.when(wg == tiling.consumers)
        def _():
            _fetch(x_hbm, w_hbm, x_smem, w_smem, full, empty, **place)

        @pl.when(wg < tiling.consumers)
        def _():
            _multiply(x_smem, w_smem, out_smem, p_hbm, full, empty, run=run, wg=wg, **place)

    ring = {"num_barriers": stages, "num_arrivals": tiling.consumers}
    clusters = {"cluster": (tiling.cluster,), "cluster_names": ("peer",)} if tiling.cluster > 1 else {}
    result = plgpu.kernel(
        product_kernel,
        out_type=jax.ShapeDtypeStruct((int(parts.max()), x.shape[0], outputs // fold), dtype),
        grid=(pl.cdiv(total, tiling.steps),),
        grid_names=axes[:1],
        num_threads=tiling.consumers + 1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((stages, tokens, tiling.depth), x.dtype, transforms=_tiled(tiling.depth, x.dtype)),
            plgpu.SMEM((stages, fold, tiling.depth, wide), w.dtype, transforms=_tiled(wide, w.dtype)),
            plgpu.SMEM((tiling.consumers, tiling.places(tokens, gated), chunk, UNIT), dtype, transforms=_tiled(UNIT, dtype)),
            plgpu.Barrier(num_barriers=stages, num_arrivals=3 if gated else 2),
            plgpu.ClusterBarrier(collective_axes=("peer",), **ring) if tiling.cluster > 1 else plgpu.Barrier(**ring),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        **clusters,
    )(x, w)
    return result[:, :rows]


def add_parts(p: Float[Array, "parts R N"], tiling: Tiling, inputs: int) -> Float[Array, "R N"]:
    """The sum of the partial sums that exist, in their order; XLA fuses it into what follows."""
    counts = tiling.parts(inputs, p.shape[2])
    exists = np.repeat(counts, tiling.columns * tiling.cluster)
    y = p[0]
    for i in range(1, p.shape[0]):  # what no program wrote is garbage: choose, never multiply by zero
        y = y + p[i] if (counts > i).all() else jnp.where(exists > i, y + p[i], y)
    return y


def skinny_product(x: Float[Array, "R K"], w: Float[Array, "K N"], tiling: Tiling, *, interpret=None) -> Float[Array, "R N"]:
    """x @ w, sums in float32, rounded to the type of x. A row's result does not depend on the rows beside it."""
    alone = tiling.parts(*w.shape).max() == 1
    p = partial_products(x, w, tiling, dtype=x.dtype if alone else jnp.float32, interpret=interpret)
    return add_parts(p, tiling, w.shape[0]).astype(x.dtype)
