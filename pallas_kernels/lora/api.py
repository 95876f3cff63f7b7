"""Products through a low-rank adapter that only some rows take: its products as kernels on GPUs that run them.

The last kernel adds up the parts of all others. The kernels have no derivative; where one is wanted the adapter's scale is an
array.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import device
from pallas_kernels.lora import reference, triton_gated, triton_shrink
from pallas_kernels.lora.reference import Adapter
from pallas_kernels.product.api import product, product_in_parts
from pallas_kernels.shaped import Shaped

__all__ = ["Adapter", "adapted_product", "add_adapter", "product_and_hidden"]


def adapted_product(
    x: Float[Array, "B T I"], w: Float[Array, "I O"], adapter: Adapter, *, silu: bool = False
) -> Float[Array, "B T out"]:
    """x @ w with an adapter; with `silu` the columns are gates and as many values: silu(gate) * value, [B, T, O / 2]."""
    if not _by_kernel(x, adapter, silu):
        return reference.add_adapter(x, product(x, w.astype(x.dtype)), adapter, silu=silu)
    both = product_and_hidden(x, w, adapter.a)
    if both is not None:
        return _expand(both[None], None, adapter, silu)
    hidden = _shrink(x, adapter.a)
    return _expand(product_in_parts(x, w.astype(x.dtype)), hidden, adapter, silu)


def add_adapter(
    x: Float[Array, "B T I"], y: Float[Array, "B T O"], adapter: Adapter, *, silu: bool = False
) -> Float[Array, "B T out"]:
    """`adapted_product` where the product y of x is there already: with a bias, or of quantised weights."""
    if not _by_kernel(x, adapter, silu):
        return reference.add_adapter(x, y, adapter, silu=silu)
    return _expand(y[None], _shrink(x, adapter.a), adapter, silu)


def product_and_hidden(
    x: Float[Array, "B T I"], w: Float[Array, "I O"], a: Float[Array, "I rank"]
) -> Float[Array, "B T O_plus_rank"] | None:
    """x @ w and, behind it, x @ a as one product; None where two are better.

    x @ a alone would be a kernel of 3 to 4 us for 1 us of bytes. XLA's products on a GPU read tiles of either matrix, so that
    nothing is copied, if both widths are multiples of 64 (otherwise it writes both out as one first).
    """
    few = 1 < x.shape[0] * x.shape[1] <= triton_gated.MOST_ROWS and x.dtype == w.dtype == a.dtype and x.dtype.itemsize == 2
    if not few or not device.on_gpu() or w.shape[1] % 64 or a.shape[1] % 64:
        return None
    return x @ jnp.concatenate([w, a], 1)


def _by_kernel(x: Shaped, adapter: Adapter, silu: bool) -> bool:
    return isinstance(adapter.scale, float) and device.runs_triton() and triton_gated.serves(x, adapter.b, silu)


def _shrink(x: Float[Array, "B T I"], a: Float[Array, "I rank"]) -> Float[Array, "parts B T rank"]:
    return triton_shrink.lora_shrink(x, a) if triton_shrink.serves(x, a) else product_in_parts(x, a.astype(x.dtype))


def _expand(y, hidden, adapter: Adapter, silu: bool) -> Float[Array, "B T out"]:
    return triton_gated.gated_lora(y, hidden, adapter.b, adapter.gate, scale=adapter.scale, blocks=adapter.blocks, silu=silu)
