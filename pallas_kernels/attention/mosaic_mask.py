"""Which slots of a block are seen, inside tree attention for Pallas' Mosaic GPU back end."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool

from pallas_kernels.attention.inflight import WORD
from pallas_kernels.attention.mosaic_merge import WARPGROUP_ROWS, divide, over


@dataclasses.dataclass(frozen=True)
class Mask:
    """What the 64 rows of a warpgroup see: the prefix, within its window and sinks, and the bits of what is in flight.

    Attributes:
      words: reference [B, A, rows], a bit for each slot in flight, from the word of the prefix's end on.
      used: reference [B, A], what any row sees.
      b, rows: the sequence, and the rows' place.
      length: of the prefix.
      position: of each row; None without a window.
      lowest: the first position that any row sees through its window.
      window, sink: None for no window, and how many first slots are seen all the same.
      block: slots of a block.
    """

    words: Any
    used: Any
    b: Any
    rows: pl.Slice
    length: Any
    position: Any
    lowest: Any
    window: int | None
    sink: int
    block: int

    def indices(self, first) -> list:
        """Where the words of the block that begins at slot `first` stand; some may lie outside."""
        base = divide(first, WORD) - divide(self.length, WORD)
        return [base + w for w in range(self.block // WORD)]

    def words_of_rows(self, indices: list) -> list:
        """Those words for each row, 0 outside."""
        found = []
        for index in indices:
            at, exists = self._at(index)
            word = plgpu.load(self.words.at[self.b, at, self.rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            found.append(word & jnp.where(exists, -1, 0))
        return found

    def by_row(self, first, words: list) -> Bool[Array, "R block"]:
        """Which slots each row sees."""
        column = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS, self.block), 1, layout=plgpu.Layout.WGMMA)
        seen = _bit([over(word, self.block) for word in words], column)
        prefix = column < self.length - first
        if self.window is not None:
            near = over(self.position, self.block) - column < self.window + first
            prefix = prefix & (near | (column < self.sink - first))
        return prefix | seen  # no bit is set for a slot of the prefix

    def by_any(self, first, indices: list, channels: int) -> Bool[Array, "block channels"]:
        """Which slots any row sees, for all channels of a value."""
        shape = (self.block, channels)
        slot = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        words = []
        for index in indices:
            at, exists = self._at(index)
            word = jnp.where(exists, self.used[self.b, at], 0)
            words.append(plgpu.layout_cast(jnp.full(shape, word, jnp.int32), plgpu.Layout.WGMMA))
        seen = _bit(words, slot)
        prefix = slot < self.length - first
        if self.window is not None:
            prefix = prefix & ((slot >= self.lowest - first) | (slot < self.sink - first))
        return prefix | seen

    def _at(self, index):
        """(a place that exists, whether it is the one asked for)."""
        count = self.words.shape[1]
        return jnp.minimum(jnp.maximum(index, 0), count - 1), (index >= 0) & (index < count)


def _bit(words: list, place) -> Bool[Array, "..."]:
    """Bit number `place` of words that follow each other."""
    bits = words[0]
    for w, word in enumerate(words[1:], 1):
        bits = jnp.where(place < w * WORD, bits, word)
    return (lax.shift_right_logical(bits, place & (WORD - 1)) & 1) != 0
