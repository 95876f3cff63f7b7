import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.engine import blocks, core, messages, pages, prefix, scheduler
from jaxspec.engine.blocks import choose_size, pack_prefill
from jaxspec.engine.core import Core
from jaxspec.engine.messages import QueueFull, SchedulerConfig
from jaxspec.engine.scheduler import SHRINK_AFTER
from jaxspec.sampling_params import SamplingParams, sampling_class
from tests.engine.fake_device import text_of
from tests.engine.simulation import DEFAULT, Simulation, make_limits, make_request

SIZES = (1, 2, 4, 8, 16, 64)
CLOSED = SchedulerConfig(rounds_per_launch=2**30, prefix_cache=False, grant_all=True)


def tokens(count, first=0):
    return (np.arange(count, dtype=np.int32) + first) % 61


def simulate(config=DEFAULT, **limits):
    sim = Simulation(make_limits(**limits), config, stall=0.0, most_delay=0)
    sim.keep_deltas = True
    sim.device.launches = []
    return sim


def outputs(sim, *rids):
    return [[token for delta in sim.deltas[rid] for token in delta.tokens] for rid in rids]


def running(sim):
    return [row.job.request.rid for row in sim.core.scheduler.rows if row is not None]


# Messages.


@pytest.mark.parametrize(
    "sampling, kind",
    [
        (SamplingParams(), "greedy"),
        (SamplingParams(temperature=1.0, top_k=1), "greedy"),
        (SamplingParams(temperature=1.0), "sampled"),
        (SamplingParams(repetition_penalty=1.1), "full"),
        (SamplingParams(temperature=1.0, logit_bias=((3, 1.0),)), "full"),
        (SamplingParams(min_new_tokens=1), "full"),
    ],
)
def test_sampling_class(sampling, kind):
    assert sampling_class(sampling) == kind


@pytest.mark.parametrize(
    "change", [{"pipeline_depth": 3}, {"prefill_budget": 0}, {"schedule_policy": "lifo"}, {"schedule_conservativeness": 0.0}]
)
def test_a_config_out_of_range_is_named(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        SchedulerConfig(**change)


def test_limits_out_of_range_are_named():
    with pytest.raises(ConfigError, match=r"buckets=\(2, 1\)"):
        make_limits(buckets=(2, 1))
    with pytest.raises(ConfigError, match="page_size=0"):
        make_limits(page_size=0)


def test_the_policy_imports_no_jax():
    for module in (messages, pages, prefix, blocks, scheduler, core):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "") or ""]
            )
            assert not {name.split(".")[0] for name in names} & {"jax", "jaxlib", "flax", "pallas_kernels"}, module


# Prefill programs.


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


# Requests.


def test_a_request_is_answered():
    sim = simulate()
    request = make_request("a", tokens(10), 12)
    sim.submit(request)
    sim.drain()
    assert outputs(sim, "a") == [text_of(request, sim.device.limits).output] and sim.reasons == {"a": "length"}
    assert sim.core.step() == []
    sim.settle()


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_tiny_limits(count):
    sim = simulate()
    sim.submit(make_request("a", tokens(10), count))
    sim.drain()
    assert len(outputs(sim, "a")[0]) == count
    assert sum(launch.rounds for launch in sim.device.launches) <= max(0, count - 1)


def test_what_can_never_run_is_refused():
    refuses = Core(Simulation(make_limits(total_pages=4, page_size=4, slack=6)).device, SchedulerConfig())
    for ids, complaint in (([], "0 tokens"), (tokens(11), "11 tokens; between 1 and 10 fit")):
        with pytest.raises(ConfigError, match=complaint):
            refuses.submit(make_request("a", ids))
    with pytest.raises(ConfigError, match="max_new_tokens=-1"):
        refuses.submit(make_request("a", [1], -1))
    refuses.submit(make_request("a", [1]))
    with pytest.raises(ConfigError, match="rid='a'"):
        refuses.submit(make_request("a", [1]))


def test_the_queue_has_a_bound():
    sim = simulate(SchedulerConfig(max_queued=2))
    sim.submit(make_request("a", [1]), make_request("b", [1]))
    with pytest.raises(QueueFull, match="max_queued=2"):
        sim.core.submit(make_request("c", [1]))


def test_the_limit_is_cut_to_the_pool():
    sim = simulate(total_pages=8, page_size=4, slack=6)
    sim.submit(make_request("a", tokens(10), 500))
    sim.drain()
    assert len(outputs(sim, "a")[0]) == 8 * 4 - 6 - 10 and sim.reasons["a"] == "length"


def test_aborts_in_every_state():
    sim = simulate(SchedulerConfig(prefill_budget=16), buckets=(1, 2), prefill_sizes=(1,))
    sim.submit(make_request("runs", [1, 2], 100))
    sim.step()
    sim.submit(make_request("fills", tokens(100), 5), make_request("waits", [5], 5))
    sim.step()
    assert set(running(sim)) == {"runs", "fills"}
    for rid in ("waits", "fills", "runs"):
        sim.core.abort(rid)
        sim.core.abort(rid)
    assert not running(sim) and not sim.core.idle
    sim.drain()
    assert sim.reasons == dict.fromkeys(("waits", "fills", "runs"), "abort")
    sim.settle()


