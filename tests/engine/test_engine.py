"""`Engine`: requests that join, leave and end in every way, each answered as `jaxspec.generate` answers it alone."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxspec import runtime
from jaxspec.config import ConfigError
from jaxspec.engine import kept
from jaxspec.engine.engine import mixed
from jaxspec.sampling import SamplingParams
from tests.engine.cases import SOME, alone, texts, told
from tests.engine.running import MAIN, idle, open_engine, slow_launches

pytestmark = pytest.mark.usefixtures("checked_books")


# Every drafter.


def mixed_requests(name: str, count: int) -> list[dict]:
    """Greedy and sampled requests of mixed lengths, one in five without speculation."""
    rng = np.random.default_rng(11)
    prompts = texts(name, rng.integers(1, 16, count), seed=12)
    return [
        dict(prompt=p, max_new_tokens=int(rng.integers(1, 10)), temperature=float(i % 2), seed=i, ignore_eos=i % 3 > 0)
        for i, p in enumerate(prompts)
    ]


@pytest.mark.parametrize("name", SOME)
def test_requests_that_join_and_leave_are_answered_as_alone(name):
    requests = mixed_requests(name, 16)
    rng = np.random.default_rng(13)
    with open_engine(name) as engine:
        engine._core.device.sampling_class = "sampled"
        handles = []
        for request in requests:
            time.sleep(float(rng.exponential(0.01)))
            handles.append(engine.submit(**request))
        results = [handle.result(300) for handle in handles]
        assert idle(engine)
        stats = engine.stats()
        assert stats.tokens_total == sum(len(r.tokens) for r in results) and stats.bucket == 2
        assert stats.proposed_total >= sum(r.stats.proposed for r in results)
        accepted = sum(r.stats.accepted for r in results)
        assert sum(stats.accept_by_depth) * stats.rounds_total == pytest.approx(accepted)
        assert stats.accept_rate == pytest.approx(accepted / max(stats.proposed_total, 1))
        assert stats.gen_throughput > 0 and stats.stalls_total >= 0
    prompts, *columns = zip(*(r.values() for r in requests), strict=True)
    keywords = dict(zip(list(requests[0])[1:], map(list, columns), strict=True))
    for i, prompt in enumerate(prompts):
        # Beside a sampled prompt, so that all of them share the programs of one class.
        expected = alone(name, [prompt, [0]], **{k: [v[i], 0.5 if k == "temperature" else v[i]] for k, v in keywords.items()})
        ours, theirs = told(results[i]), told(expected[0])
        if name.startswith("ngram"):  # its history has learnt what the others said: drafts differ, tokens must not
            ours, theirs = ours[:2], theirs[:2]
        if not name.startswith("ngram") or requests[i]["temperature"] == 0:
            assert ours == theirs, f"request {i}"
    if name != MAIN:  # no other test needs its programs
        kept.forget()
        runtime.forget_compiled()
        jax.clear_caches()


# Answers end.


def test_limits_of_no_and_few_tokens(engine):
    [prompt] = texts(MAIN, (9,))
    whole = alone(MAIN, prompt, max_new_tokens=4, ignore_eos=True).tokens
    for limit in (0, 1, 2, 3):
        result = engine.generate(prompt, max_new_tokens=limit, ignore_eos=True)
        assert (result.tokens, result.finish_reason) == (whole[:limit], "length")
        assert result.stats.completion_tokens == limit


def test_stop_strings_ids_and_limits_in_all_orders(engine):
    """Within one accepted run, whichever comes first ends the answer, and cuts everything at that point."""
    [prompt] = texts(MAIN, (11,), seed=3)
    base = alone(MAIN, prompt, max_new_tokens=14, ignore_eos=True)
    assert base.stats.accept_length > 1.2, "no run holds several tokens"
    tokens, text = base.tokens, base.text
    # Tokens and pieces of text that are met for the first time at their place.
    ids = [i for i in range(2, 13) if tokens[i] not in tokens[:i]]
    pieces = [i for i in range(2, 13) if text.find(text[i - 1 : i + 1]) == i - 1]
    assert len(ids) > 1 and len(pieces) > 1
    for at_id in [None, *ids[:3]]:
        for at_text in [None, *pieces[:3]]:
            for limit in (14, 4, 7):
                request = {"max_new_tokens": limit}
                if at_id is not None:
                    request["stop_token_ids"] = [tokens[at_id]]
                if at_text is not None:
                    request["stop"] = [text[at_text - 1 : at_text + 1]]
                ours, theirs = engine.generate(prompt, **request), alone(MAIN, prompt, **request)
                assert told(ours) == told(theirs), request
                assert (ours.text, ours.matched_stop) == (theirs.text, theirs.matched_stop), request
                assert ours.finish_reason == ("length" if ours.matched_stop is None else "stop")
                assert len(ours.tokens) == min(limit, *(i + 1 for i in (at_id, at_text) if i is not None), 14)
    assert idle(engine)


def test_a_request_that_drafts_nothing_in_a_mixed_batch(engine):
    prompts = texts(MAIN, (9, 5, 12), seed=2)
    plain, *others = [engine.submit(p, max_new_tokens=12, ignore_eos=True, speculation=bool(i)) for i, p in enumerate(prompts)]
    result = plain.result(60)
    assert result.stats.rounds == 11 and result.stats.proposed == 0 and not any(result.from_draft)
    assert result.tokens == alone(MAIN, prompts[0], max_new_tokens=12, ignore_eos=True).tokens
    for prompt, handle in zip(prompts[1:], others, strict=True):
        assert told(handle.result(60)) == told(alone(MAIN, prompt, max_new_tokens=12, ignore_eos=True))


def test_several_answers_to_one_prompt_draw_with_seeds_of_their_own(engine):
    [prompt] = texts(MAIN, (17,), seed=5)
    results = engine.generate(prompt, n=3, temperature=1.0, seed=5, max_new_tokens=8, ignore_eos=True, rid="many")
    assert [r.rid for r in results] == ["many-0", "many-1", "many-2"]
    for i, result in enumerate(results):
        expected = alone(MAIN, prompt, temperature=1.0, seed=mixed(5, i), max_new_tokens=8, ignore_eos=True)
        assert told(result) == told(expected)
    assert results[1].stats.cached_tokens == results[2].stats.cached_tokens == 16
    assert len({tuple(r.tokens) for r in results}) > 1
    several = engine.generate([prompt, prompt[:5]], n=2, max_new_tokens=2)
    assert [len(r.tokens) for r in several] == [2] * 4 and several[0].tokens == several[1].tokens


def test_penalties_and_biases_are_those_of_the_run_alone(engine):
    prompts = texts(MAIN, (9, 6), seed=7)
    request = dict(frequency_penalty=0.7, repetition_penalty=1.3, logit_bias={3: 2.0}, max_new_tokens=8, ignore_eos=True)
    results = engine.generate(prompts, **request)
    for prompt, result in zip(prompts, results, strict=True):
        assert told(result) == told(alone(MAIN, prompt, **request))
    assert results[0].tokens != engine.generate(prompts[0], max_new_tokens=8, ignore_eos=True).tokens


def test_sampling_params_and_texts_as_prompts(engine):
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
    result = engine.generate("%#!", sampling=sampling, max_new_tokens=6, ignore_eos=True)
    expected = alone(MAIN, "%#!", sampling=sampling, max_new_tokens=6, ignore_eos=True)
    assert told(result) == told(expected) and result.text == expected.text and len(result.text) == 6


# Aborts.


def test_aborts_at_any_time_give_what_was_emitted(engine, monkeypatch):
    [prompt] = texts(MAIN, (9,), seed=1)
    whole = alone(MAIN, prompt, max_new_tokens=60, ignore_eos=True).tokens
    slow_launches(engine, 0.003, monkeypatch)
    for pieces in range(6):
        handle = engine.submit(prompt, max_new_tokens=60, ignore_eos=True)
        iterator = iter(handle._chunks.get, None)
        for _ in range(pieces):
            next(iterator)
        handle.abort()
        result = handle.result(30)
        assert result.finish_reason == "abort" and result.tokens == whole[: len(result.tokens)]
        assert len(result.tokens) >= pieces and result.stats.completion_tokens == len(result.tokens) < 60
        handle.abort()  # again does nothing
    engine.abort("a name that nobody has")
    handles = engine.submit([prompt] * 9, max_new_tokens=60, ignore_eos=True)  # some of them wait
    engine.abort_all()
    assert {h.result(30).finish_reason for h in handles} == {"abort"}
    assert idle(engine)


def test_a_name_can_be_used_again_as_soon_as_its_answer_is_there(engine):
    """Also behind a stop string, which the front end finds while the core still decodes."""
    [prompt, other] = texts(MAIN, (11, 7), seed=3)
    text = alone(MAIN, prompt, max_new_tokens=14, ignore_eos=True).text
    expected = alone(MAIN, prompt, max_new_tokens=60, stop=text[3:5], ignore_eos=True).tokens
    second = alone(MAIN, other, max_new_tokens=20, ignore_eos=True).tokens
    for _ in range(12):
        result = engine.generate(prompt, max_new_tokens=60, stop=text[3:5], ignore_eos=True, rid="again")
        assert result.tokens == expected and result.finish_reason == "stop"
        assert engine.generate(other, max_new_tokens=20, ignore_eos=True, rid="again").tokens == second


# Streams.


def test_an_async_stream_is_the_answer_in_pieces(engine):
    prompts = texts(MAIN, (9, 12, 4), seed=4)

    async def one(prompt):
        return [chunk async for chunk in engine.stream(prompt, max_new_tokens=12, ignore_eos=True)]

    async def all_of_them():
        return await asyncio.gather(*map(one, prompts))

    for prompt, chunks in zip(prompts, asyncio.run(all_of_them()), strict=True):
        expected = alone(MAIN, prompt, max_new_tokens=12, ignore_eos=True)
        assert sum((c.tokens for c in chunks), []) == expected.tokens
        assert "".join(c.text for c in chunks) == expected.text
        assert [c.result is None for c in chunks] == [True] * (len(chunks) - 1) + [False] and len(chunks) > 2
        assert told(chunks[-1].result) == told(expected)
    chunks = list(engine.stream_sync(prompts[0], max_new_tokens=12, ignore_eos=True))
    assert sum((c.tokens for c in chunks), []) == alone(MAIN, prompts[0], max_new_tokens=12, ignore_eos=True).tokens


def test_leaving_a_stream_aborts_its_request(engine, monkeypatch):
    slow_launches(engine, 0.003, monkeypatch)
    [prompt] = texts(MAIN, (9,), seed=4)
    endless = dict(max_new_tokens=80, ignore_eos=True)
    before = engine.stats().tokens_total

    async def leave(how: str) -> None:
        stream = engine.stream(prompt, **endless)
        if how == "cancel":
            task = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await anext(stream)
            await stream.aclose()

    for how in ("close", "cancel"):
        asyncio.run(leave(how))
        assert idle(engine, 2)
    for _ in engine.stream_sync(prompt, **endless):
        break
    assert idle(engine, 2)
    assert engine.stats().tokens_total - before < 3 * 60
    with pytest.raises(ConfigError, match="a stream answers one prompt, 2 answers"):
        next(engine.stream_sync(prompt, n=2, **endless))
    assert idle(engine, 2)


def test_four_threads_at_once(engine):
    prompts = texts(MAIN, (9, 12, 4, 15), seed=9)
    expected = [told(alone(MAIN, p, max_new_tokens=9, ignore_eos=True)) for p in prompts]

    def ask(i: int) -> None:
        for turn in range(5):
            at = (i + turn) % 4
            assert told(engine.generate(prompts[at], max_new_tokens=9, ignore_eos=True)) == expected[at]

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(ask, i) for i in range(4)]:
            future.result(120)
    assert idle(engine)


# Tables of every size.


def test_the_table_grows_and_shrinks_under_running_requests():
    prompts = texts(MAIN, (5, 9, 3, 12, 7, 6, 8, 4), seed=31)
    request = dict(ignore_eos=True, temperature=1.0)
    with open_engine(max_running_requests=8, max_total_tokens=1024) as engine:
        engine._core.device.launches = []
        longest = engine.submit(prompts[0], max_new_tokens=84, seed=0, **request)
        next(iter(longest._chunks.get, None))
        handles = [engine.submit(p, max_new_tokens=4, seed=i + 1, **request) for i, p in enumerate(prompts[1:])]
        results = [longest.result(120), *(h.result(120) for h in handles)]
        second = engine.submit(prompts[1], max_new_tokens=84, seed=1, **request)
        results.append(second.result(120))
        buckets = [launch.bucket for launch in engine._core.device.launches]
    assert max(buckets) == 8 and buckets[0] < 8 and buckets[-1] < 8, buckets
    limits = [84] + [4] * 7 + [84]
    for i, (prompt, limit, result) in enumerate(zip([*prompts, prompts[1]], limits, results, strict=True)):
        expected = alone(MAIN, prompt, max_new_tokens=limit, seed=i if i < 8 else 1, **request)
        assert told(result) == told(expected), f"request {i}"
