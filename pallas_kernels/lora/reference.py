"""Products through a low-rank adapter that only some rows take, in plain jnp."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from pallas_kernels.product import reference as product


class Adapter(NamedTuple):
    """A low-rank adapter of one product and the rows that take it (Hu et al. 2021).

    Attributes:
      a: the first matrix [I, rank].
      b: the second [rank, O].
      scale: the factor of a @ b; a number, or an array where a derivative is wanted.
      gate: rows that take the adapter.
      blocks: for each column the block of equally many rows of `b` that holds all that differs from zero, -1 for none;
        None: all count.
    """

    a: Float[Array, "I rank"]
    b: Float[Array, "rank O"]
    scale: float | Float[Array, ""]
    gate: Bool[Array, "*R 1"]
    blocks: np.ndarray | None = None


def shrink(x: Float[Array, "*R I"], a: Float[Array, "I rank"]) -> Float[Array, "*R rank"]:
    """x @ a in float32."""
    return jnp.matmul(x, a, preferred_element_type=jnp.float32)


def gated_lora(
    y: Float[Array, "*R O"], hidden: Float[Array, "*R rank"], b: Float[Array, "rank O"], gate: Bool[Array, "*R 1"], *, scale
) -> Float[Array, "*R O"]:
    """y + scale * hidden @ b (Hu et al. 2021, section 4.1) in the rows that `gate` opens; others keep y bit for bit.

    Whatever is not finite becomes 0: the keys and values of these rows stand in the same pages as those of other rows,
    where a masked NaN would still be a NaN after a product with 0.
    """
    changed = y + scale * (hidden @ b.astype(hidden.dtype))
    return jnp.where(gate, jnp.where(jnp.isfinite(changed), changed, 0), y)


def add_adapter(
    x: Float[Array, "*R I"], y: Float[Array, "*R O"], adapter: Adapter, *, silu: bool = False
) -> Float[Array, "*R out"]:
    """`gated_lora` with hidden = x @ a on a product y of x; with `silu` the columns are gates and as many values, as for
    `product.reference.gate_values`."""
    y = gated_lora(y, x @ adapter.a.astype(x.dtype), adapter.b, adapter.gate, scale=adapter.scale)
    return product.gate_values(y) if silu else y
