"""Test-time training of recurrent heads (EAGLE, MTP): what a chain of draft steps sees, for all positions at once.

In pass s the head stands s steps behind the target's last feature, at every anchor of the row at the same time. Row i of a
pass belongs to the anchor whose last target feature is f_i: its own position is i + s, it is fed the state that row i had
in the pass before and the token at i + 1 + s, and it predicts the token at i + 2 + s (EAGLE-3, Li et al. 2025,
section 3.2; HASS, Zhang et al. 2024, section 3.2).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool


def unrolled_attend(cache: tuple, q, k, v, *, scale: float, window: int | None, softcap: float | None) -> tuple[Array, tuple]:
    """An `jaxspec.models.decoder.Attend` for passes: causal over the first pass's entries, then row i's own later ones.

    Args:
      cache: (keys, values) of each earlier pass; () in the first.
      q, k, v: of this pass; row i stands at position i + number of earlier passes.
      scale, window, softcap: see `Attend`.
    """
    passes = (*cache, (k, v))
    B, T, H, D = q.shape
    K, G, s = k.shape[2], H // k.shape[2], len(cache)
    q = q.reshape(B, T, K, G, D)
    later = passes[1:]
    scores = jnp.einsum("BTKGD,BLKD->BKGTL", q, passes[0][0], preferred_element_type=jnp.float32)
    own = [jnp.einsum("BTKGD,BTKD->BKGT", q, keys, preferred_element_type=jnp.float32)[..., None] for keys, _ in later]
    scores = jnp.concatenate([scores, *own], -1) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    rows, columns = jnp.arange(T)[:, None], jnp.arange(T)
    positions = jnp.concatenate([jnp.broadcast_to(columns, (T, T)), rows + 1 + jnp.arange(s)], 1)
    distance = rows + s - positions
    causal = jnp.concatenate([columns <= rows, jnp.ones((T, s), bool)], 1)
    mask = causal if window is None else causal & (distance < window)
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1).astype(v.dtype)
    out = jnp.einsum("BKGTL,BLKD->BTKGD", weights[..., :T], passes[0][1])
    for i, (_, values) in enumerate(later):
        out = out + jnp.einsum("BKGT,BTKD->BTKGD", weights[..., T + i], values)
    return out.reshape(B, T, H, v.shape[-1]), passes


def ahead(x: Array, count: int) -> Array:
    """Entry i becomes that of position i + count; behind the row's end stands zero (`within` says where that is)."""
    return jnp.concatenate([x[:, count:], jnp.zeros_like(x[:, :count])], 1)


def within(supervised: Bool[Array, "B T"], step: int) -> Bool[Array, "B T"]:
    """Whether the token that row i predicts in pass `step`, at i + 2 + step, exists and is one of the target's answer."""
    return ahead(supervised, 2 + step)


def anchors(supervised: Bool[Array, "B T"], passes: int) -> Bool[Array, "B T"]:
    """Rows all of whose predictions are `within`: the ones over which accept lengths are counted."""
    found = within(supervised, 0)
    for step in range(1, passes):
        found = found & within(supervised, step)
    return found
