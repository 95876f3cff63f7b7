"""Shared by all tests: jaxspec's core signatures check shapes and types while tests run."""

import importlib.metadata
import importlib.util
import os

# Most of the suite's time goes into compiling tiny programs: LLVM's optimiser would be a third of that and changes no result,
# a module per thread costs more than two cores give back, and the fusion emitters of jaxlib 0.10 (0.11 knows no others) take
# three times as long as the ones before them.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", FLAGS)
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
