"""The second half of a low-rank adapter on top of a skinny product, in one kernel: sums of parts, product, gate.

XLA adds up the parts of both first products in kernels of their own; four products a layer make that 8 launches.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float

from pallas_kernels import device
from pallas_kernels.lookup import lookup
from pallas_kernels.tilings import MULTIPROCESSORS

MOST_ROWS = 64
COLUMNS = 64  # of a program
LEAST_CHUNK = 16  # rows of b in a product: what a tensor core takes


def _chunk(rank: int) -> int:
    """The largest power of two that divides the rank, at most 128."""
    return min(rank & -rank, 128)


def _columns(outputs: int) -> int:
    """Columns of a program: as many as leave a program to most multiprocessors."""
    return next((c for c in (128, 64) if outputs % c == 0 and outputs // c >= MULTIPROCESSORS - 4), 32)


def serves(x: Array, b: Array, silu: bool = False) -> bool:
    """Whether the kernel takes the case: few rows, a rank of at least one tensor core tile, whole columns."""
    rows, unit = x.shape[0] * x.shape[1], COLUMNS * (1 + silu)
    return rows <= MOST_ROWS and _chunk(b.shape[0]) >= LEAST_CHUNK and b.shape[1] % unit == 0 and x.dtype == b.dtype


def available() -> bool:
    """Whether the default device runs the kernel: CUDA GPUs from Ampere on."""
    return (device.capability() or 0) >= 8.0


def gated_lora(
    y: Float[Array, "parts B T O"],
    hidden: Float[Array, "more_parts B T rank"] | None,
    b: Float[Array, "rank O"],
    gate: Bool[Array, "B T 1"],
    *,
    scale: float,
    blocks: np.ndarray | None = None,
    silu: bool = False,
    interpret: bool = False,
) -> Float[Array, "B T O"]:
    """y + scale · hidden @ b in the rows that `gate` opens, y in the others; what is not finite becomes 0.

    Args:
      y: the product that is adapted, in parts that are to be added.
      hidden: x @ a, likewise; None: it stands behind y, [parts, B, T, O + rank].
      b: the second matrix; its type is that of the sums and of the result.
      gate: rows that take the adapter.
      scale: its factor.
      blocks: for each column the block of equally many rows of `b` that holds all that differs from zero, -1 for none;
        the others are not read. None: all count. Ignored where it changes within a program's columns, and where a block
        has too few rows for a product.
      silu: the columns are gates and as many values; give silu(gate) · value, [B, T, O / 2].
      interpret: run on a CPU.
    """
    rank = b.shape[0]
    tiles = None if blocks is None else blocks.reshape(-1, COLUMNS)
    if tiles is not None and (tiles != tiles[:, :1]).any():
        tiles = None
    used = rank if tiles is None else rank // max(int(tiles.max()) + 1, 1)
    if _chunk(used) < LEAST_CHUNK:
        tiles, used = None, rank
    of_tile = None if tiles is None else tuple(tiles[:, 0].tolist())
    return _gated_lora(y, hidden, b, gate, scale=scale, of_tile=of_tile, used=used, silu=silu, interpret=interpret)


STATIC = ("scale", "of_tile", "used", "silu", "interpret")


@functools.partial(jax.jit, static_argnames=STATIC)  # lowered once, however many layers
def _gated_lora(y, hidden, b, gate, *, scale: float, of_tile: tuple[int, ...] | None, used: int, silu: bool, interpret: bool):
    """The kernel: `of_tile` is the block of each program's columns, `used` the rows of `b` in a block."""
    parts, B, T, wide = y.shape
    R, (rank, outputs), dtype = B * T, b.shape, b.dtype
    rows, chunk, halves = max(16, pl.next_power_of_2(R)), _chunk(used), 2 if silu else 1
    behind = outputs if hidden is None else 0  # where x @ a begins in its array
    own_columns = outputs // halves
    width = _columns(own_columns) if of_tile is None else COLUMNS
    y, gate = y.reshape(parts, R, wide), gate.reshape(R).astype(jnp.int32)
    arrays = (y, b, gate) if hidden is None else (y, b, gate, hidden.reshape(-1, R, rank))

    def kernel(y_ref, b_ref, gate_ref, *refs):
        hidden_ref, out_ref = refs if len(refs) == 2 else (y_ref, *refs)
        row = jnp.arange(rows)[:, None]
        exists, at = row < R, jnp.minimum(row, R - 1)
        own_column = pl.program_id(0) * width + jnp.arange(width)[None]
        precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None

        def parts_of(ref, index):
            """All parts of some columns, in the middle: a sum over them then stays within a thread."""
            count = ref.shape[0]
            part = jnp.arange(pl.next_power_of_2(count))[None, :, None]
            mask = exists[:, None] if count == part.size else exists[:, None] & (part < count)
            return plt.load(ref.at[jnp.minimum(part, count - 1), at[:, None], index[:, None]], mask=mask, other=0)

        def added(found):
            return (found if found.shape[1] == 1 else found.astype(jnp.float32)).sum(1).astype(dtype)

        def asked(half):
            """What a half of the columns needs: everything is asked for before the first product waits for anything."""
            column, block = half * own_columns + own_column, jnp.int32(0)
            if of_tile is not None:
                per_half = len(of_tile) // halves
                block = lookup(np.array(of_tile[half * per_half : (half + 1) * per_half]), pl.program_id(0))
            some, start = block >= 0, jnp.maximum(block, 0) * used
            inner = [start + first + jnp.arange(chunk) for first in range(0, used, chunk)]
            right = [plt.load(b_ref.at[i[:, None], column], mask=some, other=0) for i in inner]
            return right, [parts_of(hidden_ref, behind + i[None]) for i in inner], parts_of(y_ref, column)

        def changed(right, left, own):
            change = sum(plt.dot(added(x), w, precision=precision) for x, w in zip(left, right, strict=True))
            own = added(own)
            found = (own.astype(jnp.float32) + scale * change).astype(dtype)
            found = jnp.where(jnp.abs(found.astype(jnp.float32)) < jnp.inf, found, jnp.zeros_like(found))
            return jnp.where(opened, found, own)

        needed = [asked(half) for half in range(halves)]
        opened = plt.load(gate_ref.at[jnp.minimum(jnp.arange(rows), R - 1)])[:, None] != 0
        found = [changed(*each) for each in needed]
        out = found[0]
        if silu:
            z, value = (x.astype(jnp.float32) for x in found)
            out = (z * lax.logistic(z) * value).astype(dtype)
        # Rows that do not exist lie outside the array: interpreted stores drop these, while masked ones collide.
        plt.store(out_ref.at[row, own_column], out, mask=exists)

    def whole(x):
        return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))

    out = jax.ShapeDtypeStruct((R, own_columns), dtype)
    return pl.pallas_call(
        kernel,
        grid=(own_columns // width,),
        in_specs=[whole(x) for x in arrays],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="gated_lora",
    )(*arrays).reshape(B, T, own_columns)
