"""`Engine`: order, bounds, errors, failures and the end."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

import jaxspec
from jaxspec.config import ConfigError
from jaxspec.engine.handle import EngineStopped, LaunchFailed
from jaxspec.engine.messages import QueueFull
from tests import tiny
from tests.engine.by_hand import with_nan
from tests.engine.cases import NAMES, SETTINGS, alone, case_of, texts, told
from tests.engine.running import MAIN, idle, open_engine, slow_launches

pytestmark = pytest.mark.usefixtures("checked_books")


# Order, limits, errors.


def test_priorities_go_first(monkeypatch):
    [first, *prompts] = texts(MAIN, (3, 4, 5, 6), seed=1)
    for low_first in (False, True):
        with open_engine(max_running_requests=1, schedule_low_priority_values_first=low_first) as engine:
            slow_launches(engine, 0.01, monkeypatch)
            running = engine.submit(first, max_new_tokens=12, ignore_eos=True)
            next(iter(running._chunks.get, None))  # it has the only row
            handles = [engine.submit(p, max_new_tokens=1, priority=i % 3) for i, p in enumerate(prompts)]
            for handle in handles:
                handle.result(60)
            order = sorted(range(3), key=lambda i: handles[i].begun + handles[i].ended)
        assert order == ([0, 1, 2] if low_first else [2, 1, 0])


def test_a_full_queue_refuses(monkeypatch):
    [prompt] = texts(MAIN, (4,))
    with open_engine(max_running_requests=1, max_queued_requests=2) as engine:
        slow_launches(engine, 0.02, monkeypatch)
        running = engine.submit(prompt, max_new_tokens=40, ignore_eos=True)
        next(iter(running._chunks.get, None))
        waiting = engine.submit([prompt, prompt], max_new_tokens=1)
        with pytest.raises(QueueFull, match="2 requests wait, max_queued_requests=2"):
            engine.submit(prompt)
        running.abort()
        assert [len(h.result(60).tokens) for h in waiting] == [1, 1]
        assert len(engine.generate(prompt, max_new_tokens=1).tokens) == 1


def test_errors_name_what_is_wrong(engine):
    [prompt] = texts(MAIN, (4,))
    for request, message in (
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"n": 0}, "n=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"stop": ""}, "stop=''"),
        ({"stop_token_ids": [24]}, "24 is no token id"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.generate(prompt, **request)
    with pytest.raises(ConfigError, match="has 100 tokens; between 1 and 96 fit"):
        engine.generate([0] * 100)
    with pytest.raises(ConfigError, match="the prompt is empty"):
        engine.generate([])
    assert [h.rid for h in engine.submit([prompt, prompt], rid="twice", max_new_tokens=80, ignore_eos=True)] == [
        "twice-0",
        "twice-1",
    ]
    with pytest.raises(ConfigError, match="rid='twice-1' names a request that has not ended"):
        engine.submit(prompt, rid="twice-1")
    engine.abort_all()
    assert idle(engine)
    for settings, message in (
        ({"page_sise": 4}, "Engine has no setting 'page_sise'"),
        ({"page_size": 0}, "page_size=0"),
        ({"context_length": 10**6}, "context_length=1000000 exceeds"),
        ({"max_total_tokens": 4}, "too few for one"),
        ({"schedule_policy": "lifo"}, "schedule_policy='lifo'"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_engine(**settings)


def test_an_answer_that_cannot_be_decoded_fails_alone():
    class Broken(tiny.CharTokenizer):
        def decode(self, ids, skip_special_tokens=True):
            if self.broken:
                raise RuntimeError("this tokenizer is broken")
            return super().decode(ids, skip_special_tokens)

    tokenizer = Broken()
    made = case_of(MAIN)
    params = jaxspec.ModelParams(made.params.tree, made.params.config, tokenizer)
    [prompt] = texts(MAIN, (4,))
    with jaxspec.Engine(params, **made.drafting, **SETTINGS) as engine:
        tokenizer.broken = True
        with pytest.raises(RuntimeError, match="this tokenizer is broken"):
            engine.submit(prompt, max_new_tokens=40).result(60)
        tokenizer.broken = False
        assert len(engine.generate(prompt, max_new_tokens=2, ignore_eos=True).tokens) == 2
        assert idle(engine)


# The end.


def test_drain_and_close(monkeypatch):
    [prompt] = texts(MAIN, (4,))
    engine = open_engine()
    slow_launches(engine, 0.005, monkeypatch)
    handle = engine.submit(prompt, max_new_tokens=12, ignore_eos=True)
    assert not engine.drain(0.0)
    with pytest.raises(EngineStopped, match="draining"):
        engine.submit(prompt)
    assert engine.drain() and len(handle.result(0).tokens) == 12
    engine.close()
    engine.close()
    with pytest.raises(EngineStopped, match="closed"):
        engine.submit(prompt)
    with pytest.raises(EngineStopped, match="closed"):
        engine.flush_cache()

    with open_engine() as engine:
        slow_launches(engine, 0.005, monkeypatch)
        handle = engine.submit(prompt, max_new_tokens=80, ignore_eos=True)
    with pytest.raises(EngineStopped, match="closed"):
        handle.result(10)


def test_the_cache_is_flushed_only_when_nothing_runs(engine, monkeypatch):
    [prompt] = texts(MAIN, (17,), seed=21)
    assert engine.generate(prompt, max_new_tokens=2).stats.cached_tokens == 0
    assert engine.generate(prompt, max_new_tokens=2).stats.cached_tokens == 16
    assert engine.generate(prompt, max_new_tokens=2, cache_salt="other").stats.cached_tokens == 0
    slow_launches(engine, 0.005, monkeypatch)
    handle = engine.submit(prompt, max_new_tokens=30, ignore_eos=True)
    assert not engine.flush_cache()
    assert engine.flush_cache(timeout=30)
    handle.result(1)
    assert engine.stats().cached_pages == 0
    assert engine.generate(prompt, max_new_tokens=2).stats.cached_tokens == 0


def test_a_launch_that_raises_fails_the_requests_in_flight_and_no_others(monkeypatch):
    prompts = texts(MAIN, (9, 5, 12, 7), seed=2)
    with open_engine() as engine:
        launch, fail = engine._core.device.launch, threading.Event()

        def injected(what):
            if fail.is_set():
                fail.clear()
                raise RuntimeError("injected")
            return launch(what)

        monkeypatch.setattr(engine._core.device, "launch", injected)
        for turn in range(2):
            handles = [engine.submit(p, max_new_tokens=60, ignore_eos=True) for p in prompts]  # two of them wait
            next(iter(handles[0]._chunks.get, None))
            next(iter(handles[1]._chunks.get, None))
            fail.set()
            for handle in handles[:2]:
                with pytest.raises(LaunchFailed, match="injected"):
                    handle.result(60)
            if not turn:
                for prompt, handle in zip(prompts[2:], handles[2:], strict=True):
                    assert told(handle.result(60)) == told(alone(MAIN, prompt, max_new_tokens=60, ignore_eos=True))
                assert idle(engine) and engine.stats().cached_pages > 0
        for handle in handles[2:]:
            with pytest.raises(EngineStopped):
                handle.result(60)
        with pytest.raises(EngineStopped, match="stopped"):
            engine.submit(prompts[0])
        with pytest.raises(EngineStopped, match="stopped"):
            engine.flush_cache()


# Activations that are not numbers.

BAD = 3
"""A token whose embedding is NaN."""


def test_a_prompt_or_an_answer_that_becomes_nan_ends_with_an_error():
    made = case_of("none")
    tree = made.params.tree
    embedder = {"embedding": tree["embedder"]["embedding"].at[BAD].set(float("nan"))}
    head = {"kernel": tree["embedder"]["embedding"].T}  # sound
    damaged = jaxspec.ModelParams(
        {"head": head, **tree, "embedder": embedder}, dataclasses.replace(made.params.config, tie_embeddings=False)
    )
    [prompt] = [[t for t in text if t != BAD] for text in texts("none", (9,), seed=2)]
    ask = {"max_new_tokens": 12, "ignore_eos": True, "algorithm": "none"}
    with pytest.raises(jaxspec.NotANumber, match="request '1' ends after 0 tokens behind a prompt of 2: .*NaN"):
        jaxspec.generate(damaged, [prompt, [0, BAD]], **ask)
    with pytest.raises(jaxspec.NotANumber, match="request '0' ends after 1 tokens"):
        jaxspec.generate(damaged, prompt, logit_bias={BAD: 100.0}, **ask)
    without = {"logit_bias": {BAD: -100.0}, **ask}
    assert jaxspec.generate(damaged, prompt, **without).tokens == jaxspec.generate(made.params, prompt, **without).tokens


@pytest.mark.parametrize("name", ["ngram", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n != "ngram")])
def test_nan_ends_the_request_that_has_it_and_no_other(name, checked_books, monkeypatch):
    ask = {"max_new_tokens": 24, "ignore_eos": True}
    with open_engine(name, max_running_requests=3) as engine:
        device, scheduler, sick = engine._core.device, engine._core.scheduler, set()
        launch = device.launch

        def infected(what):
            for row in scheduler.rows:
                if row is not None and row.job.request.rid in sick and row.known >= row.fill:
                    device.memory.pools = with_nan(device.memory.pools, np.array(row.pages[:1]))
                    sick.discard(row.job.request.rid)
            return launch(what)

        monkeypatch.setattr(device, "launch", infected)
        for turn in range(3):  # an engine that has lost a launch twice would stop
            prompts = texts(name, (9, 14, 5), seed=10 + turn)
            handles = []
            for i, prompt in enumerate(prompts):
                handles.append(engine.submit(prompt, **ask))
                sick |= {handles[-1].key} if i == 1 else set()
            with pytest.raises(jaxspec.NotANumber, match=r"ends after \d+ tokens behind a prompt of 14: .*NaN"):
                handles.pop(1).result(60)
            del prompts[1]
            for prompt, handle in zip(prompts, handles, strict=True):
                assert handle.result(60).tokens == alone(name, prompt, **ask).tokens
        assert not sick and idle(engine)
