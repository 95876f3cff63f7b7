"""Writing keys and values into a paged pool, and moving an accepted path's entries together, in plain jnp.

XLA's scatter into a donated pool copies nothing, whatever the pool's size (`tests/kernels/test_kv_commit.py` reads that from
the compiled program), and `benchmarks/kernels/attention.py` times it beside the bytes that it must move.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Float, Int

Entries = tuple[Int[Array, "B A"], Int[Array, "B A"]]


def kv_write(
    k_pages: Float[Array, "P S K Dk"],
    v_pages: Float[Array, "P S K Dv"],
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
    k: Float[Array, "B T K Dk"],
    v: Float[Array, "B T K Dv"],
) -> tuple[Float[Array, "P S K Dk"], Float[Array, "P S K Dv"]]:
    """Writes T entries of every sequence at (page, slot), cast to the pool's type.

    Entries that belong nowhere name a scratch page; where several entries name one slot any of them may win. A page
    outside the pool drops its entry.
    """
    return (
        k_pages.at[page, slot].set(k.astype(k_pages.dtype), mode="drop"),
        v_pages.at[page, slot].set(v.astype(v_pages.dtype), mode="drop"),
    )


def kv_write_layers(
    pools: Sequence[Float[Array, "P S K D"]], target: Entries, entries: Float[Array, "B T n K D"]
) -> tuple[Float[Array, "P S K D"], ...]:
    """`kv_write` on several pools of one shape at once, entries[:, :, i] going to the i-th.

    Args:
      pools: of any number.
      target: (page, slot) of each entry; a page outside the pool drops its entry.
      entries: what is written, cast to the pools' type.
    """
    return tuple(p.at[target].set(entries[:, :, i].astype(p.dtype), mode="drop") for i, p in enumerate(pools))


def kv_compact(
    k_pages: Float[Array, "P S K Dk"], v_pages: Float[Array, "P S K Dv"], source: Entries, target: Entries
) -> tuple[Float[Array, "P S K Dk"], Float[Array, "P S K Dv"]]:
    """Copies the entries at `source` (page, slot) to `target`; all are read before any is written."""
    return kv_write(k_pages, v_pages, *target, k_pages[source], v_pages[source])


def kv_compact_layers(
    pools: Sequence[Float[Array, "P S _ _"]], source: Entries, target: Entries
) -> tuple[Float[Array, "P S _ _"], ...]:
    """`kv_compact` on the key and value pools of every layer at once.

    Sequences may share scratch pages only: what one sequence's entries write, no other's may read.

    Args:
      pools: any number of pools of one number of pages.
      source, target: (page, slot) of each entry before and after.
    """
    return tuple(p.at[target].set(p[source], mode="drop") for p in pools)
