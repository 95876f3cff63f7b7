"""The engine's tests share a few tiny models: their programs are kept from file to file."""

from __future__ import annotations

import pytest

from jaxspec import runtime
from tests.conftest import drop_programs


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
