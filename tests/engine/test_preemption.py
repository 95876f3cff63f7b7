"""A request that loses its row and pages at any of its rounds goes on as if nothing had happened."""

from __future__ import annotations

import pytest

from jaxspec.engine.core import Core
from tests.engine.by_hand import open_core, requests_for, restart, run
from tests.engine.cases import NAMES, case_of, texts

PROMPT, OUTPUT = 19, 9


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    """A drafter, and a core of it whose programs all its tests share."""
    return request.param, open_core(request.param)


def preempt_at(core: Core, step: int, forget: bool):
    """What `run` calls after each step: after step `step` the request is preempted, and with `forget` its pages are gone."""

    def each(number: int) -> None:
        rows = [row for row in core.scheduler.rows if row is not None]
        if number == step and rows:
            core.scheduler._preempt(rows[0])
            if forget:
                core.scheduler.prefix.reset()
            core.scheduler.check()

    return each


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_request_preempted_at_any_round_says_what_it_would_have_said(case, temperature):
    name, core = case
    if not temperature and case_of(name).sampled:
        temperature = 0.7
    [prompt] = texts(name, (PROMPT,), seed=2)
    ask = lambda: requests_for(name, [prompt], max_new_tokens=OUTPUT, temperature=temperature)  # noqa: E731
    steps = []
    [undisturbed] = run(restart(core), ask(), steps.append)
    assert len(undisturbed.tokens) == OUTPUT and not undisturbed.retractions
    preempted = 0
    for step in range(len(steps)):
        for forget in (False, True):
            fresh = restart(core)
            [told] = run(fresh, ask(), preempt_at(fresh, step, forget))
            assert told.answer == undisturbed.answer, f"preempted after step {step}, pages gone: {forget}"
            assert fresh.scheduler.retractions == told.retractions <= 1
            preempted += told.retractions
    rounds = undisturbed.log[-1][1]
    assert preempted >= 2 * rounds, "some round was never hit"
