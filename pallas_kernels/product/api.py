"""A product with a weight: XLA's, or the kernel of `product.mosaic` where measurements say that it is faster."""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import device
from pallas_kernels.product import reference
from pallas_kernels.product.reference import add_up
from pallas_kernels.product.table import MEASURED
from pallas_kernels.shaped import Shaped
from pallas_kernels.tilings import NORM_ROWS, product_parts

__all__ = ["Adder", "add_up", "gated_product", "product", "product_in_parts"]

Adder = Literal["any", "norm"]
"""What adds up the parts of a product: see `product_in_parts`."""

ROWS = (1, 8, 16, 32, 64, 128)
"""Numbers of rows that were measured; a product of any other number takes what the next larger one takes."""


@functools.cache
def _kernel():
    """The kernel's module, or None where this jax is too old for it."""
    try:
        from pallas_kernels.product import mosaic as skinny_product
    except ImportError:
        return None
    return skinny_product if skinny_product.AVAILABLE else None


def measured_tiling(x: Shaped, w: Shaped):
    """The kernel's tiling for x [*R, I] @ w [I, O] on the default device; None: XLA."""
    rows = math.prod(x.shape[:-1])
    measured = next((r for r in ROWS if 0 < rows <= r), None)
    entry = MEASURED.get((device.capability(), measured, *w.shape))
    if entry is None or _kernel() is None or not _kernel().serves(x, w):
        return None
    tiling = _kernel().Tiling(*entry)
    return tiling if tiling.fits(rows, *w.shape) else None


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _parts(x, w, tiling, dtype, gated):
    return _kernel().partial_products(x, w, tiling, dtype=dtype, gated=gated)


@_parts.defjvp
def _differentiated(tiling, dtype, gated, primals, tangents):
    """Where a derivative is wanted XLA multiplies: the first part is everything."""

    def multiply(x, w):
        y = (x @ w).astype(dtype)[None]
        if gated:
            return reference.gate_values(y)
        return jnp.pad(y, ((0, tiling.parts(*w.shape).max() - 1), (0, 0), (0, 0)))

    return jax.jvp(multiply, primals, tangents)


def product(x: Float[Array, "*R I"], w: Float[Array, "I O"], dtype=None) -> Float[Array, "*R O"]:
    """x @ w, by the kernel where the table of measurements has it; sums are rounded to `dtype`, None for the type of x."""
    dtype = x.dtype if dtype is None else dtype
    parts = _measured(x, w, dtype)
    return reference.product(x, w, dtype) if parts is None else functools.reduce(jnp.add, parts).astype(dtype)


def product_in_parts(x: Float[Array, "B T I"], w: Float[Array, "I O"], adder: Adder = "any") -> Float[Array, "parts B T O"]:
    """x @ w in partial sums, where a GPU had better cut the product along its inputs; else in one part of the type of x.

    Args:
      x: rows.
      w: weights, of the type of x.
      adder: what adds the parts up. "norm" is `layer.api.add_norm`, which is a kernel for enough rows alone: for fewer XLA
        adds its own parts up best.
    """
    rows, (inputs, outputs) = x.shape[0] * x.shape[1], w.shape
    if device.on_gpu() and not (adder == "norm" and rows < NORM_ROWS):
        by_kernel = _measured(x, w)
        if by_kernel is not None:
            return by_kernel
        parts = product_parts(rows, inputs, outputs)
        if parts > 1:
            return reference.product_in_parts(x, w, parts)
    return product(x, w)[None]


def gated_product(x: Float[Array, "*R I"], w: Float[Array, "I twice_F"]) -> Float[Array, "*R F"]:
    """silu(gate) * value of the columns of x @ w, gates first: in one kernel where the table of measurements has it."""
    tiling = measured_tiling(x, w)
    if tiling is None or not tiling.gates(x.size // x.shape[-1], *w.shape):
        return reference.gate_values(product(x, w))
    y = _parts(x.reshape(-1, x.shape[-1]), w, tiling, x.dtype, True)
    return y.reshape(*x.shape[:-1], w.shape[1] // 2)


def _measured(x: Float[Array, "*R I"], w: Float[Array, "I O"], dtype=None) -> Float[Array, "parts *R O"] | None:
    """x @ w by the kernel, in partial sums (float32 if there are several); None where the table does not have it.

    A single part is of `dtype`, None for the type of x.
    """
    tiling = measured_tiling(x, w)
    if tiling is None:
        return None
    counts = tiling.parts(*w.shape)
    rows = x.reshape(-1, x.shape[-1])
    p = _parts(rows, w, tiling, (dtype or x.dtype) if counts.max() == 1 else jnp.float32, False)
    if counts.min() != counts.max():  # not all of them exist everywhere
        p = _kernel().add_parts(p, tiling, w.shape[0])[None]
    return p.reshape(-1, *x.shape[:-1], w.shape[1])
