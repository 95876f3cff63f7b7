"""The whole policy over a device that knows what every slot holds: random traffic, liveness, and rules taken away."""

from itertools import product

import numpy as np
import pytest

from jaxspec.engine import pages, scheduler
from jaxspec.engine.messages import SchedulerConfig
from jaxspec.engine.pages import pages_for
from tests.engine.simulation import Simulation, Traffic, make_limits, make_request

# page size -> (pages, requests of a run): 12 runs each, 10^5 requests together
LOADS = {1: (2000, 1500), 4: (600, 3400), 16: (300, 3450)}
MIX = [
    (page_size, lookahead, rounds, depth)
    for page_size, lookahead, rounds, depth in product((1, 4, 16), (0, 1, 3), (1, 4), (1, 2))
]


@pytest.mark.parametrize("page_size, lookahead, rounds, depth", MIX)
def test_random_requests_are_answered_and_leave_no_page_behind(page_size, lookahead, rounds, depth):
    total, requests = LOADS[page_size]
    seed = MIX.index((page_size, lookahead, rounds, depth))
    limits = make_limits(
        buckets=(1, 4, 16, 64),
        page_size=page_size,
        key_lookahead=lookahead,
        total_pages=total,
        separate_blocks=seed % 3 != 0,
        max_ends=4 if seed % 2 else 2**30,
        long_sizes=(288, 384) if seed % 4 == 1 else (),
        max_accept=6,
    )
    config = SchedulerConfig(
        rounds_per_launch=rounds,
        pipeline_depth=depth,
        schedule_policy="lpm" if seed % 5 == 0 else "fcfs",
        low_priority_first=seed % 7 == 0,
        prefill_budget=(128, 512, 1024)[seed % 3],
        prefill_decode_interval=1 + seed % 2,
        max_prefill_tokens=(256, 2048, 8192)[seed // 3 % 3],
    )
    sim = Simulation(limits, config, seed, check_every=64)
    sim.run(Traffic(limits, seed), requests, outstanding=128)
    assert sim.ended >= requests


@pytest.mark.parametrize("page_size, lookahead, rounds, depth", MIX[::5])
def test_a_short_pool_preempts_and_every_launch_keeps_the_books(page_size, lookahead, rounds, depth):
    total = {1: 600, 4: 300, 16: 300}[page_size]
    limits = make_limits(page_size=page_size, key_lookahead=lookahead, total_pages=total, buckets=(2, 8, 48), max_accept=6)
    config = SchedulerConfig(rounds_per_launch=rounds, pipeline_depth=depth, schedule_conservativeness=0.05, prefill_budget=48)
    sim = Simulation(limits, config, seed=page_size)
    sim.run(Traffic(limits, page_size, most_new=200), 250, outstanding=64)
    assert sim.core.stats()["retractions_total"] or page_size == 16


@pytest.mark.parametrize("prefix_cache, grant_all", [(False, False), (False, True), (True, True)])
def test_without_a_cache_and_in_closed_mode(prefix_cache, grant_all):
    config = SchedulerConfig(
        rounds_per_launch=2**30 if grant_all else 1,
        prefix_cache=prefix_cache,
        grant_all=grant_all,
        schedule_conservativeness=0.1,
    )
    limits = make_limits()
    sim = Simulation(limits, config, seed=3)
    sim.run(Traffic(limits, 3), 300)
    assert grant_all is False or sim.core.stats()["retractions_total"] == 0


@pytest.mark.parametrize("rounds, depth, lookahead", [(1, 2, 1), (4, 1, 0), (1, 1, 3)])
def test_the_oldest_request_advances_within_three_launches(rounds, depth, lookahead):
    limits = make_limits(total_pages=110, key_lookahead=lookahead, prefill_sizes=(1, 2, 4))
    config = SchedulerConfig(
        rounds_per_launch=rounds, pipeline_depth=depth, schedule_conservativeness=0.02, prefill_budget=32, max_prefill_tokens=64
    )
    sim = Simulation(limits, config, seed=5, stall=0.0)
    traffic, core = Traffic(limits, 5, longest=300), sim.core.scheduler
    seen, since, submitted, waited = None, 0, 0, 0
    while submitted < 300 or not sim.core.idle:
        while len(sim.alive) < 30 and submitted < 300:
            some = [request for request in traffic.some()]
            sim.submit(*some)
            submitted += len(some)
        launches, retractions = core.launches, core.retractions
        sim.step()
        assert not sim.failed, sim.failed
        running = [row for row in core.rows if row is not None]
        if core.launches == launches or not running:
            continue
        oldest = min(running, key=lambda row: row.job.arrival)
        now = (oldest.job.request.rid, int(sim.device.rows["length"][oldest.index]))
        bound_to_end = core._bound(oldest) >= oldest.limit - 1  # it may have ended, a report will say so
        since = 0 if now != seen or bound_to_end else since + 1
        seen = now
        assert since < 3, f"{now} has not advanced in 3 launches"
        # Nobody waits beside a free row while pages suffice for everything that could be asked of them.
        if core.retractions == retractions and len(running) < limits.buckets[-1]:
            free = core.pool.free + core.pool.cached
            most = sum(pages_for(row.limit + limits.slack, limits.page_size) - len(row.pages) for row in running)
            for job in core.queue:
                if core._waits(job):
                    continue
                assert free < most + pages_for(job.limit + limits.slack, limits.page_size), (
                    f"{job.request.rid} waits for nothing"
                )
                waited += 1
                break
    assert core.retractions and waited
    sim.settle()


@pytest.mark.parametrize("page_size, lookahead, depth", [(1, 0, 2), (4, 1, 2), (16, 3, 1), (4, 3, 2)])
def test_a_pool_for_one_maximal_request_serves_them_all(page_size, lookahead, depth):
    longest, new = 120, 60
    total = pages_for(longest + new + 6, page_size)
    limits = make_limits(page_size=page_size, key_lookahead=lookahead, total_pages=total, max_len=longest + new)
    sim = Simulation(limits, SchedulerConfig(pipeline_depth=depth, schedule_conservativeness=0.02), seed=page_size)
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 61, longest, dtype=np.int32)
    for at in range(40):
        length = int(rng.choice([longest, longest, rng.integers(1, longest)]))
        ids = np.concatenate([shared[: length // 2], rng.integers(0, 3, length - length // 2, dtype=np.int32)])
        sim.submit(make_request(f"a{at}", ids, new if at % 2 else 20))
    sim.drain(20_000)
    assert not sim.failed and sim.ended == 40
    sim.settle()


# What every rule is for: without it, the simulation fails.


def traffic_of(page_size=4, lookahead=1, total=300, requests=400, seed=1, **config):
    """A run that every rule stands in."""
    limits = make_limits(page_size=page_size, key_lookahead=lookahead, total_pages=total, buckets=(2, 8, 24))
    config = SchedulerConfig(**({"schedule_conservativeness": 0.05, "prefill_budget": 32, "max_prefill_tokens": 64} | config))
    sim = Simulation(limits, config, seed, most_delay=8)
    sim.run(Traffic(limits, seed), requests)


def test_the_run_without_a_mutation_passes():
    traffic_of()
    traffic_of(lookahead=3)
    traffic_of(lookahead=0, page_size=1, seed=4)


def test_order_of_reuse_needs_the_cleared_table(monkeypatch):
    """Safety rule 1: a page is granted again only in a launch that takes it out of the old row's table."""
    monkeypatch.setattr(scheduler.Scheduler, "_clear_table", lambda self, index, order: None)
    with pytest.raises(AssertionError, match="stands in another row's table"):
        traffic_of()


def test_only_immutable_positions_enter_the_cache(monkeypatch):
    """Safety rule 2: what is not committed by a report that was read is still written."""
    monkeypatch.setattr(scheduler, "immutable", lambda known, tokens, lookahead: tokens - lookahead)
    with pytest.raises(AssertionError, match="was read"):
        traffic_of(lookahead=0, page_size=1, seed=4)  # the entry of a bonus token is read by few texts


def test_entries_that_wait_for_tokens_do_not_enter_the_cache(monkeypatch):
    """Safety rule 2 and the `− n` of an insertion: the last draft entries depend on tokens that are not known."""
    monkeypatch.setattr(scheduler, "immutable", lambda known, tokens, lookahead: min(known, tokens))
    with pytest.raises(AssertionError, match="an edge of unknown tokens"):
        traffic_of(lookahead=3)


def test_scratch_must_not_be_granted(monkeypatch):
    """Safety rule 3: page 0 belongs to nobody."""
    monkeypatch.setattr(pages, "grantable", lambda total: range(total))
    with pytest.raises(AssertionError, match="scratch page"):
        traffic_of()


def test_prefill_needs_pages_for_its_provisional_entries(monkeypatch):
    """Safety rule 3: drafters write behind the chunk, and rows would meet on the scratch page."""
    monkeypatch.setattr(scheduler, "table_slots", lambda reach, slack: reach)
    with pytest.raises(AssertionError, match="without pages for its provisional entries"):
        traffic_of()


def test_keys_must_look_ahead(monkeypatch):
    """Safety rule 4 for drafters: texts that differ behind a page would read each other's draft entries."""

    class Short(scheduler.PrefixCache):
        def __init__(self, pool, page_size, lookahead):
            super().__init__(pool, page_size, 0)

        def check(self):
            pass

    monkeypatch.setattr(scheduler, "PrefixCache", Short)
    monkeypatch.setattr(scheduler.Scheduler, "check", lambda self: None)
    with pytest.raises(AssertionError, match="an entry of another text was read"):
        traffic_of(lookahead=3, page_size=1)


def test_late_reports_must_not_reach_another_request(monkeypatch):
    """A row that was left may still be in reports of launches in flight."""
    monkeypatch.setattr(scheduler, "concerns", lambda row: row is not None)
    with pytest.raises((AssertionError, AttributeError, KeyError, ValueError)):  # whichever book is wrong first
        traffic_of()
