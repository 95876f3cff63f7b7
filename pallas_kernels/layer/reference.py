"""What stands between a layer's products, in plain jnp: norms, rotary embedding, writing of keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cache.reference import kv_write
from pallas_kernels.lora.reference import gated_lora
from pallas_kernels.product.reference import add_up


def rms_norm(x: Float[Array, "*R E"], scale: Float[Array, "*#R E"], eps: float, plus_one: bool = False) -> Float[Array, "*R E"]:
    """Root-mean-square norm (Zhang & Sennrich 2019) in float32; with `plus_one` the stored scale is w - 1 (Gemma)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    scale = scale.astype(jnp.float32)
    return (y * (1 + scale if plus_one else scale)).astype(x.dtype)


def add_norm(
    x: Float[Array, "*R E"], parts: Float[Array, "parts *R E"], scale: Float[Array, " E"], *, eps: float, plus_one: bool = False
) -> tuple[Float[Array, "*R E"], Float[Array, "*R E"]]:
    """x + the parts' sum, and its `rms_norm`.

    Args:
      x: the residual stream.
      parts: what a sublayer adds, in parts; their sum is rounded to the type of x before it is added.
      scale, eps, plus_one: see `rms_norm`.
    """
    x = x + add_up(parts, x.dtype)
    return x, rms_norm(x, scale, eps, plus_one)


def apply_rope(x: Float[Array, "B T H D"], angles: tuple[Array, Array], interleaved: bool = False) -> Float[Array, "B T H D"]:
    """Rotates the channel pairs (i, i + D/2), or (2i, 2i + 1) when `interleaved`, by angles [B, T, half] given as (cos, sin).

    When the angles cover fewer channels than a head has, the remaining ones pass unchanged (partial rotation).
    Interleaved input comes out in half-split order, as DeepSeek's reference does: queries and keys agree, so scores do.
    """
    cos, sin = (a[:, :, None] for a in angles)
    width = 2 * cos.shape[-1]
    y = x[..., :width].astype(jnp.float32)
    first, second = (y[..., 0::2], y[..., 1::2]) if interleaved else jnp.split(y, 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
    return rotated if width == x.shape[-1] else jnp.concatenate([rotated, x[..., width:]], -1)


def split_qkv(
    y: Float[Array, "B T O"], num_kv_heads: int, head_dim: int
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
    """Queries, keys and values of a fused projection: per kv head its queries, the key, the value."""
    heads = y.reshape(*y.shape[:-1], num_kv_heads, -1, head_dim)
    G = heads.shape[3] - 2
    return heads[..., :G, :].reshape(*y.shape[:2], -1, head_dim), heads[..., G, :], heads[..., G + 1, :]


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
) -> tuple[Float[Array, "B T H D"], Float[Array, "P S K D"], Float[Array, "P S K D"]]:
    """Turns the queries and keys of a fused projection (`apply_rope`) and writes keys and values at (page, slot).

    Args:
      y: the projection (`split_qkv`), in parts that are to be added.
      cos, sin: of every rotation, in float32.
      k_pages, v_pages: the pools of one layer; updated in place when donated.
      page, slot: where the entries go; a page outside the pool drops its entry.
      dtype: what the sum of the parts is rounded to, and the queries' type.

    Returns:
      The turned queries and the pools.
    """
    q, k, v = split_qkv(add_up(y, dtype), *k_pages.shape[2:])
    q, k = apply_rope(q, (cos, sin)), apply_rope(k, (cos, sin))
    return q, *kv_write(k_pages, v_pages, page, slot, k, v)


def gated_rope_write(
    y: Float[Array, "B T O_plus_rank"], b: Float[Array, "rank O"], gate: Bool[Array, "B T 1"], *where: Array, scale: float
) -> tuple[Float[Array, "B T H D"], Float[Array, "P S K D"], Float[Array, "P S K D"]]:
    """`rope_write` at `where` (its arguments from `cos` on) of the `gated_lora` of a product with its x @ a behind it.

    The adapter's sums are made in float32 and rounded once.
    """
    own, hidden, exact = y[..., : b.shape[1]], y[..., b.shape[1] :], jnp.float32
    adapted = gated_lora(own.astype(exact), hidden.astype(exact), b.astype(exact), gate, scale=scale)
    return rope_write(adapted.astype(y.dtype)[None], *where, dtype=y.dtype)
