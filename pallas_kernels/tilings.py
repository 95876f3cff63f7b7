"""Block sizes of the attention kernels: one frozen record each, chosen from a table that the benchmark regenerates."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a kernel cuts its work. `split` and `block` decide the order of additions, the rest only speed.

    Attributes:
      split: slots per split, a multiple of `block`; boundaries lie at its multiples whatever the length. 0: one split.
      block: slots per step of a program, a multiple of 32 (Mosaic: of 64).
      rows: most query rows (token, head of the group) of a program (Mosaic: 64 per warpgroup).
      num_warps: warps of a Triton program.
      num_stages: depth of the pipeline of loads.
    """

    split: int
    block: int = 64
    rows: int = 64
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self):
        if self.block % 32 or self.split % self.block:
            raise ValueError(f"{self}: block must be a multiple of 32 and split one of block")


def _wide(head_dim: int, value_dim: int) -> bool:
    return head_dim + value_dim > 256


def triton_tiling(rows: int, head_dim: int, value_dim: int, itemsize: int, num_slots: int) -> Tiling:
    """The Triton kernel's tiling for `rows` query rows per kv head, head sizes, bytes per element and table size."""
    if itemsize == 4:  # exact float32 products run outside the tensor cores and want few rows
        return Tiling(512, 32, rows=16, num_warps=4, num_stages=2)
    block = 32 if _wide(head_dim, value_dim) else 64
    if rows > 1024:  # a prefill chunk: row tiles fill the chip, a split would only write partial sums
        return Tiling(0, block, rows=64, num_warps=4, num_stages=2)
    return Tiling(512, block, rows=64, num_warps=4, num_stages=4 if block == 64 else 3)


def mosaic_tiling(rows: int, head_dim: int, value_dim: int, itemsize: int, num_slots: int) -> Tiling:
    """The Mosaic kernel's tiling; arguments as for `triton_tiling`."""
    del itemsize, num_slots
    wide = _wide(head_dim, value_dim)
    if rows > 1024:
        return Tiling(0, 64, rows=64 if wide else 128, num_stages=2)
    return Tiling(512, 64, rows=64 if rows <= 64 or wide else 128, num_stages=2 if wide else 3)
