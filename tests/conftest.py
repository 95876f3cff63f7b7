"""Shared by all tests: jaxspec's core signatures check shapes and types while tests run."""

import importlib.util
import os

# Most of the suite's time is spent on compiling tiny programs; LLVM's optimiser is a third of that and changes no result.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("JAXSPEC_COMPILATION_CACHE", "0")

import gc  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

CHECKED = ("jaxspec.sampling", "jaxspec.verify", "jaxspec.tree", "jaxspec.kvcache")

if importlib.util.find_spec("beartype"):  # a GPU machine may lack it
    install_import_hook(CHECKED, "beartype.beartype")


@pytest.fixture(autouse=True, scope="module")
def drop_compiled_programs():
    """Programs of one file serve no other; a process that keeps thousands runs out of memory maps and aborts."""
    yield
    from jaxspec import runtime

    runtime.forget_compiled()
    jax.clear_caches()
    gc.collect()
