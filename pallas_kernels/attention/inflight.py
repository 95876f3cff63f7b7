"""What both kernels share outside the kernel: the in-flight mask as bit words aligned to slots, and how far a row sees."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt32

WORD = 32


def inflight_words(
    length: Int[Array, " B"],
    visible: UInt32[Array, "B T W"] | None,
    positions: Int[Array, "B T"],
    inflight_positions: Int[Array, "B M"],
    *,
    window: int | None,
    sink: int,
) -> Int[Array, "B T A"]:
    """The whole in-flight mask (visibility, existence, window, sinks) as words aligned to the cache's slots.

    Bit c % 32 of word c // 32 belongs to slot 32 * (length // 32) + c, so that a kernel's block of slots, itself
    aligned, needs whole words and no shift by the length. Depends on nothing that changes from layer to layer: XLA
    computes it once a step for all layers with the same window.

    Returns:
      int32 words, A = ceil((M + 31) / 32).
    """
    B, T = positions.shape
    M = inflight_positions.shape[1]
    words = -(-(M + WORD - 1) // WORD)
    entry = jnp.arange(words * WORD)[None] - (length % WORD)[:, None]
    inside = (entry >= 0) & (entry < M)
    entry = jnp.clip(entry, 0, M - 1)
    position = jnp.take_along_axis(inflight_positions, entry, 1)
    mask = (inside & (position >= 0))[:, None]
    if visible is None:
        mask = mask & (jnp.arange(M - T, M)[None, :, None] >= entry[:, None])
    else:
        column = jnp.broadcast_to((entry // WORD)[:, None], (B, T, words * WORD))
        word = jnp.take_along_axis(visible, column, 2)
        mask = mask & (((word >> (entry % WORD).astype(jnp.uint32)[:, None]) & 1) != 0)
    if window is not None:
        mask = mask & ((positions[:, :, None] - position[:, None] < window) | (position < sink)[:, None])
    bits = jnp.broadcast_to(mask, (B, T, words * WORD)).reshape(B, T, words, WORD).astype(jnp.uint32)
    packed = (bits << jnp.arange(WORD, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(packed, jnp.int32)


def last_slot(length: Array, row_end: Array | int, *, causal: bool, M: int, T: int, num_slots: int) -> Array:
    """One past the last slot that rows before `row_end` may see."""
    entries = M - T + row_end if causal else M
    return jnp.minimum(length + entries, num_slots)
