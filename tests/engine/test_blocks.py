"""Which prompts share a prefill program, and when prefill has its turn."""

from __future__ import annotations

import pytest

from jaxspec.engine.blocks import choose_size, pack_prefill
from jaxspec.engine.messages import SchedulerConfig
from tests.engine.simulation import make_limits, make_request, simulate, tokens

SIZES = (1, 2, 4, 8, 16, 64)


class Filling:
    def __init__(self, index, fill, launched=0):
        self.index, self.fill, self.launched, self.known = index, fill, launched, launched


def sizes_of(programs):
    return [program.size for program in programs]


@pytest.mark.parametrize(
    "blocks, sizes", [(1, [1]), (3, [4]), (5, [4, 1]), (12, [16]), (24, [16, 8]), (55, [64]), (65, [64, 1])]
)
def test_at_most_a_third_of_a_prefill_program_is_padding(blocks, sizes):
    limits = make_limits(prefill_sizes=SIZES, block=8)
    row = Filling(0, 8 * blocks - 3)
    programs = pack_prefill([row], limits, 2**20, allow_long=False)
    assert sizes_of(programs) == sizes and row.launched == row.fill
    placed = [block for program in programs for block in program.blocks]
    assert [block.start for block in placed] == [8 * at for at in range(blocks)] and placed[-1].count == 5


def test_the_budget_counts_padding():
    assert choose_size(12, SIZES, 12) == 8 and choose_size(12, SIZES, 16) == 16
    row = Filling(0, 8 * 12)
    assert sizes_of(pack_prefill([row], make_limits(prefill_sizes=SIZES, block=8), 96, False)) == [8, 4]
    row = Filling(0, 80)
    assert sizes_of(pack_prefill([row], make_limits(prefill_sizes=SIZES, block=8), 1, False)) == [1]


def test_rows_share_a_program_in_order():
    rows = [Filling(3, 20), Filling(1, 5)]
    (program,) = pack_prefill(rows, make_limits(prefill_sizes=SIZES, block=8), 512, False)
    assert [(block.row, block.start, block.count) for block in program.blocks] == [(3, 0, 8), (3, 8, 8), (3, 16, 4), (1, 0, 5)]


def test_one_block_a_row_where_blocks_are_not_separate():
    rows = [Filling(0, 20), Filling(1, 5)]
    programs = pack_prefill(rows, make_limits(prefill_sizes=SIZES, block=8, separate_blocks=False), 512, False)
    assert [[block.row for block in program.blocks] for program in programs] == [[0, 1], [0], [0]]


def test_few_prompts_end_in_one_program():
    rows = [Filling(at, 5) for at in range(5)]
    programs = pack_prefill(rows, make_limits(prefill_sizes=SIZES, block=8, max_ends=2), 512, False)
    assert [len(program.blocks) for program in programs] == [2, 2, 1]


@pytest.mark.parametrize(
    "fill, launched, allowed, first",
    [
        (900, 0, True, 1024),
        (400, 0, True, 512),
        (300, 0, True, None),
        (9000, 0, True, 1024),
        (900, 8, True, None),
        (900, 0, False, None),
    ],
)
def test_a_long_prompt_has_programs_of_its_own(fill, launched, allowed, first):
    limits = make_limits(prefill_sizes=(1, 2, 4), block=64, long_sizes=(512, 1024), max_len=16384, total_pages=9999)
    programs = pack_prefill([Filling(0, fill, launched)], limits, 8192, allowed)
    assert programs[0].long == (first is not None)
    if first:
        assert programs[0].size == first and len(programs[0].blocks) == 1 and programs[0].blocks[0].count == min(fill, first)


def test_short_prompts_pass_a_long_one():
    """The short prompt waits for at most one chunk of the long one, which goes on in every other pass."""
    config = SchedulerConfig(prefill_budget=32)
    sim = simulate(config, prefill_sizes=(1, 2), block=16, total_pages=400)
    sim.submit(make_request("decodes", [1, 2], 100))
    sim.step()
    sim.submit(make_request("long", tokens(300), 5))
    sim.step()
    sim.submit(make_request("short", tokens(20, 7), 5), make_request("other", tokens(30, 9), 5))
    for _ in range(4):
        sim.step()
    heads = [launch.prefills[0].blocks[0].row for launch in sim.device.launches if launch.prefills]
    rows = {row.job.request.rid: row.index for row in sim.core.scheduler.rows if row is not None}
    assert heads[1:5].count(rows["long"]) >= 2 and rows["short"] in heads[1:4]
    sim.drain()
    sim.settle()


def test_decode_launches_lie_between_prefills():
    sim = simulate(SchedulerConfig(prefill_budget=16, prefill_decode_interval=3), max_accept=1, slack=1)
    sim.submit(make_request("decodes", [1, 2], 100))
    sim.step()
    sim.submit(make_request("next", tokens(64), 5))
    for _ in range(12):
        sim.step()
    passes = [bool(launch.prefills) for launch in sim.device.launches[1:]]
    assert passes[passes.index(True) :][:7] == [True, False, False, True, False, False, True]
