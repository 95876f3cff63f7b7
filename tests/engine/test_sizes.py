"""Sizes of tables and rows, and which blocks of prompts share a program: few programs, little padding."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.engine import sizes
from jaxspec.engine.blocks import choose_size, pack_prefill
from jaxspec.engine.messages import Limits

SIZES, LONG_SIZES = sizes.SIZES["gpu"], sizes.LONG_SIZES["gpu"]


@dataclasses.dataclass
class Filling:
    """A row whose prompt is being taken in."""

    index: int
    fill: int
    launched: int = 0
    known: int = 0


def limits(**changes) -> Limits:
    settings = dict(
        buckets=(1,),
        prefill_sizes=SIZES,
        block=64,
        long_sizes=LONG_SIZES,
        max_len=1 << 17,
        total_pages=1,
        page_size=16,
        max_accept=1,
        slack=1,
        key_lookahead=0,
        max_ends=sizes.ENDS,
    )
    return Limits(**{**settings, **changes})


@pytest.mark.parametrize(
    ("rows", "last"), [(1, 1), (2, 2), (3, 4), (5, 8), (33, 64), (64, 64), (65, 128), (128, 128), (129, 192), (1000, 1024)]
)
def test_tables_come_in_few_sizes(rows, last):
    buckets = sizes.buckets_for(rows)
    assert buckets[-1] == last >= rows
    assert list(buckets) == sorted(set(buckets))
    assert all(size < rows for size in buckets[:-1])


@pytest.mark.parametrize(
    ("positions", "context", "capacity"),
    [
        (9, 256, 256),
        (9, 4096, 2048),
        (2048, 4096, 2048),
        (2049, 4096, 4096),
        (2049, 1 << 20, 8192),
        (131072, 1 << 20, 131072),
        (600_000, 1 << 20, 1 << 20),
        (300, 256, 300),
    ],
)
def test_rows_have_room_in_few_sizes(positions, context, capacity):
    assert sizes.capacity_for(positions, context) == capacity


@given(st.integers(1, 200), st.integers(1, 200))
def test_a_program_is_at_most_a_third_padding(blocks, most):
    size = choose_size(blocks, SIZES, most)
    assert size in SIZES
    assert size <= most or size == SIZES[0]
    assert 3 * (size - min(size, blocks)) <= size or size == SIZES[0]
    assert size >= min(blocks, most) or size == max(s for s in SIZES if s <= min(blocks, most))


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=40),
    st.sampled_from([64, 512, 8192]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_prompts_are_taken_in_whole_with_little_padding(fills, budget, allow_long, separate, long, anywhere):
    """Pass after pass: every position once and in order, at most a third of what is launched is padded blocks."""
    bounds = limits(separate_blocks=separate, long_sizes=LONG_SIZES if long else (), long_anywhere=anywhere)
    rows = [Filling(i, n) for i, n in enumerate(fills)]
    at = [0] * len(rows)
    while waiting := [row for row in rows if row.launched < row.fill]:
        programs = pack_prefill(waiting, bounds, budget, allow_long)
        assert programs
        padded = sum(p.size if p.long else p.size * bounds.block for p in programs)
        smallest = bounds.long_sizes[-1] if programs[0].long else bounds.prefill_sizes[0] * bounds.block
        assert padded <= max(budget, smallest)
        for program in programs:
            ends = 0
            for block in program.blocks:
                assert block.start == at[block.row] and block.count > 0
                at[block.row] += block.count
                ends += at[block.row] == fills[block.row]
            assert ends <= bounds.max_ends
            if program.long:
                assert allow_long and long and (anywhere or program.blocks[0].start == 0)
                assert 3 * (program.size - program.blocks[0].count) <= program.size
                assert fills[program.blocks[0].row] - program.blocks[0].start > bounds.prefill_sizes[-1] * bounds.block
            else:
                smallest = program.size == bounds.prefill_sizes[0]  # what is read then are the weights, not the rows
                assert 3 * (program.size - len(program.blocks)) <= program.size or smallest
                assert all(block.count <= bounds.block for block in program.blocks)
                if not separate:
                    assert len({block.row for block in program.blocks}) == len(program.blocks)
        assert at == [row.launched for row in rows]
    assert at == fills
