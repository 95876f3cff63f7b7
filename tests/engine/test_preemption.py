"""A request that loses its row and pages at any of its rounds goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses

import pytest

from jaxspec.engine.core import Core
from tests.engine.by_hand import open_core, pages_of, pair_for, requests_for, restart, run
from tests.engine.cases import NAMES, SOME, texts

PROMPT, OUTPUT = 19, 7


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    """A drafter, and a core of it whose programs all its tests share."""
    return request.param, open_core(request.param)


def preempt_at(core: Core, step: int, forget: bool):
    """What `run` calls after each step: after step `step` all rows are preempted, and with `forget` their pages are gone."""

    def each(number: int) -> None:
        if number != step:
            return
        for row in [row for row in core.scheduler.rows if row is not None]:
            core.scheduler._preempt(row)
        if forget:
            core.scheduler.prefix.reset()
        core.scheduler.check()

    return each


def test_requests_preempted_at_any_round_say_what_they_would_have_said(case):
    name, core = case
    [prompt] = texts(name, (PROMPT,), seed=2)
    ask = lambda: pair_for(name, prompt, OUTPUT)  # noqa: E731
    steps = []
    undisturbed = run(restart(core), ask(), steps.append)
    assert all(len(told.tokens) == OUTPUT and not told.retractions for told in undisturbed)
    preempted = 0
    for step in range(len(steps)):
        for forget in (False, True):
            fresh = restart(core)
            disturbed = run(fresh, ask(), preempt_at(fresh, step, forget))
            for told, expected in zip(disturbed, undisturbed, strict=True):
                assert told.answer == expected.answer, f"preempted after step {step}, pages gone: {forget}"
                preempted += told.retractions
            assert fresh.scheduler.retractions == sum(told.retractions for told in disturbed)
    assert preempted >= 2 * sum(told.log[-1][1] for told in undisturbed), "some round was never hit"


@pytest.mark.parametrize("case", SOME, indirect=True)
def test_a_request_preempted_again_and_again_says_what_it_would_have_said(case):
    name, core = case
    [prompt] = texts(name, (PROMPT,), seed=3)
    undisturbed = run(restart(core), pair_for(name, prompt, 30))
    fresh = restart(core)

    def each(number: int) -> None:
        rows = [row for row in fresh.scheduler.rows if row is not None]
        if number % 3 == 2 and rows:
            fresh.scheduler._preempt(rows[number // 3 % len(rows)])

    disturbed = run(fresh, pair_for(name, prompt, 30), each)
    assert [told.answer for told in disturbed] == [told.answer for told in undisturbed]
    assert fresh.scheduler.retractions > 2


@pytest.mark.parametrize("case", SOME, indirect=True)
def test_a_pool_too_small_for_all_preempts_the_youngest(case):
    name, core = case
    prompts = texts(name, (9, 10, 7), seed=5)

    def requests():
        made = requests_for(name, prompts, max_new_tokens=24, temperature=[0.0, 1.0, 0.0], ignore_eos=False)
        return [dataclasses.replace(r, stop_ids=()) for r in made]  # they run to their limits, and nobody relies on it

    undisturbed = run(restart(core), requests())
    slack = core.scheduler.limits.slack
    short = restart(core, schedule_conservativeness=0.01)  # admits what the pool cannot carry to its end
    pool = short.scheduler.pool
    # As much as one request needs, and some pages more: the pool of a device that has this many.
    pool.total = pages_of(10 + 24 + slack) + pages_of(10 + slack)
    pool._free = [page for page in pool._free if page <= pool.total]
    pool._rows, pool._kept = pool._rows[: pool.total + 1], pool._kept[: pool.total + 1]
    short.scheduler.limits = dataclasses.replace(short.scheduler.limits, total_pages=pool.total)
    disturbed = run(short, requests())
    assert [told.answer for told in disturbed] == [told.answer for told in undisturbed]
    assert disturbed[0].retractions == 0 < short.scheduler.retractions