def test_an_abort_behind_the_end_says_nothing():
    sim = simulate()
    sim.submit(make_request("a", [1], 1))
    sim.drain()
    sim.core.abort("a")
    sim.core.finish("a", 0)
    assert sim.core.idle and sim.core.step() == []


def test_finish_keeps_the_official_tokens_only():
    sim = simulate(page_size=1, key_lookahead=0)
    request = make_request("a", tokens(10), 100)
    text = text_of(request, sim.device.limits).tokens
    sim.submit(request)
    while not sim.alive["a"] or len(sim.alive["a"]) < 8:
        sim.step()
    with pytest.raises(ConfigError, match="kept=99"):
        sim.core.finish("a", 99)
    sim.stop_at["a"] = 10**9
    sim.core.finish("a", 3)
    sim.drain()
    assert sim.reasons["a"] == "stop"
    assert len(sim.core.scheduler.prefix.match((), text, 50)) == 13


def test_priorities_go_first():
    for low_first, order in ((False, ["b", "a"]), (True, ["a", "b"])):
        sim = simulate(SchedulerConfig(low_priority_first=low_first), buckets=(1,))
        sim.submit(make_request("a", [1], 3, priority=1), make_request("b", [2], 3, priority=2))
        sim.drain()
        assert list(sim.reasons) == order


def test_longest_prefix_first():
    sim = simulate(SchedulerConfig(schedule_policy="lpm"), buckets=(1,), page_size=4)
    sim.submit(make_request("first", tokens(20), 1))
    sim.drain()
    sim.submit(make_request("cold", tokens(20, 30), 1), make_request("hit", tokens(20), 1))
    sim.drain()
    assert list(sim.reasons) == ["first", "hit", "cold"]


# The prefix cache in use.


@pytest.mark.parametrize(
    "page_size, lookahead, cached", [(4, 0, 16), (4, 1, 16), (4, 3, 16), (1, 0, 19), (1, 3, 17), (16, 1, 16)]
)
def test_siblings_share_the_prompt(page_size, lookahead, cached):
    sim = simulate(page_size=page_size, key_lookahead=lookahead)
    sim.submit(*(make_request(f"a{choice}", tokens(20), 6, group="a", choice=choice) for choice in range(3)))
    sim.step()
    assert running(sim) == ["a0"]
    sim.drain()
    assert [sim.deltas[f"a{choice}"][0].cached_tokens for choice in range(3)] == [0, cached, cached]
    assert len({tuple(output) for output in outputs(sim, "a0", "a1", "a2")}) == 3


def test_siblings_do_not_wait_without_a_cache_or_a_first_choice():
    siblings = [make_request(f"a{choice}", tokens(2), 6, group="a", choice=choice) for choice in range(3)]
    sim = simulate(SchedulerConfig(prefix_cache=False))
    sim.submit(*siblings)
    sim.step()
    assert len(running(sim)) == 3
    sim = simulate()
    sim.submit(*siblings)
    sim.core.abort("a0")
    sim.step()
    assert len(running(sim)) == 2


def test_the_same_prefix_is_taken_in_once():
    sim = simulate(page_size=4)
    sim.submit(
        make_request("a", tokens(40), 3), make_request("b", np.append(tokens(36), 50), 3), make_request("c", [9] * 40, 3)
    )
    sim.step()
    assert running(sim) == ["a", "c"]
    sim.drain()
    assert sim.deltas["b"][0].cached_tokens == 32


def test_a_waiting_request_goes_on_when_the_row_is_aborted():
    sim = simulate(SchedulerConfig(max_prefill_tokens=16), page_size=4, prefill_sizes=(1,))
    sim.submit(make_request("a", tokens(40), 3), make_request("b", tokens(40), 3))
    sim.step()
    sim.core.abort("a")
    sim.drain()
    assert sim.reasons == {"a": "abort", "b": "length"}


def test_the_next_turn_hits_generated_pages():
    sim = simulate(page_size=4, key_lookahead=1)
    first = make_request("a", tokens(10), 20)
    text = text_of(first, sim.device.limits).tokens
    sim.submit(first)
    sim.drain()
    sim.submit(make_request("b", np.append(text, [7] * 5), 3))
    sim.drain()
    assert sim.deltas["b"][0].cached_tokens == 28  # positions below 29 = 30 tokens − 1 are final: 7 pages


def test_scored_positions_are_computed():
    sim = simulate(page_size=4)
    for rid, score_from in (("a", None), ("b", 9), ("c", 0)):
        sim.submit(make_request(rid, tokens(20), 1, score_from=score_from))
        sim.drain()
    assert [sim.deltas[rid][-1].cached_tokens for rid in "abc"] == [0, 8, 0]


def test_flush_waits_for_nobody():
    sim = simulate()
    sim.submit(make_request("a", tokens(20), 3))
    assert not sim.core.flush()
    sim.drain()
    assert sim.core.scheduler.pool.cached and sim.core.flush() and sim.core.stats()["cached_pages"] == 0


# The table.


