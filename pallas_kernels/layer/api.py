"""What stands between a layer's products, each a kernel on GPUs that run it and plain jnp elsewhere."""

from __future__ import annotations

import functools

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import device
from pallas_kernels.layer import reference, triton_add_norm, triton_gated_rope_write, triton_rope_write
from pallas_kernels.layer.reference import apply_rope, rms_norm, split_qkv
from pallas_kernels.lora.api import Adapter, adapted_product, product_and_hidden
from pallas_kernels.tilings import NORM_ROWS

__all__ = ["adapted_rope_write", "add_norm", "apply_rope", "rms_norm", "rope_write", "split_qkv"]


def add_norm(
    x: Float[Array, "*R E"],
    parts: Float[Array, "parts *R E"],
    scale: Float[Array, " E"],
    *,
    eps: float,
    plus_one: bool = False,
    adapted: bool = False,
) -> tuple[Float[Array, "*R E"], Float[Array, "*R E"]]:
    """The residual stream with a sublayer's output added, which comes in parts, and its `rms_norm`.

    Args:
      x, parts, scale, eps, plus_one: see `reference.add_norm`.
      adapted: the sublayer ends in an adapter, thus perhaps in a kernel of ours: XLA cannot make the sum part of that.
    """
    if device.runs_triton() and triton_add_norm.serves(x, parts, 1 if adapted else NORM_ROWS):
        return _add_norm(x, parts, scale, eps, plus_one)
    return reference.add_norm(x, parts, scale, eps=eps, plus_one=plus_one)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _add_norm(x, parts, scale, eps, plus_one):
    return triton_add_norm.add_norm(x, parts, scale, eps=eps, plus_one=plus_one)


@_add_norm.defjvp
def _add_norm_differentiated(eps, plus_one, primals, tangents):
    return jax.jvp(functools.partial(reference.add_norm, eps=eps, plus_one=plus_one), primals, tangents)


def rope_write(
    y: Float[Array, "parts B T O"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    k_pages: Float[Array, "P S K D"],
    v_pages: Float[Array, "P S K D"],
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
    *,
    dtype: DTypeLike,
    by_head: bool = False,
) -> tuple[Float[Array, "B T H D"], Float[Array, "P S K D"], Float[Array, "P S K D"]]:
    """Rotary embedding of a fused projection, and the write of its keys and values.

    Args:
      y, cos, sin, k_pages, v_pages, page, slot, dtype: see `reference.rope_write`.
      by_head: `attention.api.groups_queries`: a kernel lays the queries out by kv head then. Their shape is the same.

    Returns:
      The turned queries and the pools.
    """
    K, D = k_pages.shape[2:]
    heads = jax.ShapeDtypeStruct((*y.shape[:3], K, y.shape[3] // (K * D), D), y.dtype)
    if not (device.runs_triton() and triton_rope_write.serves(heads, cos, k_pages, v_pages)):
        return reference.rope_write(y, cos, sin, k_pages, v_pages, page, slot, dtype=dtype)
    return triton_rope_write.rope_write(
        y.reshape(heads.shape), cos, sin, k_pages, v_pages, page, slot, dtype=dtype, by_head=by_head
    )


def adapted_rope_write(
    x: Float[Array, "B T I"],
    w: Float[Array, "I O"],
    adapter: Adapter,
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    k_pages: Float[Array, "P S K D"],
    v_pages: Float[Array, "P S K D"],
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
    *,
    by_head: bool = False,
) -> tuple[Float[Array, "B T H D"], Float[Array, "P S K D"], Float[Array, "P S K D"]]:
    """`rope_write` of `lora.api.adapted_product`, whose second half is part of the kernel where that is served."""
    scale, where = adapter.scale, (cos, sin, k_pages, v_pages, page, slot)
    served = isinstance(scale, float) and device.runs_triton()
    served = served and triton_gated_rope_write.serves(x, adapter.b, adapter.blocks, cos, k_pages, v_pages)
    both = product_and_hidden(x, w, adapter.a) if served else None
    if both is None:
        return rope_write(adapted_product(x, w, adapter)[None], *where, dtype=x.dtype, by_head=by_head)
    return triton_gated_rope_write.gated_rope_write(
        both[None], adapter.b, adapter.gate, *where, scale=scale, blocks=adapter.blocks, by_head=by_head
    )
