"""Attention of rows over each other, without a cache, in plain jnp.

Axis letters beside those of `attention.reference`: A blocks of a row, M slots of a block, R = A * M.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

CHUNK = 256
"""Queries whose scores are in memory at a time; keys behind a chunk are never touched (a third of the work for 768)."""

Entries = tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]]


def unrolled(
    q: Float[Array, "B T H D"], passes: Sequence[Entries], *, scale: float, window: int | None, softcap: float | None
) -> Float[Array, "B T H D"]:
    """Causal attention over the first pass's entries and, of each later pass, one's own entry.

    Row i of pass s stands at position i + s. It sees the first pass's entries 0 … i and, of each later pass, entry i
    (EAGLE-3, Li et al. 2025, section 3.2). Scores and probabilities are made again in the backward pass.

    Args:
      q: queries of the last pass.
      passes: keys and values of each pass; with one this is causal attention of rows over themselves.
      scale, window, softcap: see `attention.reference.tree_attention`.
    """
    B, T, H, D = q.shape
    (keys, values), later = passes[0], passes[1:]
    K = keys.shape[2]
    grouped = q.reshape(B, T, K, H // K, D)
    part = jax.checkpoint(functools.partial(_attend_chunk, scale=scale, window=window, softcap=softcap), static_argnums=(0, 1))
    outs = []
    for start in range(0, T, CHUNK):
        stop = min(start + CHUNK, T)
        own = tuple((key[:, start:stop], value[:, start:stop]) for key, value in later)
        outs.append(part(start, stop, grouped[:, start:stop], keys[:, :stop], values[:, :stop], own))
    out = outs[0] if len(outs) == 1 else jnp.concatenate(outs, 1)
    return out.reshape(B, T, H, values.shape[-1])


def _attend_chunk(
    start: int, stop: int, q: Float[Array, "B T K G D"], keys, values, own, *, scale, window, softcap
) -> Float[Array, "B T K G D"]:
    """Queries `start` … `stop` against all keys up to `stop` and their own later ones."""

    def scaled(scores):
        scores = scores * scale
        return scores if softcap is None else softcap * jnp.tanh(scores / softcap)

    s = len(own)
    distance = jnp.arange(start, stop)[:, None] - jnp.arange(stop)
    seen = distance >= 0
    if window is not None:
        seen &= distance + s < window
        own = own[max(0, s - window) :]
    scores = scaled(jnp.einsum("BTKGD,BLKD->BKGTL", q, keys, preferred_element_type=jnp.float32))
    scores = jnp.where(seen, scores, -1e30)
    extra = [
        scaled(jnp.sum(q.astype(jnp.float32) * key[:, :, :, None].astype(jnp.float32), -1)).transpose(0, 2, 3, 1)
        for key, _ in own
    ]
    top = functools.reduce(jnp.maximum, extra, jnp.max(scores, -1))
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - top[..., None])
    own_weights = [jnp.exp(score - top) for score in extra]
    total = functools.reduce(jnp.add, own_weights, jnp.sum(weights, -1))
    out = jnp.einsum("BKGTL,BLKD->BTKGD", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)

    def by_row(x):
        return x.transpose(0, 3, 1, 2)[..., None]

    for weight, (_, value) in zip(own_weights, own, strict=True):
        out = out + by_row(weight) * value[:, :, :, None].astype(jnp.float32)
    return (out / by_row(total)).astype(values.dtype)


def blocks(
    q: Float[Array, "B R H D"],
    k: Float[Array, "B R K D"],
    v: Float[Array, "B R K D"],
    context_k: Float[Array, "B T K D"],
    context_v: Float[Array, "B T K D"],
    far: Bool[Array, "B A M T"],
    near: Bool[Array, "B A M M"],
    *,
    scale: float,
    softcap: float | None,
) -> Float[Array, "B R H D"]:
    """Blocks of slots over the context of their row and over themselves, in two parts, which share one softmax.

    No block meets another's keys.

    Args:
      q, k, v: of all blocks' slots.
      context_k, context_v: keys and values of the context.
      far: which entries of the context each slot sees.
      near: which slots of its block each slot sees; itself at least.
      scale, softcap: see `attention.reference.tree_attention`.
    """
    B, A, M, _ = far.shape
    (H, D), K = q.shape[2:], k.shape[2]
    q = q.reshape(B, A, M, K, H // K, D)
    k, v = k.reshape(B, A, M, K, D), v.reshape(B, A, M, K, v.shape[-1])
    old = jnp.einsum("BAMKGD,BTKD->BKGAMT", q, context_k, preferred_element_type=jnp.float32) * scale
    new = jnp.einsum("BAMKGD,BANKD->BKGAMN", q, k, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        old, new = softcap * jnp.tanh(old / softcap), softcap * jnp.tanh(new / softcap)
    old = jnp.where(far[:, None, None], old, -jnp.inf)
    new = jnp.where(near[:, None, None], new, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(old, -1), jnp.max(new, -1)))[..., None]
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = jnp.sum(old, -1) + jnp.sum(new, -1)
    out = jnp.einsum("BKGAMT,BTKD->BAMKGD", old.astype(v.dtype), context_v, preferred_element_type=jnp.float32)
    out += jnp.einsum("BKGAMN,BANKD->BAMKGD", new.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = out / jnp.moveaxis(total, (1, 2), (3, 4))[..., None]
    return out.astype(v.dtype).reshape(B, A * M, H, v.shape[-1])
