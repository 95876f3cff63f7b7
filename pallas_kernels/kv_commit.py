"""Writing keys and values into a paged pool, and moving an accepted path's entries together: in place when donated.

Plain jnp: XLA's scatter into a donated pool copies nothing, whatever the pool's size (`tests/kernels/test_kv_commit.py`
reads that from the compiled program), and `benchmarks/kernels/attention.py` times it beside the bytes that it must move.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int


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


def kv_compact(
    k_pages: Float[Array, "P S K Dk"],
    v_pages: Float[Array, "P S K Dv"],
    source: tuple[Int[Array, "B A"], Int[Array, "B A"]],
    target: tuple[Int[Array, "B A"], Int[Array, "B A"]],
) -> tuple[Float[Array, "P S K Dk"], Float[Array, "P S K Dv"]]:
    """Copies the entries at `source` (page, slot) to `target`; all are read before any is written."""
    return kv_write(k_pages, v_pages, *target, k_pages[source], v_pages[source])
