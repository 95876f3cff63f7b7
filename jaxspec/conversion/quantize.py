"""Eight-bit storage: a large parameter as int8 with one scale per channel, turned back into floats when it is read.

A stored parameter ``…/kernel`` becomes the pair ``…/kernel/q`` and ``…/kernel/scale``; its value is their product. Only what
lies on disk changes: `jaxspec.conversion.store.load` returns floating arrays, so that no other code knows of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import ml_dtypes
import numpy as np

from jaxspec.conversion.mapping import FLOAT32_LEAVES, is_float
from jaxspec.files.errors import ConversionError

METHODS = ("int8",)
MIN_SIZE = 1024
"""Smaller parameters stay floating: their bytes do not count."""
ROW_LEAVES = frozenset({"embedding", "b"})
"""Parameters with a scale per row: looked-up tables, and LoRA's second factors, whose rows are few and long."""
LARGEST = 127


def is_quantized(path: str, shape: tuple[int, ...], dtype) -> bool:
    """Whether a parameter is stored as int8: floating, of two axes or more, and not small."""
    name = path.rsplit("/", 1)[-1]
    return is_float(dtype) and name not in FLOAT32_LEAVES and len(shape) >= 2 and int(np.prod(shape)) >= MIN_SIZE


def quantize(path: str, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds a parameter to int8 with one bfloat16 scale per output channel (`ROW_LEAVES`: per row).

    Scales are rounded up to bfloat16 first, so that storing them in two bytes adds no error: every value is off by at most
    half a scale, and a scale is at most 1/127 of its channel's largest value, plus 0.8 %.

    Args:
      path: its name, which says what it is and stands in error messages.
      array: [..., in, out], or [rows, width] for a table.

    Returns:
      q: int8 of the same shape; scale: bfloat16 with 1 in place of the axis that it covers.

    Raises:
      ConversionError: values that are not finite.
    """
    values = np.asarray(array, np.float32)
    if not np.isfinite(values).all():
        raise ConversionError(f"parameter {path} holds values that are not finite: it cannot be stored as int8")
    axis = -1 if path.rsplit("/", 1)[-1] in ROW_LEAVES else -2
    exact = np.abs(values).max(axis=axis, keepdims=True) / LARGEST
    scale = exact.astype(ml_dtypes.bfloat16)
    low = scale.astype(np.float32) < exact
    scale = np.where(low, scale.view(np.uint16) + low.astype(np.uint16), scale.view(np.uint16)).view(ml_dtypes.bfloat16)
    wide = scale.astype(np.float32)
    q = np.rint(np.divide(values, wide, out=np.zeros_like(values), where=wide > 0))
    return np.clip(q, -LARGEST, LARGEST).astype(np.int8), scale


def dequantize(q: np.ndarray, scale: np.ndarray, dtype=None) -> np.ndarray:
    """The product of both, exact in float32; `dtype` None for that."""
    values = q.astype(np.float32)
    values *= np.asarray(scale, np.float32)
    return values if dtype is None else values.astype(dtype)


def stored(parameters: Iterable[tuple[str, np.ndarray]], method: str | None) -> Iterator[list[tuple[str, np.ndarray]]]:
    """What to write for each parameter of a stream: itself, or the pair that stands for it.

    Raises ConversionError for an unknown method.
    """
    check_method(method)
    for path, array in parameters:
        if method is not None and is_quantized(path, array.shape, array.dtype):
            q, scale = quantize(path, array)
            yield [(f"{path}/q", q), (f"{path}/scale", scale)]
        else:
            yield [(path, array)]


def check_method(method: str | None) -> None:
    """Raises ConversionError unless `method` is None or one of `METHODS`."""
    if method is not None and method not in METHODS:
        raise ConversionError(f"quantize={method!r} is not known; known: {', '.join(METHODS)}, or None for floats")


def quantized_paths(stored_paths: Mapping[str, object]) -> list[str]:
    """The parameters that are stored as pairs."""
    return [path[: -len("/q")] for path in stored_paths if path.endswith("/q") and f"{path[:-2]}/scale" in stored_paths]
