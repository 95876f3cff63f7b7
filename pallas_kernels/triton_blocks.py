"""What kernels for Pallas' Triton back end share: whole arrays, which they index themselves, and small tables."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Int


def whole(x: Any) -> pl.BlockSpec:
    """All of an array, for every program."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))


def lookup(table: np.ndarray, index: Int[Array, ""]) -> Int[Array, ""]:
    """table[index], computed: a load would keep those waiting that need it. Meant for few runs of equal values."""
    period = next(p for p in range(1, len(table) + 1) if len(table) % p == 0 and (table.reshape(-1, p) == table[:p]).all())
    value, place = jnp.int32(table[0]), index % period
    for i in np.flatnonzero(np.diff(table[:period])) + 1:
        value = jnp.where(place >= i, jnp.int32(table[i]), value)
    return value
