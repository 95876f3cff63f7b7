"""`gated_lora` of a fused projection and `rope_write` in one kernel: a program for every head."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.layer.triton_rope_write import by_token, results
from pallas_kernels.lora import triton_gated as gated_lora
from pallas_kernels.lora.triton_gated import Columns
from pallas_kernels.shaped import Shaped
from pallas_kernels.triton_blocks import lookup, whole


def blocks_of_heads(blocks: np.ndarray | None, b: Shaped, head_dim: int) -> tuple[tuple[int, ...], int] | None:
    """(each head's block of b, rows of a block), None where a block changes within a head or has too few rows."""
    blocks = np.zeros(b.shape[1], int) if blocks is None else np.asarray(blocks)
    heads = blocks.reshape(-1, head_dim)
    used = b.shape[0] // max(int(blocks.max()) + 1, 1)
    if (heads != heads[:, :1]).any() or used & -used < gated_lora.LEAST_CHUNK:
        return None
    return tuple(heads[:, 0].tolist()), used


def serves(x: Shaped, b: Shaped, blocks: np.ndarray | None, cos: Shaped, k_pages: Shaped, v_pages: Shaped) -> bool:
    """Whether the kernel takes the case: what `gated_lora` takes, of heads of a power of two that are turned as a whole."""
    D = k_pages.shape[-1]
    whole = D == v_pages.shape[-1] == 2 * cos.shape[-1] and D >= 32 and D & (D - 1) == 0 and b.shape[1] % D == 0
    return whole and gated_lora.serves(x, b) and blocks_of_heads(blocks, b, D) is not None


def gated_rope_write(
    y: Float[Array, "parts B T O_plus_rank"],
    b: Float[Array, "rank O"],
    gate: Bool[Array, "B T 1"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    k_pages: Float[Array, "P S K D"],
    v_pages: Float[Array, "P S K D"],
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
    *,
    scale: float,
    blocks: np.ndarray | None = None,
    by_head: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H D"], Float[Array, "P S K D"], Float[Array, "P S K D"]]:
    """`rope_write` of what `gated_lora` gives.

    Args:
      y, b, gate, scale, blocks: see `gated_lora`; x @ a stands behind x @ w. Columns: per kv head its queries, key, value.
      cos, sin, k_pages, v_pages, page, slot, by_head: see `rope_write`.
      interpret: run on a CPU.

    Returns:
      The turned queries and the pools.
    """
    of_head, used = blocks_of_heads(blocks, b, k_pages.shape[-1])
    return _gated_rope_write(
        y,
        b,
        gate,
        cos,
        sin,
        page,
        slot,
        k_pages,
        v_pages,
        scale=scale,
        of_head=of_head,
        used=used,
        by_head=by_head,
        interpret=interpret,
    )


STATIC = ("scale", "of_head", "used", "by_head", "interpret")


@functools.partial(jax.jit, static_argnames=STATIC)  # lowered once, however many layers
def _gated_rope_write(y, b, gate, cos, sin, page, slot, k_pages, v_pages, *, scale, of_head, used, by_head, interpret):
    """The kernel: `of_head` is each head's block of b, `used` the rows of a block."""
    (parts, B, T, wide), (P, _, K, D), (_, outputs) = y.shape, k_pages.shape, b.shape
    R, G, half, dtype = B * T, outputs // D // K - 2, D // 2, b.dtype
    rows = max(16, pl.next_power_of_2(R))
    y, gate, page, slot = y.reshape(parts, R, wide), *(a.reshape(R).astype(jnp.int32) for a in (gate, page, slot))
    cos, sin = cos.reshape(R, half), sin.reshape(R, half)

    def kernel(y_ref, b_ref, gate_ref, cos_ref, sin_ref, page_ref, slot_ref, _k_ref, _v_ref, q_ref, k_ref, v_ref):
        columns = Columns(y_ref, y_ref, b_ref, outputs, R, rows, used, scale)
        head, channel, at = pl.program_id(0), jnp.arange(half)[None], columns.at
        block, kv, place = lookup(np.array(of_head), head), head // (G + 2), head % (G + 2)
        pages, slots = (plt.load(ref.at[at[:, 0]])[:, None] for ref in (page_ref, slot_ref))
        c, s = (plt.load(ref.at[at, channel]) for ref in (cos_ref, sin_ref))
        groups = [(block, [head * D + offset + channel for offset in (0, half)])]
        found = columns.adapted(groups, lambda: plt.load(gate_ref.at[at[:, 0]])[:, None] != 0)
        first, second = (each.astype(jnp.float32) for each in found)
        row = jnp.arange(rows)[:, None]
        written = (row < R) & (pages >= 0) & (pages < P)
        # What is not stored lies outside the arrays, too: interpreted stores drop these, while masked ones collide.
        query = jnp.where((place < G) & (row < R), place, G)
        key_page, value_page = (jnp.where(written & (place == G + i), pages, P) for i in (0, 1))
        sequence, token = jnp.where(row < R, row // T, B), row % T
        q_row = (sequence, kv, token) if by_head else (sequence, token, kv)
        for offset, plain, turned in ((0, first, first * c - second * s), (half, second, second * c + first * s)):
            turned, plain = turned.astype(dtype), plain.astype(dtype)
            plt.store(q_ref.at[(*q_row, query, channel + offset)], turned, mask=query < G)
            plt.store(k_ref.at[key_page, slots, kv, channel + offset], turned.astype(k_ref.dtype), mask=key_page < P)
            plt.store(v_ref.at[value_page, slots, kv, channel + offset], plain.astype(v_ref.dtype), mask=value_page < P)

    shapes = results(B, T, G, dtype, k_pages, v_pages, by_head)
    inputs = (y, b, gate, cos, sin, page, slot, k_pages, v_pages)
    q, k_pages, v_pages = pl.pallas_call(
        kernel,
        grid=(K * (G + 2),),
        in_specs=[whole(x) for x in inputs],
        out_specs=[whole(x) for x in shapes],
        out_shape=shapes,
        input_output_aliases={7: 1, 8: 2},
        compiler_params=plt.CompilerParams(num_warps=gated_lora.WARPS, num_stages=gated_lora.stages(used, y, rows, 1, b, D)),
        interpret=interpret,
        name="gated_rope_write",
    )(*inputs)
    return by_token(q, by_head), k_pages, v_pages
