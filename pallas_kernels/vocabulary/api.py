"""The few largest of a vocabulary's logits: two kernels on GPUs that run them, plain jnp elsewhere."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import device
from pallas_kernels.shaped import Shaped
from pallas_kernels.vocabulary import reference, triton


def top_k(values: Float[Array, "*R V"], k: int) -> tuple[Float[Array, "*R K"], Int[Array, "*R K"]]:
    """The k largest values and their indices, largest first, ties towards the lower index; see `reference.top_k`."""
    if not _by_kernel(values, k):
        return reference.top_k(values, k)
    best, where, _ = _kernel(values, k)
    return best, where


def top_k_probabilities(logits: Float[Array, "*R V"], k: int) -> tuple[Float[Array, "*R K"], Int[Array, "*R K"]]:
    """Probabilities (softmax) and indices of the k largest logits: `top_k` of the softmax with fewer passes over a vocabulary.

    For k = 1 whoever looks at the index alone pays for one argmax.
    """
    if not _by_kernel(logits, k):
        return reference.top_k_probabilities(logits, k)
    best, where, mass = _kernel(logits, k)
    return jnp.exp(best - best[..., :1]) / mass, where


def _by_kernel(values: Shaped, k: int) -> bool:
    return k > 1 and device.runs_triton() and triton.serves(values, k)


def _kernel(values: Float[Array, "*R V"], k: int) -> tuple[Float[Array, "*R K"], Int[Array, "*R K"], Float[Array, "*R 1"]]:
    """`triton.top_k` over any leading axes: values, indices and the softmax's divisor."""
    found = triton.top_k(values.reshape(-1, values.shape[-1]), k)
    return tuple(x.reshape(*values.shape[:-1], -1) for x in found)
