"""Shared by all tests: whatever is annotated with a shape is checked while tests run."""

import tests.fast_compile  # noqa: F401, I001  before jax

import gc
import importlib.util
import re
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).parents[1]
SHAPED = re.compile(r"^from jaxtyping import", re.MULTILINE)
CHECKED = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for package in ("jaxspec", "pallas_kernels")
    for file in sorted((ROOT / package).rglob("*.py"))
    if SHAPED.search(file.read_text())
]
"""All modules whose annotations speak of shapes."""

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
