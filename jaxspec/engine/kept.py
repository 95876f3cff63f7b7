"""Pools and programs that outlive a call: kept for each `ModelParams` as long as it lives, lent to one call at a time."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxspec.config import ConfigError
from jaxspec.engine.memory import Memory
from jaxspec.kvcache import pages_for
from jaxspec.round import Program
from jaxspec.runtime import PoolTooLarge

MOST_KEPT = 6
"""Pools that a model keeps; the one whose last use is longest ago goes first."""
POSITIONS = 1 << 14
"""Positions of a pool that nobody asked for more of: a short prompt now and a long one later share its programs."""
POOL_BYTES = {"cpu": 1 << 28, "gpu": 1 << 32}
"""What such a pool may take where `POSITIONS` would take more."""
LEAST_POSITIONS = 1 << 10

_LOCK = threading.Lock()
_KEPT: weakref.WeakKeyDictionary[Any, list[Memory]] = weakref.WeakKeyDictionary()


def forget() -> None:
    """Drops everything that is kept and not lent."""
    with _LOCK:
        _KEPT.clear()


def everything() -> list[Memory]:
    """What is kept and not lent."""
    with _LOCK:
        return [memory for kept in _KEPT.values() for memory in kept]


def usual_positions(program: Program, dtype: Any) -> int:
    """Positions of the target's pool unless a call needs more, a power of two."""
    c = program.config
    each = c.num_layers * c.num_kv_heads * (c.key_head_dim + c.value_head_dim) * np.dtype(dtype).itemsize
    budget = POOL_BYTES["cpu" if jax.default_backend() == "cpu" else "gpu"]
    return max(LEAST_POSITIONS, min(POSITIONS, 1 << ((budget // each).bit_length() - 1 if each <= budget else 0)))


@contextlib.contextmanager
def lent(params: Any, draft_tree: Any, program: Program, *, page_size: int, pages: int) -> Iterator[Memory]:
    """A `Memory` with at least `pages` pages for one caller, who has it alone; it is kept for the next one.

    A caller inside another's block (two streams by turns) gets one of his own.

    Args:
      params: the target's `ModelParams`.
      draft_tree: the drafter's parameters.
      program: the static half of the programs.
      page_size: slots a page.
      pages: that the call needs at most.

    Raises:
      PoolTooLarge: it does not fit, even with nothing else kept.
    """
    tree = params.tree
    wanted = (program, page_size)
    with _LOCK:
        kept = _KEPT.setdefault(params, [])
        same = [m for m in kept if (m.program, m.page_size) == wanted and m.tree is tree]
        found = next((m for m in same if m.num_pages > pages), None)
        for memory in [found] if found is not None else same:  # one that is too small makes room
            kept.remove(memory)
        if found is None:
            del kept[: max(len(kept) - MOST_KEPT + 1, 0)]
    if found is None:
        least = pages_for(usual_positions(program, tree["embedder"]["embedding"].dtype), page_size)
        size = {"page_size": page_size, "num_pages": 1 + max(least, 1 << (pages - 1).bit_length())}
        try:
            found = Memory(tree, draft_tree, program, **size)
        except PoolTooLarge:
            with _LOCK:
                kept.clear()
            found = Memory(tree, draft_tree, program, **{**size, "num_pages": 1 + pages})
    else:
        found.use(draft_tree)
    sound = True
    try:
        yield found
    except ConfigError:
        raise
    except Exception:
        sound = False  # what it holds may be gone with the launch that failed
        raise
    finally:
        if sound:
            with _LOCK:
                kept.append(found)
