"""Blocks of kernels for Pallas' Triton back end that index their arrays themselves."""

from __future__ import annotations

from typing import Any

from jax.experimental import pallas as pl


def whole(x: Any) -> pl.BlockSpec:
    """All of an array, for every program."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))
