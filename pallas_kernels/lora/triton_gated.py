"""The second half of a low-rank adapter on top of a skinny product, in one kernel: sums of parts, product, gate.

XLA adds up the parts of both first products in kernels of their own; four products a layer make that 8 launches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float

from pallas_kernels.shaped import Shaped
from pallas_kernels.tilings import MULTIPROCESSORS
from pallas_kernels.triton_blocks import lookup, whole

MOST_ROWS = 64
COLUMNS = 64  # of a program
WARPS = 8
CHUNK = 64  # rows of b in a step
MOST_BYTES = 160 * 1024  # of shared memory for the pipeline
LEAST_CHUNK = 16  # rows of b in a product: what a tensor core takes


def _chunk(rank: int) -> int:
    """Rows of b in a step: the largest power of two that divides the rank, at most `CHUNK`."""
    return min(rank & -rank, CHUNK)


def stages(used: int, hidden: Array, rows: int, groups: int, b: Array, columns: int) -> int:
    """Depth of the pipeline over `used` rows of b: all of them, up to four steps at once, if shared memory holds them.

    Args:
      used: rows of b in a block.
      hidden: x @ a in parts; `rows` rows of it are read for each of so many `groups` of columns.
      b: the second matrix, `columns` of which a program reads.
    """
    chunk = _chunk(used)
    sums = groups * rows * pl.next_power_of_2(hidden.shape[0]) * hidden.dtype.itemsize
    step = chunk * (sums + columns * b.dtype.itemsize)
    return max(1, min(used // chunk + 1, 5, MOST_BYTES // step))


def _columns(outputs: int) -> int:
    """Columns of a program: as many as leave a program to most multiprocessors."""
    return next((c for c in (128, 64) if outputs % c == 0 and outputs // c >= MULTIPROCESSORS - 4), 32)


def serves(x: Shaped, b: Shaped, silu: bool = False) -> bool:
    """Whether the kernel takes the case: few rows, a rank of at least one tensor core tile, whole columns."""
    rows, unit = x.shape[0] * x.shape[1], COLUMNS * (1 + silu)
    return rows <= MOST_ROWS and _chunk(b.shape[0]) >= LEAST_CHUNK and b.shape[1] % unit == 0 and x.dtype == b.dtype


def gated_lora(
    y: Float[Array, "parts B T columns"],
    hidden: Float[Array, "more_parts B T rank"] | None,
    b: Float[Array, "rank O"],
    gate: Bool[Array, "B T 1"],
    *,
    scale: float,
    blocks: np.ndarray | None = None,
    silu: bool = False,
    interpret: bool = False,
) -> Float[Array, "B T out"]:
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


@dataclasses.dataclass(frozen=True)
class Columns:
    """Inside a kernel: some columns of an adapted product, for all rows.

    The loop over the rank is a pipeline of asynchronous copies as long as the loop itself: all of it is asked for before
    anything waits. (Loads into registers wait for each other, as the compiler keeps few.)

    Attributes:
      y, hidden, b: references; x @ a begins at column `behind` of `hidden`.
      R, rows: rows that there are, and a power of two of at least 16.
      used: rows of b in a block.
      scale: the adapter's factor.
    """

    y: Any
    hidden: Any
    b: Any
    behind: int
    R: int
    rows: int
    used: int
    scale: float

    @property
    def at(self) -> Array:
        """Row numbers [rows, 1], those that do not exist replaced by the last."""
        return jnp.minimum(jnp.arange(self.rows)[:, None], self.R - 1)

    def _parts(self, ref, index):
        """All parts of some columns, in the middle: a sum over them then stays within a thread."""
        count, exists = ref.shape[0], jnp.arange(self.rows)[:, None, None] < self.R
        part = jnp.arange(pl.next_power_of_2(count))[None, :, None]
        mask = exists if count == part.size else exists & (part < count)
        return plt.load(ref.at[jnp.minimum(part, count - 1), self.at[:, None], index[:, None]], mask=mask, other=0)

    def _added(self, parts):
        return (parts if parts.shape[1] == 1 else parts.astype(jnp.float32)).sum(1).astype(self.b.dtype)

    def adapted(self, groups: list[tuple[Array, list[Array]]], opened: Callable[[], Bool[Array, "rows 1"]]) -> list[Array]:
        """x @ w in closed rows, with the adapter in those that are open; what is not finite there becomes 0.

        Args:
          groups: (block of b, columns [1, n]) for columns of one block each; -1: no block.
          opened: loads the gate.
        """
        dtype, columns = self.b.dtype, [each for _, some in groups for each in some]
        own, opened = [self._parts(self.y, each) for each in columns], opened()
        precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
        chunk = _chunk(self.used)

        def step(i, found):
            changes = iter(found)
            new = []
            for block, some in groups:
                inner = jnp.maximum(block, 0) * self.used + i * chunk + jnp.arange(chunk)
                left = self._added(self._parts(self.hidden, self.behind + inner[None]))
                for each in some:
                    right = plt.load(self.b.at[inner[:, None], each], mask=block >= 0, other=0)
                    new.append(next(changes) + plt.dot(left, right, precision=precision))
            return new

        zeros = [jnp.zeros((self.rows, each.shape[1]), jnp.float32) for each in columns]
        changes = lax.fori_loop(0, self.used // chunk, step, zeros)
        found = []
        for parts, change in zip(own, changes, strict=True):
            y = self._added(parts)
            changed = (y.astype(jnp.float32) + self.scale * change).astype(dtype)
            changed = jnp.where(jnp.abs(changed.astype(jnp.float32)) < jnp.inf, changed, jnp.zeros_like(changed))
            found.append(jnp.where(opened, changed, y))
        return found


STATIC = ("scale", "of_tile", "used", "silu", "interpret")


@functools.partial(jax.jit, static_argnames=STATIC)  # lowered once, however many layers
def _gated_lora(y, hidden, b, gate, *, scale: float, of_tile: tuple[int, ...] | None, used: int, silu: bool, interpret: bool):
    """The kernel: `of_tile` is the block of each program's columns, `used` the rows of `b` in a block."""
    parts, B, T, wide = y.shape
    R, (rank, outputs), dtype = B * T, b.shape, b.dtype
    rows, halves = max(16, pl.next_power_of_2(R)), 2 if silu else 1
    own_columns = outputs // halves
    width = _columns(own_columns) if of_tile is None else COLUMNS
    y, gate = y.reshape(parts, R, wide), gate.reshape(R).astype(jnp.int32)
    arrays = (y, b, gate) if hidden is None else (y, b, gate, hidden.reshape(-1, R, rank))

    def kernel(y_ref, b_ref, gate_ref, *refs):
        hidden_ref, out_ref = refs if len(refs) == 2 else (y_ref, *refs)
        columns = Columns(y_ref, hidden_ref, b_ref, outputs if hidden is None else 0, R, rows, used, scale)
        column = pl.program_id(0) * width + jnp.arange(width)[None]
        blocks = [jnp.int32(0)] * halves
        if of_tile is not None:
            tables = np.array(of_tile).reshape(halves, -1)
            blocks = [lookup(table, pl.program_id(0)) for table in tables]
        groups = [(block, [half * own_columns + column]) for half, block in enumerate(blocks)]
        found = columns.adapted(groups, lambda: plt.load(gate_ref.at[columns.at[:, 0]])[:, None] != 0)
        out = found[0]
        if silu:
            z, value = (x.astype(jnp.float32) for x in found)
            out = (z * lax.logistic(z) * value).astype(dtype)
        row = jnp.arange(rows)[:, None]
        # Rows that do not exist lie outside the array: interpreted stores drop these, while masked ones collide.
        plt.store(out_ref.at[row, column], out, mask=row < R)

    out = jax.ShapeDtypeStruct((R, own_columns), dtype)
    return pl.pallas_call(
        kernel,
        grid=(own_columns // width,),
        in_specs=[whole(x) for x in arrays],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=plt.CompilerParams(
            num_warps=WARPS, num_stages=stages(used, arrays[-1] if hidden is not None else y, rows, halves, b, halves * width)
        ),
        interpret=interpret,
        name="gated_lora",
    )(*arrays).reshape(B, T, own_columns)
