"""Test-time training of recurrent heads (EAGLE, MTP): what a chain of draft steps sees, for all positions at once.

In pass s the head stands s steps behind the target's last feature, at every anchor of the row at the same time. Row i of a
pass belongs to the anchor whose last target feature is f_i: its own position is i + s, it is fed the state that row i had
in the pass before and the token at i + 1 + s, and it predicts the token at i + 2 + s (EAGLE-3, Li et al. 2025,
section 3.2; HASS, Zhang et al. 2024, section 3.2). What a row attends to is in `jaxspec.training.attention`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool


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