def test_the_table_grows_at_once_and_shrinks_late():
    sim = simulate(buckets=(1, 2, 4, 8))
    sim.submit(make_request("long", [1], 500))
    sim.step()
    sim.submit(*(make_request(f"a{at}", [at], 2) for at in range(4)))
    sim.drain()
    buckets = [launch.bucket for launch in sim.device.launches]
    assert buckets[0] == 1 and buckets[1] == 8 and buckets[-1] == 1
    assert SHRINK_AFTER <= buckets.count(8) <= SHRINK_AFTER + 6


def test_the_class_is_that_of_the_rows():
    sim = simulate()
    sim.submit(make_request("a", [1], 60), make_request("b", [2], 6, sampling=SamplingParams(temperature=1.0)))
    sim.drain()
    kinds = [launch.sampling_class for launch in sim.device.launches]
    assert kinds[0] == "sampled" and kinds[-1] == "greedy"


# Closed mode.


def test_closed_mode_is_one_loop():
    config = dataclasses.replace(CLOSED, max_prefill_tokens=512)
    sim = Simulation(make_limits(buckets=(1, 2, 4, 8), total_pages=500), config, stall=0.0)
    sim.device.launches = []
    sim.submit(*(make_request(f"a{at}", tokens(300, at), 10 + at) for at in range(6)))
    sim.drain()
    assert [launch.rounds for launch in sim.device.launches] == [0] * (len(sim.device.launches) - 1) + [2**30]
    assert not any(launch.orders.grants for launch in sim.device.launches)
    sim.settle()


def test_closed_mode_admits_what_fits_and_preempts_nobody():
    sim = Simulation(make_limits(buckets=(1, 2, 4, 8), total_pages=60, page_size=4), CLOSED, stall=0.0)
    sim.submit(*(make_request(f"a{at}", tokens(20, at), 80) for at in range(9)))
    sim.step()
    assert len(running(sim)) == 2
    sim.drain()
    assert sim.ended == 9 and sim.core.stats()["retractions_total"] == 0
    sim.settle()


# Preemption and failures.


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(lookahead, prefix_cache):
    for at in range(12):
        sim = simulate(SchedulerConfig(prefix_cache=prefix_cache, max_prefill_tokens=16), key_lookahead=lookahead)
        request = make_request("a", tokens(40), 20)
        sim.submit(request, make_request("b", tokens(5, 3), 20))
        for _ in range(at):
            sim.step()
        row = next((row for row in sim.core.scheduler.rows if row is not None and row.job.request.rid == "a"), None)
        if row is not None:
            sim.core.scheduler._preempt(row)
        sim.drain()
        assert outputs(sim, "a") == [text_of(request, sim.device.limits).output]
        logs = np.concatenate([delta.round_of for delta in sim.deltas["a"]])
        assert (np.diff(logs) >= 0).all() and sim.deltas["a"][-1].num_retractions == (row is not None)
        sim.settle()


def test_the_oldest_is_never_the_victim_and_the_least_urgent_is_first():
    config = SchedulerConfig(schedule_conservativeness=0.01)
    sim = simulate(config, page_size=4, total_pages=30)
    sim.submit(make_request("old", tokens(10), 80, priority=-1))
    sim.step()
    sim.submit(make_request("urgent", tokens(10, 9), 80, priority=5), make_request("late", tokens(10, 20), 80))
    victims, preempt = [], sim.core.scheduler._preempt
    sim.core.scheduler._preempt = lambda row: (victims.append(row.job.request.rid), preempt(row))
    sim.drain()
    assert victims and victims[0] == "late" and "old" not in victims
    assert sim.ended == 3


def test_after_a_failure_the_core_goes_on():
    sim = simulate(buckets=(1, 2))
    sim.submit(*(make_request(f"a{at}", tokens(20, at), 30) for at in range(4)))
    sim.device.fail_at = 3
    sim.drain()
    assert {failed.rid for failed in sim.failed} == {"a0", "a1"} and "fell over" in sim.failed[0].message
    assert sim.reasons == {"a2": "length", "a3": "length"}
    sim.settle()


def test_a_failed_group_goes_on_without_its_first_choice():
    sim = simulate()
    sim.submit(*(make_request(f"a{choice}", tokens(20), 6, group="a", choice=choice) for choice in range(3)))
    sim.device.fail_at = 0
    sim.drain()
    assert [failed.rid for failed in sim.failed] == ["a0"] and set(sim.reasons) == {"a1", "a2"}


def test_a_step_never_blocks_with_nothing_in_flight_and_need_not_wait():
    sim = Simulation(make_limits(), most_delay=10**6)
    assert sim.core.step() == [] and sim.core.idle
    sim.submit(make_request("a", [1], 50))
    for _ in range(5):
        sim.step(wait=False)
    assert sim.core._in_flight() == 2 and sim.alive["a"] == []
    sim.drain()


def test_a_device_that_forgets_a_report_is_an_error():
    sim = simulate()
    launch = sim.device.launch
    sim.device.launch = lambda asked: launch(asked)[:1]
    sim.submit(make_request("a", [1], 5))
    sim.step()
    assert "promises 1" in sim.failed[0].message
