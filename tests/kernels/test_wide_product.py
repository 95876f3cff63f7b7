"""The kernel for products of hundreds of rows, interpreted; its table; the benchmark that writes it."""

import functools
import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import layers
from pallas_kernels import device, product, wide_table
from tests.kernels.attention_cases import pretend_h200

KERNEL = product._kernel(wide=True)
needs_mosaic = pytest.mark.skipif(KERNEL is None, reason="the Mosaic GPU kernel needs jax >= 0.11")
# Rows, inputs, outputs; columns, depth, cuts, cluster, chunk; clusters at once. With few cores the interpreter hangs where
# clusters hand out their results in several pieces: the threads that it computes with all wait at barriers.
CASES = {
    "one tile": (40, 128, 128, (128, 64, 1, 1, 64), 1),
    "several turns, pieces": (200, 256, 128, (64, 64, 1, 1, 32), 2),
    "a ring that is refilled": (100, 768, 64, (64, 64, 1, 1, 64), 1),
    "shared columns, no rows for a program": (300, 256, 128, (64, 64, 1, 2, 64), 2),
    "cut along the inputs": (300, 256, 128, (64, 64, 2, 2, 64), 2),
    "another swizzle": (130, 128, 448, (224, 64, 1, 2, 224), 1),
}


def operands(rows, inputs, outputs, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(inputs), 2)
    return jax.random.normal(keys[0], (rows, inputs), dtype), jax.random.normal(keys[1], (inputs, outputs), dtype) / 8


def exact(x, w):
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64)


def interpreted():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=True)


@needs_mosaic
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_multiplies(case, monkeypatch, capfd):
    rows, inputs, outputs, tiling, at_once = CASES[case]
    tiling, (x, w) = KERNEL.Tiling(*tiling), operands(rows, inputs, outputs)
    monkeypatch.setitem(KERNEL.AT_ONCE, tiling.cluster, at_once)
    parts = KERNEL.partial_products(x, w, tiling, interpret=interpreted())
    assert parts.shape == (tiling.cuts, rows, outputs)
    found = np.asarray(KERNEL.add_parts(parts, tiling, inputs))
    np.testing.assert_allclose(found, exact(x, w), rtol=1e-5, atol=1e-4)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@needs_mosaic
