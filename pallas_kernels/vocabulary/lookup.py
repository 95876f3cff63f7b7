"""A small table inside a kernel."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


def lookup(table: np.ndarray, index: Int[Array, ""]) -> Int[Array, ""]:
    """table[index], computed: a load would keep those waiting that need it. Meant for few runs of equal values."""
    period = next(p for p in range(1, len(table) + 1) if len(table) % p == 0 and (table.reshape(-1, p) == table[:p]).all())
    value, place = jnp.int32(table[0]), index % period
    for i in np.flatnonzero(np.diff(table[:period])) + 1:
        value = jnp.where(place >= i, jnp.int32(table[i]), value)
    return value
