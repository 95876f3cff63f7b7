"""Which blocks of which prompts stand in which prefill program."""

from __future__ import annotations

from typing import Protocol

from jaxspec.engine.messages import Block, Limits, Prefill


class Filling(Protocol):
    """A row whose prompt is being taken in: `launched` of `fill` positions are launched, `known` are committed."""

    index: int
    fill: int
    launched: int
    known: int


def choose_size(blocks: int, sizes: tuple[int, ...], most: int) -> int:
    """Blocks of the program for a queue of `blocks`: all of them if at most a third of it is padding, else the largest
    program that they fill. `most` bounds it, but for the smallest size."""
    for size in sizes:
        if size >= blocks:
            if size <= most and 3 * (size - blocks) <= size:
                return size
            break
    return max((size for size in sizes if size <= min(blocks, most)), default=sizes[0])


def pack_prefill(rows: list[Filling], limits: Limits, budget: int, allow_long: bool) -> tuple[Prefill, ...]:
    """Prefill programs of a pass for `rows` in this order, with at most `budget` positions, padding included, but at least
    one program. Moves the rows' `launched`. `allow_long`: nobody waits for it, so a program may take in a long prompt alone."""
    programs = []
    for row in rows if allow_long else ():
        while long := _long(row, limits, budget if programs else max(budget, *limits.long_sizes, 0)):
            programs.append(long)
            budget -= long.size
    left = budget // limits.block
    while not programs or left >= limits.prefill_sizes[0]:
        blocks = _waiting(rows, limits, max(left, 1))
        if not blocks:
            break
        size = choose_size(len(blocks), limits.prefill_sizes, left)
        taken = blocks[:size]
        for row, count in taken:
            row.launched += count
        starts = _starts(taken)
        placed = (Block(row.index, start, count) for (row, count), start in zip(taken, starts, strict=True))
        programs.append(Prefill(tuple(placed), size))
        left -= size
    return tuple(programs)


def _long(row: Filling, limits: Limits, most: int) -> Prefill | None:
    """A program that takes in much of a long prompt as one row, if at most a third is padding: its beginning, or with
    `long_anywhere` any part. Of at most `most` positions."""
    start = row.launched
    remaining = row.fill - start
    if (start and not limits.long_anywhere) or remaining <= limits.prefill_sizes[-1] * limits.block:
        return None
    sizes = [size for size in limits.long_sizes if size <= most]
    fitting = [size for size in sizes if size <= remaining]
    above = next((size for size in sizes if size >= remaining), None)
    if above is not None and 3 * (above - remaining) <= above:
        size = above
    elif fitting:
        size = fitting[-1]
    else:
        return None
    count = min(size, remaining)
    row.launched = start + count
    return Prefill((Block(row.index, start, count),), size, long=True)


def _waiting(rows: list[Filling], limits: Limits, most: int) -> list[tuple[Filling, int]]:
    """Up to `most` blocks (row, positions) that may stand in one program, in order."""
    most = min(most, limits.prefill_sizes[-1])
    blocks, ends = [], 0
    for row in rows:
        at = row.launched
        while at < row.fill and len(blocks) < most:
            count = min(limits.block, row.fill - at)
            at += count
            if at == row.fill:
                if ends == limits.max_ends:
                    break
                ends += 1
            blocks.append((row, count))
            if not limits.separate_blocks:
                break
    return blocks


def _starts(taken: list[tuple[Filling, int]]) -> list[int]:
    """First positions of blocks whose rows' `launched` stands behind them."""
    behind = {id(row): row.launched for row, _ in taken}
    starts = []
    for row, count in reversed(taken):
        behind[id(row)] -= count
        starts.append(behind[id(row)])
    return starts[::-1]