@pytest.mark.parametrize("tiling", [(128, 64, 1, 2, 64), (224, 64, 1, 1, 112)])
def test_gates_and_values_in_one(tiling, monkeypatch, capfd):
    tiling = KERNEL.Tiling(*tiling)
    monkeypatch.setitem(KERNEL.AT_ONCE, tiling.cluster, 1)
    x, w = operands(140, 128, 4 * tiling.columns // 2)
    assert tiling.gates(140, *w.shape)
    found = KERNEL.partial_products(x, w, tiling, dtype=x.dtype, gated=True, interpret=interpreted())
    gate, value = np.split(exact(x, w), 2, axis=1)
    assert found.shape == (1, 140, w.shape[1] // 2)
    np.testing.assert_allclose(np.asarray(found[0], np.float32), gate / (1 + np.exp(-gate)) * value, rtol=2e-2, atol=2e-2)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@needs_mosaic
def test_what_does_not_fit_is_refused():
    tiling = KERNEL.Tiling(224, chunk=112)
    assert tiling.fits(512, 4096, 28672) and tiling.gates(512, 4096, 28672)
    assert not tiling.fits(513, 4096, 28672)
    assert not tiling.fits(512, 4096, 4096)
    assert not KERNEL.Tiling(512).fits(512, 4096, 4096)  # more columns than wgmma takes
    assert not KERNEL.Tiling(256, cluster=3).fits(512, 4096, 4096)
    assert not KERNEL.Tiling(256, cuts=3).fits(512, 4096, 4096)
    assert not KERNEL.Tiling(224, chunk=224).gates(512, 4096, 28672)  # half a tile is less than a piece
    assert not KERNEL.Tiling(256, cuts=2).gates(512, 4096, 28672)
    with pytest.raises(ValueError, match="does not fit a product of 5 rows"):
        KERNEL.partial_products(*operands(5, 100, 64), KERNEL.Tiling(64))
    with pytest.raises(ValueError, match="cannot gate a product"):
        KERNEL.partial_products(*operands(5, 128, 64), KERNEL.Tiling(64), gated=True)


@needs_mosaic
def test_every_tile_has_one_cluster():
    for groups, tiles, cuts, most in ((2, 128, 1, 66), (2, 7, 2, 3), (1, 5, 1, 9)):
        work = KERNEL._Work(groups, tiles, cuts, 4, most)
        turns = [int(work.turns(c)) for c in range(work.clusters)]
        assert work.clusters <= most and max(turns) == -(-work.total // most)
        seen = [tuple(map(int, work.at(c, t))) for c, count in enumerate(turns) for t in range(count)]
        assert sorted(seen) == [(g, n, k) for g in range(groups) for n in range(tiles) for k in range(cuts)]


@needs_mosaic
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_candidates_lower_for_cuda(dtype):
    script = benchmark()
    for name, ways in script.candidates("kernel", 512).items():
        (inputs, outputs), way = script.SHAPES[name], ways[0]
        x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((512, inputs), (inputs, outputs)))
        tiling = KERNEL.Tiling(*way.tiling)
        run = jax.jit(lambda x, w, t=tiling, g=way.gated: KERNEL.partial_products(x, w, t, gated=g))
        with pretend_h200():
            text = run.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu_v2") == 1


@needs_mosaic
def test_entries_of_the_table_are_legal():
    for (capability, rows, inputs, outputs), entry in wide_table.MEASURED.items():
        assert capability == 9.0 and rows == product.WIDE[-1]
        assert KERNEL.Tiling(*entry).fits(rows, inputs, outputs)


@needs_mosaic
def test_models_take_the_kernel_where_the_table_has_it(monkeypatch):
    calls, kernel = [], KERNEL.partial_products

    def run(x, w, tiling, **options):
        calls.append(x.shape[0])
        return kernel(x, w, tiling, interpret=interpreted(), **options)

    table = {(9.0, 512, 128, 64): (64, 64, 2, 1), (9.0, 512, 64, 128): (128, 64, 1, 1)}
    monkeypatch.setattr(device, "capability", lambda: 9.0)
    monkeypatch.setattr(product, "MEASURED_WIDE", table)
    monkeypatch.setattr(KERNEL, "partial_products", run)
    monkeypatch.setitem(KERNEL.AT_ONCE, 1, 1)
    x, w = operands(390, 128, 64)
    np.testing.assert_allclose(np.asarray(layers.dense(x, {"kernel": w}), np.float32), exact(x, w), rtol=2e-2, atol=2e-2)
    x, w = operands(390, 64, 128)
    found = layers.gated(x, {"gate_up": {"kernel": w}}, "silu")
    wanted = layers.gate_values(x @ w, "silu")
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (found, wanted)), rtol=3e-2, atol=3e-2)
    assert calls == [390, 390]
    np.testing.assert_array_equal(product.product(x[:300], w), x[:300] @ w)
    assert calls == [390, 390]


@functools.cache
def benchmark():
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "kernels" / "sustained.py"
    spec = importlib.util.spec_from_file_location("sustained_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


def test_a_table_follows_from_measurements():
    def row(product, joules, way="xla", tiling=None, error=0.0):
        return {"product": product, "rows": 512, "way": way, "tiling": tiling, "gated": False, "ms": 0.1, "joules": joules,
                "error": error}  # fmt: skip

    fast, other = [192, 64, 1, 2, 64], [192, 64, 1, 1, 64]
    rows = {
        "a": row("qkv", 3.0), "b": row("qkv", 2.9, "cublas"), "c": row("qkv", 2.5, "kernel", other), "d": {"error": "hung"},
        "e": row("qkv", 2.4, "kernel", fast), "f": row("qkv", 1.0, "kernel", other, error=0.1),
        "g": row("out", 2.0), "h": row("out", 2.1, "kernel", [128, 64, 1, 2, 64]),
    }  # fmt: skip
    found = {}
    exec(benchmark().table_text(rows), found)  # the text is a module
    assert found["MEASURED"] == {(9.0, 512, 4096, 6144): tuple(fast)}
    exec(benchmark().table_text({}), found)
    assert found["MEASURED"] == {}


def test_what_the_chip_did_between_two_moments(monkeypatch, tmp_path):
    """A stand-in for nvidia-smi: it answers what it was asked for, once with what no number is."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\necho "$2" > "$0.asked"\necho "[N/A], 1, 2"\necho "700.0, 1400, 3201"\necho "680.0, 1300, 3201"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    sampler = benchmark().Sampler()
    sampler.reader.join(10)
    sampler.close()
    assert (tmp_path / "nvidia-smi.asked").read_text().strip() == "1"
    assert sampler.between(0.0, float("inf")) == {"watts": 690.0, "sm_mhz": 1350, "memory_mhz": 3201, "samples": 2}
    assert sampler.between(0.0, 1e-9) == {}
