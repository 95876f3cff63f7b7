"""Numbers and arrays of any library as Python's and NumPy's, where a caller hands them in."""

from __future__ import annotations

from typing import Any

import numpy as np

PYTHONS = {int, float, str, bool, dict, type(None)}


def plain(value: Any) -> Any:
    """A value whose numbers are Python's and whose arrays are NumPy's.

    Arrays of jax and torch, and of whatever else NumPy can read, become NumPy arrays; scalars and arrays without a dimension
    become numbers. Lists and tuples are looked through; everything else stays as it is.
    """
    if isinstance(value, list | tuple):
        if PYTHONS.issuperset(map(type, value)):
            return value
        return [*map(plain, value)] if isinstance(value, list) else (*map(plain, value),)
    if isinstance(value, np.generic):
        return value.item()
    if not hasattr(value, "__array__"):
        return value
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array
