"""What objectives of block drafts share: random anchors, and attention of many blocks over one text.

Axis letters beside the project's: A anchors (blocks) of a row, M slots of a block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxspec.models.decoder import Attend
from pallas_kernels.attention.rows import block_attention


def sample_anchors(key: PRNGKeyArray, allowed: Bool[Array, "B T"], count: int) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """`count` different positions of every row, uniformly among the allowed ones, in random order.

    Returns:
      (positions, which of them count): a row with fewer allowed positions is filled up with others that do not.
    """
    length = allowed.shape[1]
    order = jnp.where(allowed, jax.random.uniform(key, allowed.shape), -1.0)
    score, index = jax.lax.top_k(order, min(count, length))
    pad = ((0, 0), (0, max(count - length, 0)))
    return jnp.pad(index.astype(jnp.int32), pad), jnp.pad(score >= 0, pad)


def take(x: Array, index: Int[Array, "B A M"]) -> Array:
    """x[b, index[b, a, m]] for x of shape [B, T, …]; indices beyond the end give the last position."""
    rows = jnp.arange(x.shape[0])[:, None, None]
    return x[rows, jnp.minimum(index, x.shape[1] - 1)]


def block_attend(positions: Int[Array, "B A M"], context: Int[Array, "B A M"], own: Bool[Array, "B A M M"]) -> Attend:
    """Attention of blocks over the first tokens of their row and over themselves.

    The layer's cache is the context's (keys, values), each [B, T, K, D]; queries come as [B, A · M, H, D]. Scores are
    never kept for the backward pass.

    Args:
      positions: of the slots.
      context: how many tokens of the context each slot sees, from the row's beginning on.
      own: which slots of its block each slot sees; itself at least.
    """

    def attend(cache, q, k, v, *, scale, window, softcap):
        place = jnp.arange(cache[0].shape[1])
        far, near = place < context[..., None], own
        if window is not None:
            far &= positions[..., None] - place < window
            near &= positions[..., :, None] - positions[..., None, :] < window
        return block_attention(q, k, v, *cache, far, near, scale=scale, softcap=softcap), cache

    return attend
