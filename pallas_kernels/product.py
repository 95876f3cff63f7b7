"""A product with a weight: XLA's, or the kernel of `skinny_product` where measurements say that it is faster."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import device
from pallas_kernels.product_table import MEASURED

ROWS = (1, 8, 16, 32, 64, 128)
"""Numbers of rows that were measured; a product of any other number takes what the next larger one takes."""


@functools.cache
def _kernel():
    """The kernel's module, or None where this jax is too old for it."""
    try:
        from pallas_kernels import skinny_product
    except ImportError:
        return None
    return skinny_product if skinny_product.AVAILABLE else None


def measured_tiling(x: Array, w: Array):
    """The kernel's tiling for x [*R, I] @ w [I, O] on the default device; None: XLA."""
    rows = math.prod(x.shape[:-1])
    measured = next((r for r in ROWS if 0 < rows <= r), None)
    entry = MEASURED.get((device.capability(), measured, *w.shape))
    if entry is None or _kernel() is None or not _kernel().serves(x, w):
        return None
    tiling = _kernel().Tiling(*entry)
    return tiling if tiling.fits(rows, *w.shape) else None


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _parts(x, w, tiling, dtype):
    return _kernel().partial_products(x, w, tiling, dtype=dtype)


@_parts.defjvp
def _differentiated(tiling, dtype, primals, tangents):
    """Where a derivative is wanted XLA multiplies: the first part is everything."""

    def multiply(x, w):
        y = (x @ w).astype(dtype)[None]
        return jnp.pad(y, ((0, tiling.parts(*w.shape).max() - 1), (0, 0), (0, 0)))

    return jax.jvp(multiply, primals, tangents)


def product_in_parts(x: Float[Array, "*R I"], w: Float[Array, "I O"]) -> Float[Array, "parts *R O"] | None:
    """x @ w by the kernel, in partial sums (float32 if there are several) for whatever adds them up; None: leave it to XLA."""
    tiling = measured_tiling(x, w)
    if tiling is None:
        return None
    counts = tiling.parts(*w.shape)
    rows = x.reshape(-1, x.shape[-1])
    p = _parts(rows, w, tiling, x.dtype if counts.max() == 1 else jnp.float32)
    if counts.min() != counts.max():  # not all of them exist everywhere
        p = _kernel().add_parts(p, tiling, w.shape[0])[None]
    return p.reshape(-1, *x.shape[:-1], w.shape[1])


def product(x: Float[Array, "*R I"], w: Float[Array, "I O"]) -> Float[Array, "*R O"]:
    """x @ w, by the kernel where the table of measurements has it."""
    parts = product_in_parts(x, w)
    if parts is None:
        return x @ w
    return functools.reduce(jnp.add, parts).astype(x.dtype)
