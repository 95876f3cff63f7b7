"""The attention contract in plain jnp: the oracle of every kernel, and (in blocks, for wide tables) the path that a CPU runs.

Axis letters: B sequences, T query rows, H query heads, K kv heads, G = H // K, P pages, S slots a page, N pages a
sequence, L = N * S cached slots, M in-flight entries, Dk and Dv channels of a key and a value head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32


def visible_slots(
    length: Int[Array, " B"],
    visible: UInt32[Array, "B T W"] | None,
    positions: Int[Array, "B T"],
    inflight_positions: Int[Array, "B M"],
    num_slots: int,
    window: int | None,
    sink: int = 0,
    first: Int[Array, ""] | int = 0,
) -> Bool[Array, "B T L"]:
    """Which of a sequence's slots, `num_slots` from `first` on, every row sees: the mask that `tree_attention` describes."""
    T, M = positions.shape[1], inflight_positions.shape[1]
    slot = first + jnp.arange(num_slots)[None]
    entry = slot - length[:, None]
    inflight = (entry >= 0) & (entry < M)
    entry = jnp.clip(entry, 0, M - 1)
    entry_position = jnp.take_along_axis(inflight_positions, entry, 1)
    exists = (entry < 0) | ~inflight | (entry_position >= 0)
    if visible is None:
        seen = jnp.arange(M - T, M)[None, :, None] >= entry[:, None, :]
    else:
        word = jnp.take_along_axis(visible, jnp.broadcast_to((entry // 32)[:, None, :], (entry.shape[0], T, num_slots)), 2)
        seen = ((word >> (entry % 32).astype(jnp.uint32)[:, None, :]) & 1).astype(bool)
    mask = jnp.where(inflight[:, None, :], seen & exists[:, None, :], (slot < length[:, None])[:, None, :])
    if window is not None:
        key_position = jnp.where(inflight, entry_position, slot)
        mask &= (positions[:, :, None] - key_position[:, None, :] < window) | (key_position < sink)[:, None, :]
    return mask


def tree_attention(
    q: Float[Array, "B T H Dk"],
    k_pages: Float[Array, "P S K Dk"],
    v_pages: Float[Array, "P S K Dv"],
    page_table: Int[Array, "B N"],
    length: Int[Array, " B"],
    visible: UInt32[Array, "B T W"] | None,
    positions: Int[Array, "B T"],
    inflight_positions: Int[Array, "B M"],
    *,
    scale: float,
    window: int | None = None,
    sink: int = 0,
    softcap: float | None = None,
) -> Float[Array, "B T H Dv"]:
    """Attention of T rows over a committed prefix and M >= T in-flight entries of the same paged cache.

    The in-flight entries' keys and values already lie in slots length … length + M - 1; the T query rows belong to the
    last T of them (a draft level queries only its newest beams).

    Args:
      q: queries.
      k_pages, v_pages: the pools of one layer. Slots that nobody sees may hold anything, NaN included.
      page_table: pages of each sequence.
      length: committed positions; every row sees them all (but for the window).
      visible: bit j % 32 of word j // 32 says whether a row sees in-flight entry j, itself included; None means
        causal order: row i sees entries up to its own.
      positions: logical position of each query row.
      inflight_positions: logical position of each in-flight entry; -1 for an entry that does not exist: no row sees
        it and its content is never used.
      scale: factor of the scores.
      window: a row at position p sees keys at positions above p - window only; None for all.
      sink: with a window, keys at positions below `sink` are seen regardless of it.
      softcap: scores become softcap * tanh(scores / softcap).

    Returns:
      The attention output in q's dtype; zeros for a row that sees nothing. Computed in float32.
    """
    B, T, H, Dk = q.shape
    _, S, K, Dv = v_pages.shape
    L = page_table.shape[1] * S
    k = k_pages[page_table].reshape(B, L, K, Dk)
    v = v_pages[page_table].reshape(B, L, K, Dv)
    mask = visible_slots(length, visible, positions, inflight_positions, L, window, sink)
    used = mask.any(1)[..., None, None]
    k = jnp.where(used, k, 0).astype(jnp.float32)
    v = jnp.where(used, v, 0).astype(jnp.float32)
    grouped = q.reshape(B, T, K, H // K, Dk).astype(jnp.float32)
    scores = jnp.einsum("BTKGD,BLKD->BKGTL", grouped, k, precision="highest") * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    mask = mask[:, None, None]
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(mask, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    out = jnp.einsum("BKGTL,BLKD->BTKGD", weights, v, precision="highest")
    return out.reshape(B, T, H, Dv).astype(q.dtype)


BLOCK = 256


def blocked_attention(
    q: Float[Array, "B T H Dk"],
    k_pages: Float[Array, "P S K Dk"],
    v_pages: Float[Array, "P S K Dv"],
    page_table: Int[Array, "B N"],
    length: Int[Array, " B"],
    visible: UInt32[Array, "B T W"] | None,
    positions: Int[Array, "B T"],
    inflight_positions: Int[Array, "B M"],
    *,
    scale: float,
    window: int | None = None,
    sink: int = 0,
    softcap: float | None = None,
) -> Float[Array, "B T H Dv"]:
    """`tree_attention` by blocks of slots up to the longest sequence: what lies behind it in a wide table costs nothing.

    Arguments and result are the same, up to rounding (softmax by running maxima, Milakov and Gimelshein 2018).
    """
    B, T, H, Dk = q.shape
    _, S, K, Dv = v_pages.shape
    pages = max(BLOCK // S, 1)
    size = pages * S
    grouped = q.reshape(B, T, K, H // K, Dk).astype(jnp.float32) * scale
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))
    end = jnp.minimum(jnp.max(length) + inflight_positions.shape[1], page_table.shape[1] * S)

    def add(i, carry):
        top, total, out = carry
        there = jax.lax.dynamic_slice_in_dim(table, i * pages, pages, 1)
        mask = visible_slots(length, visible, positions, inflight_positions, size, window, sink, i * size)
        used = mask.any(1)[..., None, None]
        k = jnp.where(used, k_pages[there].reshape(B, size, K, Dk), 0).astype(jnp.float32)
        v = jnp.where(used, v_pages[there].reshape(B, size, K, Dv), 0).astype(jnp.float32)
        scores = jnp.einsum("BTKGD,BLKD->BKGTL", grouped, k, precision="highest")
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        mask = mask[:, None, None]
        above = jnp.maximum(top, jnp.max(jnp.where(mask, scores, -jnp.inf), -1, keepdims=True))
        base = jnp.where(jnp.isfinite(above), above, 0)
        weights = jnp.where(mask, jnp.exp(scores - base), 0)
        kept = jnp.exp(jnp.where(jnp.isfinite(top), top - base, -jnp.inf))
        total = total * kept + jnp.sum(weights, -1, keepdims=True)
        out = out * kept + jnp.einsum("BKGTL,BLKD->BKGTD", weights, v, precision="highest")
        return above, total, out

    shape = (B, K, H // K, T)
    nothing = (jnp.full((*shape, 1), -jnp.inf), jnp.zeros((*shape, 1)), jnp.zeros((*shape, Dv)))
    _, total, out = jax.lax.fori_loop(0, -(-end // size), add, nothing)
    out = out / jnp.where(total > 0, total, 1)
    return jnp.moveaxis(out, 3, 1).reshape(B, T, H, Dv).astype(q.dtype)
