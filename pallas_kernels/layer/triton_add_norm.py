"""A residual sum and the norm behind it in one kernel, which also adds up the parts of the product before it.

XLA makes two kernels of them, since the sum is wanted once more, behind the next product; each takes longer to launch than
to run.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.shaped import Shaped
from pallas_kernels.tilings import NORM_ROWS
from pallas_kernels.triton_blocks import whole

MOST_ROWS = 1024  # one program a row; with very many, in prefill, launches no longer count
WIDEST = 8192


def serves(x: Shaped, parts: Shaped, least: int = NORM_ROWS) -> bool:
    """Whether the kernel takes the case: floats, rows of a size that a program holds, at least so many, not too many."""
    floats = all(jnp.issubdtype(a.dtype, jnp.floating) for a in (x, parts))
    return floats and 16 <= x.shape[-1] <= WIDEST and least <= x.size // x.shape[-1] <= MOST_ROWS


@functools.partial(jax.jit, static_argnames=("eps", "plus_one", "interpret"))  # lowered once, however many layers
def add_norm(
    x: Float[Array, "*R E"],
    parts: Float[Array, "parts *R E"],
    scale: Float[Array, " E"],
    *,
    eps: float,
    plus_one: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "*R E"], Float[Array, "*R E"]]:
    """x + the parts' sum, and its root-mean-square norm (Zhang & Sennrich 2019).

    Args:
      x: the residual stream.
      parts: what a sublayer adds, in parts; their sum is rounded to the type of x before it is added.
      scale: the norm's.
      eps: added to the mean square.
      plus_one: the stored scale is w - 1.
      interpret: run on a CPU.

    Returns:
      The new residual stream and its norm, of the type of x.
    """
    shape, E, P = x.shape, x.shape[-1], parts.shape[0]
    x, parts = x.reshape(-1, E), parts.reshape(P, -1, E)
    wide = pl.next_power_of_2(E)

    def kernel(x_ref, parts_ref, scale_ref, sum_ref, norm_ref):
        row, column = pl.program_id(0), jnp.arange(wide)
        mask = {} if wide == E else {"mask": column < E, "other": 0}
        at = column if wide == E else jnp.minimum(column, E - 1)
        found = [plt.load(parts_ref.at[i, row, at], **mask) for i in range(P)]
        own, factor = plt.load(x_ref.at[row, at], **mask), plt.load(scale_ref.at[at], **mask).astype(jnp.float32)
        added = found[0] if P == 1 else sum(f.astype(jnp.float32) for f in found)
        added = added.astype(own.dtype).astype(jnp.float32)
        total = (own.astype(jnp.float32) + added).astype(own.dtype)
        y = total.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.sum(y * y) / E + eps)
        y = (y * (1 + factor if plus_one else factor)).astype(own.dtype)
        # Columns that do not exist lie outside the arrays: interpreted stores drop these, while masked ones collide.
        kept = {} if wide == E else {"mask": column < E}
        plt.store(sum_ref.at[row, column], total, **kept)
        plt.store(norm_ref.at[row, column], y, **kept)

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total, normed = pl.pallas_call(
        kernel,
        grid=(x.shape[0],),
        in_specs=[whole(a) for a in (x, parts, scale)],
        out_specs=[whole(out)] * 2,
        out_shape=[out] * 2,
        compiler_params=plt.CompilerParams(num_warps=8 if wide >= 2048 else 4, num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(x, parts, scale)
    return total.reshape(shape), normed.reshape(shape)
