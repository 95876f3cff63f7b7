"""Products with a weight as XLA makes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def product(x: Float[Array, "*R I"], w: Float[Array, "I O"], dtype=None) -> Float[Array, "*R O"]:
    """x @ w, rounded to `dtype`, None for the type of x."""
    return jnp.matmul(x, w, preferred_element_type=x.dtype if dtype is None else dtype)


def product_in_parts(x: Float[Array, "B T I"], w: Float[Array, "I O"], parts: int) -> Float[Array, "parts B T O"]:
    """x @ w as so many partial sums in float32, of equally many inputs each; their number divides that of the inputs."""
    inputs, outputs = w.shape
    x = x.reshape(*x.shape[:2], parts, inputs // parts)
    return jnp.einsum("BTSI,SIO->SBTO", x, w.reshape(parts, inputs // parts, outputs), preferred_element_type=jnp.float32)


def add_up(parts: Float[Array, "parts *R O"], dtype) -> Float[Array, "*R O"]:
    """A product from its parts, rounded once."""
    return parts[0] if parts.shape[0] == 1 else parts.sum(0).astype(dtype)


def gate_values(y: Float[Array, "*R twice_F"]) -> Float[Array, "*R F"]:
    """silu(gate) * value of a product that holds gates, then values."""
    gate, value = jnp.split(y, 2, axis=-1)
    return jax.nn.silu(gate) * value


def gated_product(x: Float[Array, "*R I"], w: Float[Array, "I twice_F"]) -> Float[Array, "*R F"]:
    """`gate_values` of x @ w."""
    return gate_values(product(x, w))
