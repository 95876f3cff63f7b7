"""Attention of whole rows for training: without a cache, over themselves and over earlier draft steps."""

from __future__ import annotations

import jax
from jaxtyping import Array

from pallas_kernels.attention.rows import causal_attention, unrolled


def row_attend(cache, q, k, v, *, scale: float, window: int | None, softcap: float | None) -> tuple[Array, None]:
    """An `jaxspec.models.decoder.Attend` without a cache: rows attend causally to themselves; positions are indices."""
    del cache
    return causal_attention(q, k, v, scale=scale, window=window, softcap=softcap), None


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
    return unrolled(q, passes, scale=scale, window=window, softcap=softcap), (*cache, (k, v))
