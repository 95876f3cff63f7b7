"""Losses of draft heads: terms over single rows, and how they are summed over a batch without its logits in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

CHUNK = 4096
"""Rows whose logits are in memory at a time: 0.8 GB in float32 for a vocabulary of 49152."""


def soft_cross_entropy(logits: Float[Array, "*R V"], target_logits: Float[Array, "*R V"]) -> Float[Array, " *R"]:
    """Cross entropy -Σ p log q of a draft's distribution q against the target's p, both given as logits."""
    p = jax.nn.softmax(target_logits, axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(p * logits, axis=-1)


def entropy(logits: Float[Array, "*R V"]) -> Float[Array, " *R"]:
    """Entropy -Σ p log p: what `soft_cross_entropy` cannot fall below; their difference is KL(p ‖ q)."""
    return soft_cross_entropy(logits, logits)


def smooth_l1(x: Float[Array, "*R E"], y: Float[Array, "*R E"]) -> Float[Array, " *R"]:
    """Huber loss with threshold 1, averaged over the last axis, in float32."""
    d = jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32))
    return jnp.mean(jnp.where(d < 1, 0.5 * d * d, d - 0.5), axis=-1)


def masked_mean(values: Float[Array, " *R"], weights: Array) -> Float[Array, ""]:
    """Mean of `values` with `weights` (0 where there is no weight at all)."""
    weights = weights.astype(jnp.float32)
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1e-6)


def over_rows(function: Callable[..., tuple[Array, Any]], rows: tuple, *, chunk: int = CHUNK) -> tuple[Array, Any]:
    """(losses, further results) of `function` row by row, `chunk` rows at a time, gradients to everything it uses.

    The backward pass computes a chunk's logits once more instead of keeping them.

    Args:
      function: (one entry of each of `rows`) -> (scalar loss, pytree).
      rows: arrays with the same leading axis.
      chunk: rows at a time.
    """
    return jax.lax.map(jax.checkpoint(lambda row: function(*row)), rows, batch_size=min(chunk, rows[0].shape[0]))


def over_rows_frozen(
    function: Callable[..., tuple[Array, Any]], x: Float[Array, "R E"], rows: tuple, *, chunk: int = CHUNK
) -> tuple[Array, Any]:
    """As `over_rows` where the first argument alone is differentiated: everything else (the output matrix) is frozen.

    The gradient of row i's loss depends on row i only. So it is taken in the forward pass, while the logits are there, and
    handed to the backward pass as a linear term of value 0: three products with the output matrix instead of five.

    Args:
      function: (row of `x`, one entry of each of `rows`) -> (scalar loss, pytree).
      x: what is differentiated.
      rows: arrays with the same leading axis as `x`.
      chunk: rows at a time.
    """
    fixed = jax.lax.stop_gradient(x)

    def with_gradient(row):
        (loss, further), gradient = jax.value_and_grad(lambda x, *others: function(x, *others), has_aux=True)(*row)
        return loss, further, gradient

    losses, further, gradients = jax.lax.map(with_gradient, (fixed, *rows), batch_size=min(chunk, x.shape[0]))
    difference = x.astype(jnp.float32) - fixed.astype(jnp.float32)
    return losses + jnp.einsum("RE,RE->R", gradients.astype(jnp.float32), difference), further
