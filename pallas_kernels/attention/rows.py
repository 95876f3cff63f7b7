"""Attention of rows over each other, without a cache: a library's where it serves and works, plain jnp elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.attention import cudnn, rows_reference
from pallas_kernels.attention.cudnn import Library
from pallas_kernels.attention.rows_reference import unrolled
from pallas_kernels.shaped import Shaped

__all__ = [
    "Library",
    "attends_over_rows",
    "block_attention",
    "causal_attention",
    "chunk_attention",
    "library_for_chunks",
    "unrolled",
]

Kind = tuple[jnp.dtype, int, int, bool, float | None]
"""Of a layer: type, channels of a key and of a value head, whether it has a window, soft cap."""


def library_for_chunks(kinds: Iterable[Kind]) -> Library | None:
    """The library that attends fastest in the first chunk of a long prompt; None where none serves any of the layers."""
    return "cudnn" if any(attends_over_rows("cudnn", *kind) for kind in kinds) else None


def attends_over_rows(library: Library, dtype, key_dim: int, value_dim: int, windowed: bool, softcap: float | None) -> bool:
    """Whether `chunk_attention` is for layers of a kind; cuDNN is tried out first, once for each kind."""
    if softcap is not None or key_dim != value_dim:
        return False
    return library == "xla" or cudnn.prefill_works(jnp.dtype(dtype), key_dim, windowed)


def chunk_attention(
    library: Library,
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    *,
    scale: float,
    window: int | None,
) -> Float[Array, "B T H D"]:
    """Every row attends to itself and the rows before it, with a window to the nearest `window` of them."""
    return cudnn.causal_rows(q, k, v, scale=scale, window=window, implementation=library)


def causal_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K Dv"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Float[Array, "B T H Dv"]:
    """Causal attention of rows over themselves, with a derivative; see `rows_reference.unrolled`."""
    if _suits(q, v, softcap) and cudnn.training_works(windowed=window is not None):
        return cudnn.causal_rows(q, k, v, scale=scale, window=window, implementation="cudnn")
    return unrolled(q, ((k, v),), scale=scale, window=window, softcap=softcap)


def block_attention(
    q: Float[Array, "B R H D"],
    k: Float[Array, "B R K D"],
    v: Float[Array, "B R K Dv"],
    context_k: Float[Array, "B T K D"],
    context_v: Float[Array, "B T K Dv"],
    far: Bool[Array, "B A M T"],
    near: Bool[Array, "B A M M"],
    *,
    scale: float,
    softcap: float | None,
) -> Float[Array, "B R H Dv"]:
    """`rows_reference.blocks`, with a derivative; scores are never kept for the backward pass."""
    arguments = (q, k, v, context_k, context_v, far, near)
    if _suits(q, v, softcap) and cudnn.fused_blocks_work():
        return cudnn.fused_blocks(*arguments, scale)
    return jax.checkpoint(functools.partial(rows_reference.blocks, scale=scale, softcap=softcap))(*arguments)


def _suits(q: Shaped, v: Shaped, softcap: float | None) -> bool:
    return softcap is None and q.shape[-1] == v.shape[-1] and cudnn.suits_training(q)
