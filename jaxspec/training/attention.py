"""Attention of whole rows for training: the scores of a few hundred queries at a time, and none for keys behind them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.fused import causal_rows, works

CHUNK = 256
"""Queries whose scores are in memory at a time; keys behind a chunk are never touched (a third of the work for 768)."""


def row_attend(cache, q, k, v, *, scale: float, window: int | None, softcap: float | None) -> tuple[Array, None]:
    """An `jaxspec.models.decoder.Attend` without a cache: rows attend causally to themselves; positions are indices."""
    del cache
    plain = softcap is None and q.shape[-1] == v.shape[-1]
    if plain and suits_cudnn(q) and fused_attention_works(windowed=window is not None):
        return causal_rows(q, k, v, scale=scale, window=window, implementation="cudnn"), None
    return unrolled_attend((), q, k, v, scale=scale, window=window, softcap=softcap)[0], None


def suits_cudnn(q: Array) -> bool:
    """Whether cuDNN's attention takes the type and head size of these queries."""
    return q.dtype == jnp.bfloat16 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128


@functools.cache
def fused_attention_works(windowed: bool) -> bool:
    """Whether cuDNN's attention and its gradient compile and run on the default device; warns on a GPU where they do not."""
    attend = functools.partial(causal_rows, scale=0.125, window=32 if windowed else None, implementation="cudnn")

    def trial() -> bool:
        value, pull = jax.vjp(lambda x: attend(x, x, x), jnp.zeros((1, 128, 2, 64), jnp.bfloat16))
        jax.block_until_ready(pull(value))
        return True

    return works(trial, "sliding-window attention" if windowed else "attention", "training")


def unrolled_attend(cache: tuple, q, k, v, *, scale: float, window: int | None, softcap: float | None) -> tuple[Array, tuple]:
    """An `Attend` for draft steps trained at all positions at once: causal over the first pass's entries, then own later ones.

    Row i of pass s stands at position i + s. It sees the first pass's entries 0 … i and, of each later pass, entry i
    (EAGLE-3, Li et al. 2025, section 3.2). Scores and probabilities are made again in the backward pass.

    Args:
      cache: (keys, values) [B, T, K, D] of each earlier pass; () in the first.
      q, k, v: of this pass.
      scale, window, softcap: see `Attend`.
    """
    # The gradient of an entry is a sum over all later passes and chunks. Without a barrier XLA makes one kernel of the whole
    # sum, which takes minutes to compile.
    passes = (*jax.lax.optimization_barrier(cache), (k, v))
    B, T, H, D = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, H // K, D)
    (keys, values), later = passes[0], passes[1:]
    part = jax.checkpoint(functools.partial(_attend_chunk, scale=scale, window=window, softcap=softcap), static_argnums=(0, 1))
    outs = []
    for start in range(0, T, CHUNK):
        stop = min(start + CHUNK, T)
        own = tuple((key[:, start:stop], value[:, start:stop]) for key, value in later)
        outs.append(part(start, stop, grouped[:, start:stop], keys[:, :stop], values[:, :stop], own))
    out = outs[0] if len(outs) == 1 else jnp.concatenate(outs, 1)
    return out.reshape(B, T, H, v.shape[-1]), (*cache, (k, v))


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
