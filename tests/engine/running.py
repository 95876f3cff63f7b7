"""Engines for tests: opened on a device that poisons, waited for, slowed down."""

from __future__ import annotations

import time

import jaxspec
from tests.engine.cases import SETTINGS, case_of

MAIN = "standalone tree"
"""The case of the tests that need one drafter: it has a tokenizer, and its drafts are right now and then."""


def open_engine(name: str = MAIN, **settings) -> jaxspec.Engine:
    """An engine on a device that poisons, in a test that uses `checked_books`."""
    made = case_of(name)
    engine = jaxspec.Engine(made.params, **made.drafting, **{**SETTINGS, **settings})
    engine._core.device.scheduler = engine._core.scheduler
    return engine


def idle(engine: jaxspec.Engine, seconds: float = 20.0) -> bool:
    """Whether the engine comes to rest with no page held."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        stats = engine.stats()
        if not (stats.running or stats.queued or engine._handles) and engine._core.idle:
            engine._core.scheduler.check()
            return stats.owned_pages == stats.shared_pages == 0 and stats.free_pages + stats.cached_pages == stats.total_pages
        time.sleep(0.01)
    return False


def slow_launches(engine: jaxspec.Engine, seconds: float, monkeypatch) -> None:
    """Every launch takes this much longer, so that a test can act while requests run."""
    launch = engine._core.device.launch

    def slowly(what):
        time.sleep(seconds)
        return launch(what)

    monkeypatch.setattr(engine._core.device, "launch", slowly)
