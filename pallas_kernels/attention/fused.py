"""cuDNN's fused attention: causal rows over themselves, tried out on the device before anything rests on it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

T = TypeVar("T")
Implementation = Literal["cudnn", "xla"]


def apart(function: Callable[[], T]) -> T:
    """Runs a function on a thread of its own: its arrays are values there, even when the caller is being traced."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def warn_of_cudnn(what: str, reason: object, who: str) -> None:
    """Says that `who` goes on with slower code."""
    reason = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else reason
    warnings.warn(f"cuDNN's {what} does not work here, {who} does without, which is slower ({reason})", stacklevel=3)


def works(trial: Callable[[], bool], what: str, who: str) -> bool:
    """Whether a trial succeeds on the default device, a GPU; warns where it raises or says no."""
    if jax.default_backend() not in ("gpu", "cuda"):
        return False
    try:
        agrees = apart(trial)
    except Exception as error:  # whatever a missing or old cuDNN raises: there is another way
        warn_of_cudnn(what, error, who)
        return False
    if not agrees:
        warn_of_cudnn(what, "its results differ from those of plain products", who)
    return agrees


def causal_rows(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    *,
    scale: float,
    window: int | None,
    implementation: Implementation,
) -> Float[Array, "B T H D"]:
    """Every row attends to itself and the rows before it, with a window to the nearest `window` of them."""
    span = None if window is None or window >= q.shape[1] else (window - 1, 0)
    options = {"scale": scale, "is_causal": True, "local_window_size": span}
    return jax.nn.dot_product_attention(q, k, v, **options, implementation=implementation)


def serves(implementation: Implementation, dtype, key_dim: int, value_dim: int, windowed: bool, softcap: float | None) -> bool:
    """Whether `causal_rows` takes a layer of this kind; cuDNN is tried out first, once for each kind."""
    if softcap is not None or key_dim != value_dim:
        return False
    return implementation == "xla" or prefill_works(jnp.dtype(dtype), key_dim, windowed)


@functools.cache
def prefill_works(dtype: jnp.dtype, head_dim: int, windowed: bool) -> bool:
    """Whether cuDNN's forward pass runs on the default device for this type and head size, and gives what XLA's gives."""
    if dtype not in (jnp.bfloat16, jnp.float16) or head_dim % 8 or head_dim > 256:
        return False

    def trial() -> bool:
        q, k, v = (
            jax.random.normal(key, (1, 160, heads, head_dim), dtype)
            for key, heads in zip(jax.random.split(jax.random.key(0), 3), (4, 2, 2), strict=True)
        )
        options = {"scale": head_dim**-0.5, "window": 40 if windowed else None}
        found, wanted = (causal_rows(q, k, v, **options, implementation=name) for name in ("cudnn", "xla"))
        return bool(jnp.allclose(found.astype(jnp.float32), wanted.astype(jnp.float32), rtol=0.03, atol=0.03))

    return works(trial, "sliding-window attention" if windowed else "attention", "prefill")
