"""The first half of a low-rank adapter: a product with a narrow matrix, cut along its inputs so that the chip is busy.

Such a matrix has a few megabytes: what counts is that all of it is asked for at once, not the rate. XLA cuts the product,
too, but adds some of the parts in a kernel of its own.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.shaped import Shaped
from pallas_kernels.triton_blocks import whole

MOST_ROWS = 16  # with more the sum of the parts would cost what the cut gains
STEP = 256  # inputs of one product
MOST_PARTS = 8
STAGES = 4  # steps under way: all or nearly all that a program has


def _inputs(inputs: int) -> int:
    """Inputs of a program: 512, or 1024 where that would make too many parts."""
    return 512 if inputs // 512 <= MOST_PARTS or inputs % 1024 else 1024


def serves(x: Shaped, a: Shaped) -> bool:
    """Whether the kernel takes the case: few rows, 16-bit numbers, whole tiles."""
    rows, (inputs, rank) = x.shape[0] * x.shape[1], a.shape
    return rows <= MOST_ROWS and inputs % 512 == 0 and rank % 16 == 0 and x.dtype == a.dtype and x.dtype.itemsize == 2


@functools.partial(jax.jit, static_argnames="interpret")  # lowered once, however many layers
def lora_shrink(
    x: Float[Array, "B T I"], a: Float[Array, "I rank"], *, interpret: bool = False
) -> Float[Array, "parts B T rank"]:
    """x @ a in float32, in parts that are to be added.

    Args:
      x: what enters the adapted product.
      a: the adapter's first matrix.
      interpret: run on a CPU.
    """
    B, T, inputs = x.shape
    R, rank, own = B * T, a.shape[1], _inputs(inputs)
    parts, rows, x = inputs // own, 16, x.reshape(R, inputs)
    width = 32 if rank % 32 == 0 else 16

    def kernel(x_ref, a_ref, out_ref):
        row = jnp.arange(rows)[:, None]
        column, part = pl.program_id(0) * width + jnp.arange(width)[None], pl.program_id(1)

        def step(i, found):
            inner = part * own + i * STEP + jnp.arange(STEP)
            left = plt.load(x_ref.at[jnp.minimum(row, R - 1), inner[None]], mask=row < R, other=0)
            return found + plt.dot(left, plt.load(a_ref.at[inner[:, None], column]))

        found = jax.lax.fori_loop(0, own // STEP, step, jnp.zeros((rows, width), jnp.float32))
        # Rows that do not exist lie outside the array: interpreted stores drop these, while masked ones collide.
        plt.store(out_ref.at[part, row, column], found, mask=row < R)

    out = jax.ShapeDtypeStruct((parts, R, rank), jnp.float32)
    return pl.pallas_call(
        kernel,
        grid=(rank // width, parts),
        in_specs=[whole(x), whole(a)],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=STAGES),
        interpret=interpret,
        name="lora_shrink",
    )(x, a).reshape(parts, B, T, rank)
