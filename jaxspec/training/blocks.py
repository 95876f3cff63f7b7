"""What objectives of block drafts share: random anchors, and attention of many blocks over one text.

Axis letters beside the project's: A anchors (blocks) of a row, M slots of a block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxspec.models.decoder import Attend


def switch(text: str) -> bool:
    """An option that is on or off. Raises ValueError for anything but 1, 0, true, false, yes, no, on, off."""
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ValueError(f"{text!r} must be one of {', '.join(known)}")
    return known[text.lower()]


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
    recomputed in the backward pass: only queries, keys and values are kept.

    Args:
      positions: of the slots.
      context: how many tokens of the context each slot sees, from the row's beginning on.
      own: which slots of its block each slot sees; itself at least.
    """
    B, A, M = positions.shape

    def attend(cache, q, k, v, *, scale, window, softcap):
        H, D = q.shape[2:]
        K = k.shape[2]

        @jax.checkpoint
        def core(q, k, v, context_k, context_v):
            q = q.reshape(B, A, M, K, H // K, D)
            k, v = k.reshape(B, A, M, K, D), v.reshape(B, A, M, K, v.shape[-1])
            place = jnp.arange(context_k.shape[1])
            far, near = place < context[..., None], own
            if window is not None:
                far &= positions[..., None] - place < window
                near &= positions[..., :, None] - positions[..., None, :] < window
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

        return core(q, k, v, *cache), cache

    return attend
