"""The few largest of a vocabulary's logits in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 64


def top_k(values: Float[Array, "*R V"], k: int) -> tuple[Float[Array, "*R K"], Int[Array, "*R K"]]:
    """The k largest values and their indices, largest first, ties towards the lower index.

    `lax.top_k` over a vocabulary is slow on a GPU and sorts it for k > 16. Up to 16 are found by argmax and masking, more
    among the blocks with the k largest maxima, which hold them all.
    """
    V = values.shape[-1]
    if max(1024, k * BLOCK) >= V:
        best, where = jax.lax.top_k(values, k)
        return best, where
    if k > 16:
        rows = values.shape[:-1]
        blocks = jnp.pad(values, [(0, 0)] * len(rows) + [(0, -V % BLOCK)], constant_values=-jnp.inf)
        blocks = blocks.reshape(*rows, -1, BLOCK)
        chosen = jnp.sort(jax.lax.top_k(blocks.max(-1), k)[1], -1)  # in the order of the vocabulary, for ties
        candidates = jnp.take_along_axis(blocks, chosen[..., None], -2).reshape(*rows, -1)
        best, at = jax.lax.top_k(candidates, k)
        block = jnp.take_along_axis(chosen, at // BLOCK, -1)
        return best, (block * BLOCK + at % BLOCK).astype(jnp.int32)
    index = jnp.arange(V)
    best, where = [], []
    for _ in range(k):
        i = jnp.argmax(values, axis=-1)
        best.append(jnp.take_along_axis(values, i[..., None], -1)[..., 0])
        where.append(i)
        values = jnp.where(index == i[..., None], -jnp.inf, values)
    return jnp.stack(best, -1), jnp.stack(where, -1).astype(jnp.int32)


def top_k_probabilities(logits: Float[Array, "*R V"], k: int) -> tuple[Float[Array, "*R K"], Int[Array, "*R K"]]:
    """Probabilities (softmax) and indices of the k largest logits."""
    best, where = top_k(logits, k)
    top = best[..., :1]
    return jnp.exp(best - top) / jnp.exp(logits - top).sum(-1, keepdims=True), where
