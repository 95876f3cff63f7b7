"""cuDNN's fused attention of rows over each other, tried out on the device before anything rests on it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.attention import rows_reference
from pallas_kernels.shaped import Shaped

T = TypeVar("T")
Library = Literal["cudnn", "xla"]
"""Whose fused attention: XLA's may stand in for cuDNN's."""


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
    implementation: Library,
) -> Float[Array, "B T H D"]:
    """Every row attends to itself and the rows before it, with a window to the nearest `window` of them."""
    span = None if window is None or window >= q.shape[1] else (window - 1, 0)
    options = {"scale": scale, "is_causal": True, "local_window_size": span}
    return jax.nn.dot_product_attention(q, k, v, **options, implementation=implementation)


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


def suits_training(q: Shaped) -> bool:
    """Whether cuDNN's attention and its gradient take the type and head size of these queries."""
    return q.dtype == jnp.bfloat16 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128


@functools.cache
def training_works(windowed: bool) -> bool:
    """Whether cuDNN's attention and its gradient compile and run on the default device; warns on a GPU where they do not."""
    attend = functools.partial(causal_rows, scale=0.125, window=32 if windowed else None, implementation="cudnn")

    def trial() -> bool:
        value, pull = jax.vjp(lambda x: attend(x, x, x), jnp.zeros((1, 128, 2, 64), jnp.bfloat16))
        jax.block_until_ready(pull(value))
        return True

    return works(trial, "sliding-window attention" if windowed else "attention", "training")


def fused_blocks(
    q: Float[Array, "B R H D"],
    k: Float[Array, "B R K D"],
    v: Float[Array, "B R K D"],
    context_k: Float[Array, "B T K D"],
    context_v: Float[Array, "B T K D"],
    far: Bool[Array, "B A M T"],
    near: Bool[Array, "B A M M"],
    scale: float,
    implementation: Library = "cudnn",
) -> Float[Array, "B R H D"]:
    """`rows_reference.blocks` in one fused kernel over all keys of the row, whose scores never stand in memory."""
    B, A, M, T = far.shape
    same = jnp.eye(A, dtype=bool)[:, None, :, None]
    own = (near[:, :, :, None] & same).reshape(B, A * M, A * M)
    mask = jnp.concatenate([far.reshape(B, A * M, T), own], -1)[:, None]
    keys, values = jnp.concatenate([context_k, k], 1), jnp.concatenate([context_v, v], 1)
    return jax.nn.dot_product_attention(q, keys, values, mask=mask, scale=scale, implementation=implementation)


@functools.cache
def fused_blocks_work() -> bool:
    """Whether cuDNN compiles `fused_blocks` and its gradient on the default device, and finds what the reference finds.

    Warns on a GPU where that is not so.
    """
    fused = functools.partial(fused_blocks, scale=TRIAL_SCALE)
    return jax.default_backend() in ("gpu", "cuda") and apart(functools.partial(agrees, fused))


TRIAL_SCALE = 0.125


def agrees(function) -> bool:
    """Whether a function runs, and gives about what `rows_reference.blocks` does, with about the same gradients."""
    B, A, M, T, H, K, D = 2, 8, 8, 128, 4, 2, 64
    shapes = {"q": (A * M, H), "k": (A * M, K), "v": (A * M, K), "context_k": (T, K), "context_v": (T, K)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    x = [jax.random.normal(key, (B, *s, D), jnp.bfloat16) for key, s in zip(keys, shapes.values(), strict=True)]
    far = jnp.broadcast_to(jnp.arange(T) < 1 + 8 * jnp.arange(A)[:, None, None], (B, A, M, T))
    near = jnp.broadcast_to(jnp.tril(jnp.ones((M, M), bool)), (B, A, M, M))

    def results(function):
        value, pull = jax.vjp(lambda *x: function(*x, far, near), *x)
        return [value, *pull(jnp.ones_like(value))]

    try:
        found = results(function)
    except Exception as error:  # whatever a missing or old cuDNN raises: there is another way
        warn_of_cudnn("masked attention", error, "training")
        return False
    plain = results(functools.partial(rows_reference.blocks, scale=TRIAL_SCALE, softcap=None))
    same = all(bool(jnp.allclose(a, b, rtol=0.05, atol=0.05)) for a, b in zip(found, plain, strict=True))
    if not same:
        warn_of_cudnn("masked attention", "its results differ from those of plain products", "training")
    return same
