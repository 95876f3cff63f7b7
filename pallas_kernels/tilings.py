"""Block sizes of the attention kernels: one frozen record each, chosen from measurements (`benchmarks/kernels/README.md`)."""

from __future__ import annotations

import dataclasses

MULTIPROCESSORS = 132  # of an H100 or H200; other chips have about as many
LONGEST_SPLIT = 4096  # Triton: a table may be mostly empty, and then long splits leave multiprocessors idle
SHORT = 1024  # slots that one program of many reads sooner than several can be merged
PREFILL = 1024  # rows from which row tiles alone fill the chip


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a kernel cuts its work. Warps and stages change only the speed, the rest may also change a result's last bit.

    Attributes:
      split: Triton: slots per split, a multiple of `block`; boundaries lie at its multiples whatever the length. 0: one split.
      block: slots per step of a program, a multiple of 32 (Mosaic: of 64).
      rows: most query rows (token, head of the group) of a program (Mosaic: 64 per warpgroup).
      num_warps: warps of a Triton program.
      num_stages: depth of the pipeline of loads.
      readers: Mosaic: warpgroups of a program that take turns with the blocks, 1 or 2.
      cluster: Mosaic: programs that take turns with the blocks and add their sums up, a power of two.
      splits: Mosaic: clusters (or programs) that take turns with the blocks; the sums of several are merged by a second kernel.
    """

    split: int
    block: int = 64
    rows: int = 64
    num_warps: int = 4
    num_stages: int = 3
    readers: int = 1
    cluster: int = 1
    splits: int = 1

    def __post_init__(self):
        if self.block % 32 or self.split % self.block:
            raise ValueError(f"{self}: block must be a multiple of 32 and split one of block")
        if self.readers not in (1, 2) or self.cluster not in (1, 2, 4, 8, 16):
            raise ValueError(f"{self}: readers must be 1 or 2 and cluster 1, 2, 4, 8 or 16")
        if self.splits < 1:
            raise ValueError(f"{self}: splits must be at least 1")
        if self.readers * self.cluster > 1 and self.rows > 64:
            raise ValueError(f"{self}: readers and clusters work on at most 64 rows a program")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a tiling is chosen by; all of it static.

    Attributes:
      rows: query rows per kv head, T * G.
      head_dim, value_dim: channels of a key and of a value head.
      itemsize: bytes of a cached number.
      num_slots: slots of a sequence's page table, the most that it can hold.
      groups: sequences times kv heads, B * K.
    """

    rows: int
    head_dim: int
    value_dim: int
    itemsize: int
    num_slots: int
    groups: int

    @property
    def width(self) -> int:
        """How often keys and values of heads of 128 go into those of one slot: 1, 2 or 4, rounded up."""
        return next((w for w in (1, 2) if self.head_dim + self.value_dim <= 256 * w), 4)

    @property
    def short(self) -> bool:
        """Whether one split serves best: a second kernel that merges costs as much as reading a few hundred slots."""
        return self.num_slots <= SHORT or (self.num_slots <= 2 * SHORT and self.groups >= MULTIPROCESSORS // 2)

    def split(self, tile_rows: int) -> int:
        """Slots per split with which programs of `tile_rows` rows, one per multiprocessor, read the whole table at once."""
        programs = self.groups * -(-self.rows // tile_rows)
        least = max(1, -(-self.num_slots * programs // MULTIPROCESSORS))
        return min(max(256, 1 << (least - 1).bit_length()), LONGEST_SPLIT)

    def splits(self, tile_rows: int) -> int:
        """Splits of 256 slots or more with which programs of `tile_rows` rows, one per multiprocessor, fill the chip."""
        fitting = MULTIPROCESSORS // (self.groups * -(-self.rows // tile_rows))
        return max(1, min(fitting, self.num_slots // 256))


def triton_tiling(problem: Problem) -> Tiling:
    """The Triton kernel's tiling."""
    if problem.itemsize == 4:  # exact float32 products run outside the tensor cores and want few rows
        return Tiling(0 if problem.short else 512, 32, rows=16, num_warps=4, num_stages=2)
    if problem.rows > PREFILL:  # a prefill chunk: a split would only write partial sums
        return Tiling(0, max(32, 64 // problem.width), rows=64, num_warps=4, num_stages=2)
    if problem.short:  # few programs: their number and the length of a step decide, not how often keys are read
        if problem.groups * -(-problem.rows // 16) <= MULTIPROCESSORS // 4:  # so few that splits pay although they are merged
            return Tiling(128, 128 // problem.width, rows=16, num_warps=4, num_stages=2)
        fitting = (r for r in (16, 32) if problem.groups * -(-problem.rows // r) <= MULTIPROCESSORS)
        rows = next(fitting, 64)
        block = 128 if rows < 64 else 64
        return Tiling(0, max(32, block // problem.width), rows=rows, num_warps=4, num_stages=3)
    if problem.rows <= 16:  # steps of 128 slots, two of them ahead of the one at work: 128 KB in flight
        return Tiling(problem.split(16), 128 // problem.width, rows=16, num_warps=4, num_stages=3)
    return Tiling(problem.split(64), max(32, 64 // problem.width), rows=64, num_warps=4, num_stages=3)


MOST_SLOTS = 16384  # Mosaic: of a split where the pieces alone fill the chip
MOST_PEERS = 2
"""Programs of a cluster. With eight, which leave nothing to merge, 8k and 32k at batch 1 took 20 and 63 us (splits: 16.1 and
40.4): half of the multiprocessors read, and heads that share a page no longer read it together."""


def prefers_triton(problem: Problem) -> bool:
    """Whether Triton's products of 16 rows are ahead of Mosaic's of 64, where both serve.

    On short tables for few programs (512 slots, eight heads: 16 tokens 7.1 us against Mosaic's 9.0, 64 tokens 10.7 against
    9.2) and for at most 16 rows; on long tables for 16 rows, too, while Mosaic would have to merge splits (8k: 15.0 us against
    15.9 for one token; 8k x 8, where it has not to: 71.6 against 69.4).
    """
    if problem.rows > 16:
        return problem.short and problem.groups * -(-problem.rows // 64) <= MULTIPROCESSORS // 8
    return problem.short or mosaic_tiling(problem).splits > 1


def mosaic_tiling(problem: Problem) -> Tiling:
    """The Mosaic kernel's tiling.

    More pieces of 64 rows than multiprocessors: no split, two warpgroups share keys and values. About half as many: the blocks
    of the same rows are dealt out among two warpgroups a program and the programs of a cluster, all in one kernel. Fewer: among
    two warpgroups a program and splits, merged by a second kernel; of many rows two warpgroups share what they read. Two
    stages each: three are in flight sooner and arrive no sooner (72.5 us against 68.6 for 16 rows at 8k x 8).
    """
    pieces = problem.groups * -(-problem.rows // 64)
    shared = problem.width == 1
    if problem.rows > PREFILL or pieces > MULTIPROCESSORS:
        splits = 1 if problem.rows > PREFILL else -(-problem.num_slots // MOST_SLOTS)
        stages = 3 if shared and problem.rows <= PREFILL else 2
        return Tiling(0, 64, rows=128 if shared else 64, num_stages=stages, splits=splits)
    readers, cluster = 2 if shared else 1, 1
    while (
        cluster < MOST_PEERS
        and 2 * cluster * pieces <= MULTIPROCESSORS
        and 2 * cluster * readers * 64 <= problem.num_slots  # a block each
        and problem.value_dim % (64 * cluster) == 0  # whole lines of 128 bytes each
    ):
        cluster *= 2
    if cluster * pieces >= MULTIPROCESSORS // 2 or problem.num_slots <= SHORT:
        return Tiling(0, 64, rows=64, num_stages=2, readers=readers, cluster=cluster)
    if shared and problem.rows >= 128:
        return Tiling(0, 64, rows=128, num_stages=3, splits=problem.splits(128))
    return Tiling(0, 64, rows=64, num_stages=2, readers=readers, splits=problem.splits(64))


NORM_ROWS = 17
"""Rows from which a sum of parts with the norm behind it is a kernel. One program a row: few of them read parts too slowly (4.1
us for 8 parts of two rows; a sum inside XLA's product costs less)."""
MOST_PARTS = 8
PARTS_ROWS = 16  # rows of a product up to which its parts are summed by the kernel behind it


def product_parts(rows: int, inputs: int, outputs: int) -> int:
    """Into how many partial sums a skinny product is cut along its inputs, for a kernel behind it that adds them up.

    XLA cuts such products itself, so that all multiprocessors read weights, and adds the parts in a kernel of its own.
    Enough parts for about four programs of 64 columns a multiprocessor; 1: the product is left to XLA.
    """
    if rows > PARTS_ROWS:
        return 1
    parts = MOST_PARTS
    while parts > 1 and (inputs % parts or inputs // parts < 256 or outputs // 64 * parts > 4 * MULTIPROCESSORS):
        parts //= 2
    return parts
