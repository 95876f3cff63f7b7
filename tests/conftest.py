"""Shared by all tests: jaxspec's core signatures check shapes and types while tests run."""

import tests.fast_compile  # noqa: F401, I001  before jax

import gc
import importlib.util

import jax
import pytest
from jaxtyping import install_import_hook

CHECKED = ("jaxspec.sampling", "jaxspec.verify", "jaxspec.trees.tree", "jaxspec.kvcache")

# Tracing makes objects by the million, none of them in cycles that matter: a fifth of its time went into looking for some.
gc.freeze()
gc.set_threshold(200_000, 50, 50)

if importlib.util.find_spec("beartype"):  # a GPU machine may lack it
    install_import_hook(CHECKED, "beartype.beartype")


@pytest.fixture(autouse=True, scope="module")
def drop_compiled_programs():
    """Programs of one file serve no other; a process that keeps thousands runs out of memory maps and aborts."""
    yield
    drop_programs()


def drop_programs() -> None:
    """Forgets everything that was compiled or traced."""
    from jaxspec import runtime
    from jaxspec.engine import kept

    kept.forget()
    runtime.forget_compiled()
    jax.clear_caches()
    gc.collect()
