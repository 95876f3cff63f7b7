"""A request that takes over pages of earlier texts says, drafts and accepts what it would have said cold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxspec.engine.core import Core
from tests.engine.by_hand import PAGE_SIZE, Told, open_core, pair_for, requests_for, restart, run
from tests.engine.cases import NAMES, SOME, case_of, texts

PROMPT, OUTPUT = 19, 7
LOOKAHEAD = {"eagle": 1, "eagle3 tree": 1, "peagle": 1, "mtp one layer": 1, "mtp layer per step": 3}
"""Tokens behind a position on which its draft entries depend; 0 for all others."""


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    """A drafter, and a core of it that takes prompts in by blocks of 3 positions."""
    return request.param, open_core(request.param, block=3, sizes=(4,))


def answers(name: str, core: Core, prompt: list[int], output: int = OUTPUT) -> list[Told]:
    """What a greedy and a sampled request say, on a core whose cache stays."""
    greedy, sampled = run(core, pair_for(name, prompt, output))
    assert greedy.cached == sampled.cached
    return [greedy, sampled]


def said(told: list[Told]) -> list[tuple]:
    """What must not depend on hits."""
    return [one.answer for one in told]


def differing(name: str, prompt: list[int], at: int) -> list[int]:
    """The prompt with another token at `at`."""
    vocab = case_of(name).params.config.vocab_size
    return [*prompt[:at], (prompt[at] + 1) % vocab, *prompt[at + 1 :]]


def pages_hit(agree: int, fill: int, known: int, ahead: int) -> int:
    """Pages of a text whose first `agree` tokens equal those of one with `known` immutable positions."""
    return min(agree - ahead, fill - 1, fill - ahead, known) // PAGE_SIZE


def check_hits(name: str, core: Core) -> None:
    """Texts that leave a first one at every page's edge, one token behind it and one before, each compared with a cold run."""
    ahead = core.scheduler.limits.key_lookahead
    assert ahead == LOOKAHEAD.get(name, 0)
    [first] = texts(name, (PROMPT,), seed=4)
    edges = range(PAGE_SIZE, PROMPT, PAGE_SIZE)
    changed = sorted({at for edge in edges for at in (edge - 1, edge, edge + ahead) if at < PROMPT})
    prompts = [first, *(differing(name, first, at) for at in changed)]
    cold = [answers(name, restart(core, prefix_cache=False), prompt) for prompt in prompts]
    assert all(told.cached == 0 for pair in cold for told in pair)
    for prompt, at, expected in zip(prompts, (PROMPT, *changed), cold, strict=True):
        warm = restart(core)
        answers(name, warm, first)
        told = answers(name, warm, prompt)
        assert told[0].cached == PAGE_SIZE * pages_hit(at, PROMPT, PROMPT - ahead, ahead), f"differs at {at}"
        assert said(told) == said(expected), f"differs at {at}"


def test_a_hit_at_any_page_changes_nothing(case):
    check_hits(*case)


@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_a_hit_at_any_page_changes_nothing_whatever_the_blocks(name, block):
    check_hits(name, open_core(name, block=block))


def test_the_next_turn_of_a_chat_takes_over_what_was_generated(case):
    name, core = case
    ahead = core.scheduler.limits.key_lookahead
    [first, more] = texts(name, (PROMPT, 5), seed=6)

    def turns(core: Core, change: int | None) -> list[Told]:
        """The second turn behind the first one's answers, or what is left of them before a change, greedy and sampled."""
        found = []
        for i, told in enumerate(answers(name, core, first, 14)):
            second = first + told.tokens + more
            if change is not None:
                second = differing(name, second, len(first) + change)
            [request] = pair_for(name, second, OUTPUT)[i : i + 1]
            found += run(core, [request])
        return found

    whole = PROMPT + 14
    known = min(whole - 1, whole - ahead)  # the last token's entry was never computed
    for change, agree in ((None, whole), (11, PROMPT + 11)):
        warm, cold = turns(restart(core), change), turns(restart(core, prefix_cache=False), change)
        assert [told.cached for told in warm] == [pages_hit(agree, whole + 5, known, ahead) * PAGE_SIZE] * 2
        assert warm[0].cached > PROMPT
        assert said(warm) == said(cold)


@pytest.mark.parametrize("case", SOME, indirect=True)
def test_texts_that_fill_the_pool_evict_and_answer_as_before(case):
    name, core = case
    prompts = texts(name, (23, 19, 23, 15, 19, 23), seed=8)
    prompts += [p[:11] + q[:8] for p, q in zip(prompts, prompts[1:], strict=False)]
    core = restart(core)
    pool = core.scheduler.pool
    taken = pool.take(pool.total - 24)  # a small pool: two requests fit, and little stays cached
    core.check_pages = False
    ask = lambda p, i: requests_for(name, [p], max_new_tokens=OUTPUT, seed=i)  # noqa: E731
    warm = []
    for i, prompt in enumerate(prompts):
        for request in ask(prompt, i):
            core.submit(request)
        told: dict[str, list[int]] = {}
        while not core.idle:
            for delta in core.step():
                told.setdefault(delta.rid, []).extend(delta.tokens)
        warm += told.values()
    pool.release(taken)
    core.scheduler.check()
    cold = [run(restart(core, prefix_cache=False), ask(p, i))[0].tokens for i, p in enumerate(prompts)]
    assert warm == cold


@pytest.mark.parametrize("case", SOME, indirect=True)
def test_namespaces_share_no_pages(case):
    name, core = case
    core = restart(core)
    [prompt] = texts(name, (PROMPT,), seed=4)
    [one], [other], [again] = (requests_for(name, [prompt], max_new_tokens=1) for _ in range(3))
    assert run(core, [one])[0].cached == 0
    assert run(core, [dataclasses.replace(other, namespace=("salt", ""))])[0].cached == 0
    assert run(core, [again])[0].cached > 0


def test_pages_of_a_prompt_are_those_of_a_cold_run(case):
    """Not only what is said: every committed entry of target and drafter behind a hit equals the cold one."""
    name, core = case
    [prompt] = texts(name, (PROMPT,), seed=4)

    def entries(core: Core) -> list[np.ndarray]:
        found = []

        def look(_):
            rows = [row for row in core.scheduler.rows if row is not None]
            if rows and rows[0].known >= PROMPT and not found:
                pages = np.asarray(rows[0].pages[: PROMPT // PAGE_SIZE])
                found.extend(np.asarray(x)[pages] for pool in core.device.memory.pools for x in pool)

        run(core, requests_for(name, [prompt], max_new_tokens=OUTPUT), look)
        return found

    warm = restart(core)
    entries(warm)
    ours, theirs = entries(warm), entries(restart(core, prefix_cache=False))
    assert ours and len(ours) == len(theirs)
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
