"""Writing into a paged pool and compacting it, in place when it is donated: one kernel for all layers on GPUs that run it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Float

from pallas_kernels import device
from pallas_kernels.cache import reference, triton
from pallas_kernels.cache.reference import Entries, kv_compact, kv_write

__all__ = ["kv_compact", "kv_compact_layers", "kv_write", "kv_write_layers"]


def kv_write_layers(
    pools: Sequence[Float[Array, "P S K D"]], target: Entries, entries: Float[Array, "B T n K D"]
) -> tuple[Float[Array, "P S K D"], ...]:
    """`kv_write` on several pools of one shape at once; arguments and result are those of `reference.kv_write_layers`."""
    module = triton if device.runs_triton() and triton.serves(pools, entries) else reference
    return module.kv_write_layers(pools, target, entries)


def kv_compact_layers(
    pools: Sequence[Float[Array, "P S _ _"]], source: Entries, target: Entries
) -> tuple[Float[Array, "P S _ _"], ...]:
    """`kv_compact` on the pools of every layer at once; arguments and result are those of `reference.kv_compact_layers`."""
    module = triton if device.runs_triton() else reference
    return module.kv_compact_layers(pools, source, target)
