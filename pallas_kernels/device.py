"""Which GPU the kernels are chosen for: one place, which a compilation without a device may replace."""

from __future__ import annotations

import functools

import jax


@functools.cache
def capability() -> float | None:
    """Compute capability of the default device, None where it is no CUDA GPU."""
    if jax.default_backend() not in ("gpu", "cuda"):
        return None
    found = getattr(jax.devices()[0], "compute_capability", None)
    return float(found) if found else None


def on_gpu() -> bool:
    """Whether the default device is a CUDA GPU."""
    return capability() is not None


def runs_triton() -> bool:
    """Whether the default device runs our kernels for Pallas' Triton back end: CUDA GPUs from Ampere on."""
    return (capability() or 0) >= 8.0
