import dataclasses

import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.engine.core import Core
from jaxspec.engine.messages import QueueFull, SchedulerConfig
from jaxspec.engine.scheduler import SHRINK_AFTER
from jaxspec.sampling_params import SamplingParams
from tests.engine.fake_device import text_of
from tests.engine.simulation import Simulation, make_limits, make_request, simulate, tokens

CLOSED = SchedulerConfig(rounds_per_launch=2**30, prefix_cache=False, grant_all=True)


def outputs(sim, *rids):
    return [[token for delta in sim.deltas[rid] for token in delta.tokens] for rid in rids]


def running(sim):
    return [row.job.request.rid for row in sim.core.scheduler.rows if row is not None]


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
