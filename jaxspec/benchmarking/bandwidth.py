"""What the memory of the default device does: the ceilings that a round is measured against."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

GPU_BYTES, CPU_BYTES = 4 << 30, 64 << 20


class Bandwidth(NamedTuple):
    """TB/s (10^12 bytes a second): copying (bytes read and written), and reading alone."""

    copy: float
    read: float


def _median_seconds(function, argument, repeats: int, calls: int) -> float:
    jax.block_until_ready(function(argument))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            out = function(argument)
        jax.block_until_ready(out)
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds)


def measure_bandwidth(size: int | None = None, repeats: int = 5, calls: int = 8) -> Bandwidth:
    """Medians over repeats of a copy with + 1 and of a sum.

    Args:
      size: bytes of the array that is read; None takes 4 GiB on an accelerator (far beyond its cache), 64 MiB on a CPU.
      repeats, calls: medians of `repeats` batches of `calls` calls each.
    """
    if size is None:
        size = CPU_BYTES if jax.default_backend() == "cpu" else GPU_BYTES
    words = jax.jit(lambda key: jax.random.bits(key, (size // 4,), jnp.uint32))(jax.random.key(0))
    copy = _median_seconds(jax.jit(lambda x: x + 1), words, repeats, calls)
    read = _median_seconds(jax.jit(jnp.sum), words, repeats, calls)
    return Bandwidth(2 * words.nbytes / copy / 1e12, words.nbytes / read / 1e12)
