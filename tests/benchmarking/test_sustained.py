"""The benchmark of products at the power limit, on tiny products, and the chip's power and clocks beside it."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import runtime

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"
SMALL = {"qkv": (64, 96), "out": (64, 64), "gate_up": (64, 448), "down": (224, 64), "head": (64, 128)}


def module(name: str):
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", FOLDER / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def sustained(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the benchmark adds its folders
    found = module("sustained")
    monkeypatch.setattr(found, "SHAPES", SMALL)
    return found


def test_numbers_of_a_pass_neither_grow_nor_vanish(sustained):
    ws = sustained.random_weights()
    assert len(ws["down"]) == 32
    x = jax.random.normal(jax.random.key(1), (8, 64), jnp.bfloat16)
    logits = np.asarray(sustained.verify_pass(x, ws))
    assert logits.shape == (8, 128) and 0.5 < logits.std() < 1.5


def test_every_row_is_there_with_its_rate(sustained, monkeypatch, tmp_path):
    monkeypatch.setattr(sustained, "LAYERS", 2)
    monkeypatch.setattr(sustained, "IN_PASS", {name: 1 if name == "head" else 2 for name in SMALL})
    monkeypatch.setattr(runtime, "use_compilation_cache", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    rows = sustained.Rows(tmp_path, "sustained", 60)
    with sustained.Watch() as watch:
        sustained.measure(rows, "xla", 8, 0.01, 0.02, watch)
    found = json.loads((tmp_path / "sustained.json").read_text())
    assert list(found) == [f"xla {name}" for name in (*SMALL, "round")] + ["zeros round"]
    flops = 2 * 8 * (2 * sum(k * n for name, (k, n) in SMALL.items() if name != "head") + 64 * 128)
    assert math.isclose(found["xla round"]["tflops"] * found["xla round"]["ms"] * 1e9, flops, rel_tol=1e-6)
    assert "joules" not in found["xla round"] and found["zeros round"]["way"] == "zeros"


def test_a_row_of_numbers_that_are_not_finite_is_an_error(sustained, monkeypatch, tmp_path):
    monkeypatch.setattr(runtime, "use_compilation_cache", lambda: None)
    monkeypatch.setattr(sustained, "random_weights", lambda: {n: [jnp.full(s, 1e30, jnp.bfloat16)] for n, s in SMALL.items()})
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    rows = sustained.Rows(tmp_path, "sustained", 60)
    with sustained.Watch() as watch:
        sustained.measure(rows, "cublas", 8, 0.01, 0.02, watch)
    assert "not finite" in rows.rows["cublas round"]["error"] and "ms" in rows.rows["cublas qkv"]


def test_what_the_chip_did_between_two_moments(monkeypatch, tmp_path):
    """A stand-in for nvidia-smi: it notes which GPU it is asked for, and answers once with what no number is."""
    tool = tmp_path / "nvidia-smi"
    lines = "".join(f'echo "{line}"\n' for line in ("[N/A], 1, 0x0", "700.0, 1400, 0x4", "680.0, 1300, 0x0"))
    tool.write_text(f'#!/bin/sh\necho "$1 $2" > "$0.asked"\n{lines}')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    with module("watch").Watch() as watch:
        watch.reader.join(10)
    assert (tmp_path / "nvidia-smi.asked").read_text().strip() == "-i 1"
    wanted = {"watts": 690.0, "highest_watts": 700.0, "sm_mhz": 1350, "lowest_sm_mhz": 1300, "highest_sm_mhz": 1400}
    assert watch.summary() == wanted | {"reasons": ["0x0", "0x4"], "samples": 2}
    assert watch.summary(0.0, 1e-9) == {}
