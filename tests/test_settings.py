"""What a process has set in JAX changes no answer: 64-bit types, strict ranks, NaN checks, precision of products, devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.cases import NAMES
from tests.fast_compile import FLAGS

ROOT = Path(__file__).parents[1]
STRICT = {"JAX_ENABLE_X64": "1", "JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_DEBUG_NANS": "1"}
SETTINGS = {"all": STRICT, "matmul precision": {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}, "x64": {"JAX_ENABLE_X64": "1"}}


def run(names, devices: int = 1, **environment: str) -> list[str]:
    """The lines that the script prints."""
    command = [sys.executable, "-m", "tests.settings_script", *names]
    flags = f"{FLAGS} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, **environment}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout.splitlines()


def test_strict_settings_change_no_answer_and_parameters_say_which_device():
    names = ("ngram", "eagle3 tree")
    lines = run(names, 2, **STRICT)
    assert lines == [f"ok {name}" for name in names] + ["devices ok"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_every_drafter_under_other_settings(settings):
    assert run(NAMES, **SETTINGS[settings]) == [f"ok {name}" for name in NAMES]
