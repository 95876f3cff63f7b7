"""The paged KV cache: pools of pages per layer, page tables per sequence, writes and compaction in place.

Committed position p of a sequence lies in slot p % S of page ``page_table[b, p // S]``. Page 0 is scratch: table entries
that were not granted name it, and nothing that is read from it counts. What belongs to no sequence is not written at all.
Pages are granted and freed by the host between programs (`engine.pages`), never inside one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pytree import pytree
from pallas_kernels import kv_compact_layers, kv_write, kv_write_layers

SCRATCH_PAGE = 0
NOWHERE = 2**31 - 1
"""A page outside every pool: writes to it are dropped. (Were they sent to one scratch word, thousands of padded rows would
queue for it: 10 s for a batch whose real rows take 14 ms on an H200.)"""


class LayerKV(NamedTuple):
    """One layer's pool: keys [P, S, K, Dk] and values [P, S, K, Dv]."""

    k: Float[Array, "P S K Dk"]
    v: Float[Array, "P S K Dv"]


class Slots(NamedTuple):
    """Where T entries of every sequence are written: page and slot, `NOWHERE` for entries that belong nowhere."""

    page: Int[Array, "B T"]
    slot: Int[Array, "B T"]


@pytree()
class PagedKVCache:
    """A model's cache. One array per layer, never stacked (a scan over stacked pools would copy them).

    Attributes:
      layers: one `LayerKV` per layer.
      page_table: pages of every sequence, in order; entries that were not granted are page 0.
      length: committed tokens; the bonus token, whose KV is not yet written, is not counted.
    """

    layers: tuple[LayerKV, ...]
    page_table: Int[Array, "B N"]
    length: Int[Array, " B"]

    @property
    def page_size(self) -> int:
        """S: positions per page."""
        return self.layers[0].k.shape[1]


def init_layers(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype
) -> tuple[LayerKV, ...]:
    """Zeroed pools: `jnp.empty` may hold NaN, and a masked NaN is still a NaN after a product with 0."""
    shape = (num_pages, page_size, num_kv_heads)
    return tuple(LayerKV(jnp.zeros((*shape, key_dim), dtype), jnp.zeros((*shape, value_dim), dtype)) for _ in range(num_layers))


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` positions take."""
    return -(-tokens // page_size)


def find_slots(page_table: Int[Array, "B N"], page_size: int, index: Int[Array, "B T"], valid: Bool[Array, "B T"]) -> Slots:
    """Page and slot of each position in `index`; `NOWHERE` for invalid entries and positions past what the table holds."""
    column = index // page_size
    inside = valid & (index >= 0) & (column < page_table.shape[1])
    page = jnp.take_along_axis(page_table, jnp.clip(column, 0, page_table.shape[1] - 1), 1)
    inside &= page != SCRATCH_PAGE
    return Slots(jnp.where(inside, page, NOWHERE), jnp.where(inside, index % page_size, 0))


def write(layer: LayerKV, slots: Slots, k: Float[Array, "B T K Dk"], v: Float[Array, "B T K Dv"]) -> LayerKV:
    """Writes new keys and values; in place when the pool is donated."""
    return LayerKV(*kv_write(layer.k, layer.v, slots.page, slots.slot, k, v))


def write_layers(layers: tuple[LayerKV, ...], slots: Slots, heads: Float[Array, "B T layers 2 K D"]) -> tuple[LayerKV, ...]:
    """Writes keys and values of several layers at the same slots."""
    entries = heads.reshape(*heads.shape[:2], -1, *heads.shape[4:])
    pools = kv_write_layers([pool for layer in layers for pool in layer], slots, entries)
    return tuple(map(LayerKV, pools[::2], pools[1::2]))


def compact(
    layers: tuple[LayerKV, ...],
    page_table: Int[Array, "B N"],
    base: Int[Array, " B"],
    path: Int[Array, "B A"],
    count: Int[Array, " B"],
) -> tuple[LayerKV, ...]:
    """Moves the KV of an accepted path to the front of the window: slot base + path[i] to base + i for i < count.

    A path's indices rise, so path[i] >= i; all sources are read before any is written.
    """
    size = layers[0].k.shape[1]
    order = jnp.arange(path.shape[1])[None]
    used = (order < count[:, None]) & (path >= 0)
    source = find_slots(page_table, size, base[:, None] + path, used)
    target = find_slots(page_table, size, base[:, None] + order, used)
    moved = kv_compact_layers([pool for layer in layers for pool in layer], source, target)
    return tuple(map(LayerKV, moved[::2], moved[1::2]))


def is_pool(node: Any) -> bool:
    """Whether a node of a state is a page pool: it has no batch axis and all rows share it. Everything else is rows."""
    return isinstance(node, LayerKV)


def take_rows(state: Any, rows: Int[Array, " R"]) -> Any:
    """The state of some rows, in this order; pools stay whole."""
    return jax.tree.map(lambda x: x if is_pool(x) else x[rows], state, is_leaf=is_pool)


def put_rows(state: Any, rows: Int[Array, " R"], part: Any) -> Any:
    """The state with `part`, a state of R rows, at `rows`, and with `part`'s pools; a row outside the batch is dropped.

    Every row looks for what it becomes: XLA fuses that over all leaves, where scatters would be a kernel each.
    """
    batch = next(x.shape[0] for x in jax.tree.leaves(state, is_leaf=is_pool) if not is_pool(x))
    match = rows[None] == jnp.arange(batch)[:, None]
    taken, source = match.any(1), jnp.argmax(match, 1)

    def put(x, y):
        return y if is_pool(x) else jnp.where(taken.reshape(-1, *(1,) * (x.ndim - 1)), y[source], x)

    return jax.tree.map(put, state, part, is_leaf=is_pool)


def split(state: Any) -> tuple[tuple[LayerKV, ...], Any]:
    """The pools of a state, and its rows: the same structure with empty pools in their places."""
    leaves, structure = jax.tree.flatten(state, is_leaf=is_pool)
    rows = structure.unflatten([LayerKV(None, None) if is_pool(x) else x for x in leaves])
    return tuple(x for x in leaves if is_pool(x)), rows


def join(pools: tuple[LayerKV, ...], rows: Any) -> Any:
    """The inverse of `split`."""
    left = iter(pools)
    return jax.tree.map(lambda x: next(left) if is_pool(x) else x, rows, is_leaf=is_pool)
