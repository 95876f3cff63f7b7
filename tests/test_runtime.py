"""Settings of XLA: only on a GPU, and never over the user's own."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from jaxspec import runtime


def test_a_cpu_gets_no_gpu_options():
    assert jax.default_backend() != "cpu" or runtime.compiler_options() == {}


@pytest.mark.parametrize(
    ("flags", "kept"),
    [("", True), ("--xla_gpu_autotune_level=0", True), ("--xla_gpu_autotune_level=0 --xla_gpu_graph_min_graph_size=7", False)],
)
def test_a_flag_of_the_user_wins(monkeypatch, flags, kept):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert ("xla_gpu_graph_min_graph_size" in runtime.compiler_options()) is kept


@pytest.mark.parametrize("option", runtime.XLA_OPTIONS.items())
def test_this_jaxlib_knows_every_option(option):
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=dict([option]))
    assert float(compiled(1.0)) == 2.0


def test_threads_may_ask_for_programs_at_once(monkeypatch):
    """More programs than are kept, from many threads: each thread gets the program that it asked for."""
    monkeypatch.setattr(runtime, "_COMPILED", {})
    monkeypatch.setattr(runtime, "MAX_COMPILED", 2)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    function = jax.jit(lambda x: x + x.shape[0])

    def ask(i: int) -> int:
        x = jnp.zeros(1 + i % 5, jnp.int32)
        program, _ = runtime.compiled(function, x)
        return int(program(x)[0]) - i % 5

    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, range(64)))
    finally:
        sys.setswitchinterval(before)
    assert found == [1] * 64 and len(runtime._COMPILED) <= 2
