"""Settings of XLA: only on a GPU, and never over the user's own."""

from __future__ import annotations

import jax
import pytest

from jaxspec import runtime


def test_a_cpu_gets_no_gpu_options():
    assert jax.default_backend() != "cpu" or runtime.compiler_options() == {}


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("", True),
        ("--xla_gpu_autotune_level=0", True),
        ("--xla_gpu_autotune_level=0 --xla_gpu_graph_min_graph_size=7", False),
    ],
)
def test_a_flag_of_the_user_wins(monkeypatch, flags, kept):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert ("xla_gpu_graph_min_graph_size" in runtime.compiler_options()) is kept


@pytest.mark.parametrize("option", runtime.XLA_OPTIONS.items())
def test_this_jaxlib_knows_every_option(option):
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=dict([option]))
    assert float(compiled(1.0)) == 2.0
