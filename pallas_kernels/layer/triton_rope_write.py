"""Rotary embedding of queries and keys, and the write of keys and values into a paged pool, in one kernel.

XLA needs three kernels for it (queries, one scatter for keys, one for values), each of which takes longer to launch than
to run: about 1.6 us on an H200, in every layer.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.shaped import Shaped
from pallas_kernels.triton_blocks import whole


def serves(heads: Shaped, cos: Shaped, k_pages: Shaped, v_pages: Shaped) -> bool:
    """Whether the kernel takes the case: whole heads of a power of two are turned, keys and values are of one size."""
    D, half = heads.shape[-1], cos.shape[-1]
    sizes = 2 * half == D == k_pages.shape[-1] == v_pages.shape[-1] and half >= 16 and half & (half - 1) == 0
    return sizes and all(jnp.issubdtype(x.dtype, jnp.floating) for x in (heads, k_pages, v_pages))


def results(B: int, T: int, G: int, dtype, k_pages: Shaped, v_pages: Shaped, by_head: bool) -> list[jax.ShapeDtypeStruct]:
    """What a kernel writes: the turned queries, by kv head before or behind the tokens, and the pools."""
    K, D = k_pages.shape[2:]
    q = jax.ShapeDtypeStruct((B, K, T, G, D) if by_head else (B, T, K, G, D), dtype)
    return [q, *(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in (k_pages, v_pages))]


def by_token(q: Array, by_head: bool) -> Float[Array, "B T H D"]:
    """The queries as `results` has them, by token."""
    if by_head:
        q = q.transpose(0, 2, 1, 3, 4)
    B, T, K, G, D = q.shape
    return q.reshape(B, T, K * G, D)


@functools.partial(jax.jit, static_argnames=("dtype", "by_head", "interpret"))  # lowered once, however many layers
def rope_write(
    heads: Float[Array, "parts B T K G_plus_2 D"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    k_pages: Float[Array, "P S K D"],
    v_pages: Float[Array, "P S K D"],
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
    *,
    dtype: DTypeLike,
    by_head: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H D"], Float[Array, "P S K D"], Float[Array, "P S K D"]]:
    """Turns the channel pairs (i, i + D/2) of queries and keys and writes keys and values at (page, slot).

    Args:
      heads: a fused projection, per kv head its G queries, the key, the value; in parts that are to be added.
      cos, sin: of every rotation, in float32.
      k_pages, v_pages: the pools of one layer; updated in place when donated.
      page, slot: where the entries go; a page outside the pool drops its entry.
      dtype: what the sum of the parts is rounded to, and the queries' type.
      by_head: lay the queries out by kv head, [B, K, T, G, D], for a caller that regroups the result so. The shape of
        the result is the same.
      interpret: run on a CPU.

    Returns:
      The turned queries and the pools.
    """
    parts, B, T, K, width, D = heads.shape
    G, P, half = width - 2, k_pages.shape[0], D // 2
    rows = pl.next_power_of_2(G + 1)

    def kernel(heads_ref, cos_ref, sin_ref, page_ref, slot_ref, _k_ref, _v_ref, q_ref, k_ref, v_ref):
        head, t, b = (pl.program_id(i) for i in range(3))
        row, channel = jnp.arange(rows)[:, None], jnp.arange(half)[None]

        def added(index, **mask):
            found = [plt.load(heads_ref.at[(i, b, t, head, *index)], **mask) for i in range(parts)]
            return sum(x.astype(jnp.float32) for x in found).astype(dtype)

        first, second = (added((row, channel + offset), mask=row <= G, other=0).astype(jnp.float32) for offset in (0, half))
        value = added((G + 1, jnp.arange(D)))
        c, s = (plt.load(ref.at[b, t, jnp.arange(half)])[None] for ref in (cos_ref, sin_ref))
        where, place = page_ref[b, t], slot_ref[b, t]
        for offset, turned in ((0, first * c - second * s), (half, second * c + first * s)):
            turned = turned.astype(dtype)
            q_row = (b, head, t) if by_head else (b, t, head)
            # Rows that are not stored lie outside the array, too: interpreted stores drop these, while masked ones collide.
            plt.store(q_ref.at[(*q_row, row, channel + offset)], turned, mask=row < G)
            is_key = (row == G) & (where >= 0) & (where < P)
            key_page = jnp.where(is_key, where, P)
            plt.store(k_ref.at[key_page, place, head, channel + offset], turned.astype(k_ref.dtype), mask=is_key)
        written = jnp.full((D,), (where >= 0) & (where < P))
        value_page = jnp.where(written, where, P)
        plt.store(v_ref.at[value_page, place, head, jnp.arange(D)], value.astype(v_ref.dtype), mask=written)

    shapes = results(B, T, G, dtype, k_pages, v_pages, by_head)
    inputs = (heads, cos, sin, page, slot, k_pages, v_pages)
    q, k_pages, v_pages = pl.pallas_call(
        kernel,
        grid=(K, T, B),
        in_specs=[whole(x) for x in inputs],
        out_specs=[whole(x) for x in shapes],
        out_shape=shapes,
        input_output_aliases={5: 1, 6: 2},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="rope_write",
    )(*inputs)
    return by_token(q, by_head), k_pages, v_pages
