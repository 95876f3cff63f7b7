"""The engine's tests share a few tiny models: their programs are kept from file to file."""

from __future__ import annotations

import pytest

from jaxspec import runtime
from jaxspec.engine import engine as engine_module
from tests.conftest import drop_programs
from tests.engine.by_hand import PoisonedDevice
from tests.engine.running import idle, open_engine


@pytest.fixture(autouse=True, scope="package")
def keep_programs():
    """Programs of all files of this folder, at most a few hundred."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "MAX_COMPILED", 256)
        yield
    drop_programs()


@pytest.fixture(autouse=True, scope="module")
def drop_compiled_programs():
    """In place of the one of all tests, which drops them after each file."""


@pytest.fixture(scope="module")
def checked_books():
    """The books are checked after every launch, and what nobody may read holds NaN before it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSPEC_CHECK_PAGES", "1")
        patch.setattr(engine_module, "Device", PoisonedDevice)
        yield


@pytest.fixture(scope="module")
def engine(checked_books):
    """One engine for the tests of requests; whatever they did, it ends idle and with all pages free or cached."""
    with open_engine(max_running_requests=4) as engine:
        yield engine
        assert idle(engine)
