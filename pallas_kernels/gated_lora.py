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


def _lookup(table: np.ndarray, index: Array) -> Array:
    """table[index], computed: a load would keep those waiting that need it. Meant for few runs of equal values."""
    period = next(p for p in range(1, len(table) + 1) if len(table) % p == 0 and (table.reshape(-1, p) == table[:p]).all())
    value, place = jnp.int32(table[0]), index % period
    for i in np.flatnonzero(np.diff(table[:period])) + 1:
        value = jnp.where(place >= i, jnp.int32(table[i]), value)
    return value


def serves(x: Array, b: Array) -> bool:
    """Whether the kernel takes the case: few rows, a rank of at least one tensor core tile, whole columns."""
    rows = x.shape[0] * x.shape[1]
    return rows <= MOST_ROWS and _chunk(b.shape[0]) >= LEAST_CHUNK and b.shape[1] % COLUMNS == 0 and x.dtype == b.dtype


def available() -> bool:
    """Whether the default device runs the kernel: CUDA GPUs from Ampere on."""
    return (device.capability() or 0) >= 8.0


def gated_lora(
    y: Float[Array, "parts B T O"],
    hidden: Float[Array, "more_parts B T rank"],
    b: Float[Array, "rank O"],
    gate: Bool[Array, "B T 1"],
    *,
    scale: float,
    blocks: np.ndarray | None = None,
    interpret: bool = False,
) -> Float[Array, "B T O"]:
    """y + scale · hidden @ b in the rows that `gate` opens, y in the others; what is not finite becomes 0.

    Args:
      y: the product that is adapted, in parts that are to be added.
      hidden: x @ a, likewise.
      b: the second matrix; its type is that of the sums and of the result.
      gate: rows that take the adapter.
      scale: its factor.
      blocks: for each column the block of equally many rows of `b` that holds all that differs from zero, -1 for none;
        the others are not read. None: all count. Ignored where it changes within a program's columns, and where a block
        has too few rows for a product.
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
    return _gated_lora(y, hidden, b, gate, scale=scale, of_tile=of_tile, used=used, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("scale", "of_tile", "used", "interpret"))  # lowered once, however many layers
def _gated_lora(y, hidden, b, gate, *, scale: float, of_tile: tuple[int, ...] | None, used: int, interpret: bool):
    """The kernel: `of_tile` is the block of each program's columns, `used` the rows of `b` in a block."""
    parts, B, T, outputs = y.shape
    R, rank, dtype = B * T, b.shape[0], b.dtype
    rows, chunk = max(16, pl.next_power_of_2(R)), _chunk(used)
    width = _columns(outputs) if of_tile is None else COLUMNS
    y, hidden, gate = y.reshape(parts, R, outputs), hidden.reshape(-1, R, rank), gate.reshape(R).astype(jnp.int32)

    def kernel(y_ref, hidden_ref, b_ref, gate_ref, out_ref):
        row = jnp.arange(rows)[:, None]
        exists, at = row < R, jnp.minimum(row, R - 1)
        column = pl.program_id(0) * width + jnp.arange(width)[None]
        block = jnp.int32(0) if of_tile is None else _lookup(np.array(of_tile), pl.program_id(0))
        some, start = block >= 0, jnp.maximum(block, 0) * used

        def parts_of(ref, index):
            """All parts of some columns, in the middle: a sum over them then stays within a thread."""
            count = ref.shape[0]
            part = jnp.arange(pl.next_power_of_2(count))[None, :, None]
            mask = exists[:, None] if count == part.size else exists[:, None] & (part < count)
            return plt.load(ref.at[jnp.minimum(part, count - 1), at[:, None], index[:, None]], mask=mask, other=0)

        def added(found):
            return found.astype(jnp.float32).sum(1).astype(dtype)

        # Everything is asked for before the first product waits for anything.
        inner = [start + first + jnp.arange(chunk) for first in range(0, used, chunk)]
        right = [plt.load(b_ref.at[i[:, None], column], mask=some, other=0) for i in inner]
        left, own = [parts_of(hidden_ref, i[None]) for i in inner], parts_of(y_ref, column)
        opened = plt.load(gate_ref.at[jnp.minimum(jnp.arange(rows), R - 1)])[:, None] != 0
        precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
        change = sum(plt.dot(added(x), w, precision=precision) for x, w in zip(left, right, strict=True))
        own = added(own)
        changed = (own.astype(jnp.float32) + scale * change).astype(dtype)
        changed = jnp.where(jnp.abs(changed.astype(jnp.float32)) < jnp.inf, changed, jnp.zeros_like(changed))
        # Rows that do not exist lie outside the array: interpreted stores drop these, while masked ones collide.
        plt.store(out_ref.at[row, column], jnp.where(opened, changed, own), mask=exists)

    def whole(x):
        return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))

    out = jax.ShapeDtypeStruct((R, outputs), dtype)
    return pl.pallas_call(
        kernel,
        grid=(outputs // width,),
        in_specs=[whole(x) for x in (y, hidden, b, gate)],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="gated_lora",
    )(y, hidden, b, gate).reshape(B, T, outputs)
