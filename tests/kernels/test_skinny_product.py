"""The kernel for products of a few rows, interpreted; the table of measured tilings; the place where models ask for it."""

import dataclasses
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import layers
from pallas_kernels import device
from pallas_kernels.product import api as product
from pallas_kernels.product import reference
from pallas_kernels.product import table as product_table
from tests.kernels.attention_cases import pretend_h200

KERNEL = product._kernel()
needs_mosaic = pytest.mark.skipif(KERNEL is None, reason="the Mosaic GPU kernel needs jax >= 0.11")
# rows, inputs, outputs; columns, depth, steps, consumers, cluster, chunk, begun
CASES = {
    "whole tiles": (5, 256, 256, (128, 64, 4, 1, 1)),
    "cuts inside tiles, two consumers": (13, 320, 384, (128, 64, 8, 2, 1)),
    "uneven numbers of parts, one piece a tile": (20, 320, 384, (64, 64, 7, 1, 1)),
    "shared tokens": (20, 256, 256, (128, 64, 3, 2, 2)),
    "shared tokens, several pieces": (100, 128, 512, (128, 64, 3, 1, 2)),
    "one piece a consumer, a step begun before the last is over": (100, 256, 512, (128, 64, 3, 2, 2, 128, 1)),
    "two pieces, a step begun": (20, 320, 384, (64, 64, 7, 1, 1, 16, 1)),
}


def operands(rows, inputs, outputs, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(inputs), 2)
    return jax.random.normal(keys[0], (rows, inputs), dtype), jax.random.normal(keys[1], (inputs, outputs), dtype)


def exact(x, w):
    return np.asarray(reference.product(x.astype(jnp.float32), w.astype(jnp.float32)))


def interpreted():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=True)


@needs_mosaic
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_multiplies(case, capfd):
    rows, inputs, outputs, tiling = CASES[case]
    tiling, (x, w) = KERNEL.Tiling(*tiling), operands(rows, inputs, outputs)
    parts = KERNEL.partial_products(x, w, tiling, interpret=interpreted())
    found = np.asarray(KERNEL.add_parts(parts, tiling, inputs))
    assert found.shape == (rows, outputs)
    np.testing.assert_allclose(found, exact(x, w), rtol=1e-5, atol=1e-4)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # how the interpreter reports one


@needs_mosaic
def test_half_precision_and_rounding():
    x, w = operands(3, 128, 128, jnp.float16)
    found = KERNEL.skinny_product(x, w, KERNEL.Tiling(64, 64, 2), interpret=interpreted())
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(found, np.float32), exact(x, w), rtol=2e-3, atol=2e-2)


@needs_mosaic
def test_every_element_is_written_by_the_parts_that_are_counted():
    for steps in range(1, 30):
        tiling = KERNEL.Tiling(64, 64, steps)
        owners = np.arange(5 * 7) // steps  # program of each (tile, step) for 5 tiles of 7 steps
        counted = [len(set(owners[t * 7 : (t + 1) * 7])) for t in range(5)]
        assert tiling.parts(7 * 64, 5 * 64).tolist() == counted


@needs_mosaic
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "tiling"),
    [(20, 128, 512, (128, 64, 2, 1, 1)), (5, 128, 512, (128, 64, 4, 1, 1)), (100, 128, 1024, (256, 64, 2, 2, 2))],
)
def test_gates_and_values_in_one(rows, inputs, outputs, tiling, capfd):
    x, w = operands(rows, inputs, outputs)
    w, tiling = w / 8, KERNEL.Tiling(*tiling)
    assert tiling.gates(rows, inputs, outputs)
    found = KERNEL.partial_products(x, w, tiling, dtype=x.dtype, gated=True, interpret=interpreted())
    wanted = reference.gated_product(x.astype(jnp.float32), w.astype(jnp.float32))
    assert found.shape == (1, rows, outputs // 2)
    np.testing.assert_allclose(np.asarray(found[0], np.float32), wanted, rtol=2e-2, atol=2e-2)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
    few = KERNEL.partial_products(
        x[:3], w, dataclasses.replace(tiling, cluster=1), dtype=x.dtype, gated=True, interpret=interpreted()
    )
    np.testing.assert_array_equal(few[0], found[0, :3])


@needs_mosaic
def test_what_cannot_gate_is_refused():
    x, w = operands(8, 256, 512)
    for tiling in (KERNEL.Tiling(64, 64, 4), KERNEL.Tiling(128, 64, 3)):  # no room for both halves; cut along the inputs
        with pytest.raises(ValueError, match="cannot gate"):
            KERNEL.partial_products(x, w, tiling, gated=True)


@needs_mosaic
def test_what_does_not_fit_is_refused():
    tiling = KERNEL.Tiling(128, 64, 4, 1, 2)
    assert tiling.fits(128, 256, 512)
    assert not tiling.fits(128, 256, 384)  # three tiles for clusters of two
    assert not tiling.fits(128, 100, 512)
    assert not tiling.fits(257, 256, 512)
    assert not tiling.fits(8, 256, 512)  # four rows per program of a cluster are no tile
    assert not KERNEL.Tiling(256, 64, 4).fits(128, 256, 512)  # 256 sums a thread
    with pytest.raises(ValueError, match="does not fit a product of 5 rows"):
        KERNEL.partial_products(*operands(5, 100, 64), KERNEL.Tiling(64, 64, 1))


@needs_mosaic
def test_gates_lower_for_cuda():
    tiling = KERNEL.Tiling(256, 64, 64, 2, 2)
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((100, 4096), (4096, 28672)))
    run = jax.jit(lambda x, w: KERNEL.partial_products(x, w, tiling, gated=True))
    with pretend_h200():
        text = run.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


@needs_mosaic
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("rows", "tiling"), [(1, (64, 128, 16, 1, 1)), (64, (128, 64, 16, 2, 2)), (128, (256, 64, 64, 2, 4))])
def test_lowers_for_cuda(rows, tiling, dtype):
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, 4096), (4096, 4096))]
    run = jax.jit(lambda x, w: KERNEL.skinny_product(x, w, KERNEL.Tiling(*tiling)))
    with pretend_h200():
        text = run.trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


@needs_mosaic
def test_entries_of_the_table_are_legal():
    for (capability, rows, inputs, outputs), entry in product_table.MEASURED.items():
        tiling = KERNEL.Tiling(*entry)
        assert capability == 9.0 and rows in product.ROWS
        assert tiling.fits(rows, inputs, outputs)
        programs = -(-inputs // tiling.depth * outputs // tiling.columns // tiling.steps)
        assert programs <= 132 + tiling.cluster  # all at once on an H200


def use_the_kernel(monkeypatch, entries):
    """Pretends to be an H200 whose table has these entries; the kernel runs interpreted."""
    calls, kernel = [], KERNEL.partial_products
    monkeypatch.setattr(device, "capability", lambda: 9.0)
    monkeypatch.setattr(product, "MEASURED", {(9.0, *key): entry for key, entry in entries.items()})

    def run(x, w, tiling, **options):
        calls.append(x.shape[0])
        return kernel(x, w, tiling, interpret=interpreted(), **options)

    monkeypatch.setattr(KERNEL, "partial_products", run)
    return calls


@needs_mosaic
def test_models_take_the_kernel_where_the_table_has_it(monkeypatch):
    calls = use_the_kernel(monkeypatch, {(8, 256, 128): (64, 64, 2, 1, 1), (8, 192, 128): (64, 64, 4, 1, 1)})
    for inputs, parts in ((256, 2), (192, 1)):  # two parts everywhere; two of one tile only, added at once
        x, w = operands(6, inputs, 128)
        x, layer = x.reshape(2, 3, inputs), {"kernel": w}
        found = layers.dense(x, layer)
        assert found.dtype == x.dtype and found.shape == (2, 3, 128)
        np.testing.assert_allclose(np.asarray(found, np.float32), exact(x, w), rtol=1e-2, atol=0.1)
        found = layers.dense(x, layer, adder="any")
        assert found.dtype == jnp.float32 and found.shape == (parts, 2, 3, 128)
        np.testing.assert_allclose(np.asarray(found.sum(0)), exact(x, w), rtol=1e-5, atol=1e-4)
    assert calls == [6] * 4


@needs_mosaic
def test_models_gate_in_the_kernel(monkeypatch):
    calls = use_the_kernel(monkeypatch, {(8, 128, 256): (128, 64, 2, 1, 1)})
    x, w = operands(6, 128, 256)
    layer = {"kernel": w / 8}
    found, wanted = layers.gated(x, layer, "silu"), reference.gated_product(x, w / 8)
    assert found.shape == (6, 128) and calls == [6]
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (found, wanted)), rtol=3e-2, atol=3e-2)
    layers.gated(x, layer, "gelu")
    assert calls == [6, 6]
    derivative = jax.grad(lambda x: layers.gated(x, layer, "silu").astype(jnp.float32).sum())(x)
    assert derivative.shape == x.shape and bool(jnp.isfinite(derivative.astype(jnp.float32)).all())


@needs_mosaic
def test_what_the_table_lacks_is_left_to_xla(monkeypatch):
    calls = use_the_kernel(monkeypatch, {(8, 128, 128): (64, 64, 2, 1, 1)})
    x, w = operands(6, 128, 128)
    wider = jnp.concatenate([x, x])
    for rows, weights in ((wider, w), (x, w[:, :64]), (x.astype(jnp.float32), w.astype(jnp.float32)), (x[:0], w)):
        np.testing.assert_array_equal(product.product(rows, weights), reference.product(rows, weights))
    monkeypatch.setattr(device, "capability", lambda: 8.0)
    np.testing.assert_array_equal(product.product(x, w), reference.product(x, w))
    assert calls == []


@needs_mosaic
def test_derivatives_are_those_of_a_product(monkeypatch):
    calls = use_the_kernel(monkeypatch, {(8, 256, 128): (64, 64, 2, 1, 1)})
    x, w = operands(6, 256, 128)
    product.product(x, w)
    assert calls == [6]
    found = jax.grad(lambda x, w: product.product(x, w).astype(jnp.float32).sum(), (0, 1))(x, w)
    wanted = jax.grad(lambda x, w: reference.product(x, w).astype(jnp.float32).sum(), (0, 1))(x, w)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2, atol=1e-2)


def benchmark():
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "kernels" / "product.py"
    spec = importlib.util.spec_from_file_location("product_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_table_follows_from_measurements():
    def row(us, tiling=None, error=1e-3, rows=64):
        row = {"rows": rows, "K": 128, "N": 256, "us": us, "error": error}
        return row if tiling is None else row | {"tiling": tiling}

    slow, fast, wrong = [64, 64, 2, 1, 1], [128, 64, 2, 1, 1, 128, 1], [256, 64, 2, 1, 1]
    rows = {
        "a": row(10.0),
        "b": row(9.0, slow),
        "c": row(6.5, fast),
        "d": row(5.0, wrong, error=0.1),
        "e": {"error": "hung"},
        "f": row(10.0, rows=128),
        "g": row(9.8, fast, rows=128),  # too little
        "h": row(10.0, rows=8),
        "i": row(7.5, fast, rows=8),  # few rows: the kernel begins later
    }
    found = {}
    exec(benchmark().table_text(rows), found)  # the text is a module
    assert found["MEASURED"] == {(9.0, 64, 128, 256): tuple(fast)}
    exec(benchmark().table_text({}), found)
    assert found["MEASURED"] == {}


@needs_mosaic
def test_tilings_that_are_tried_fit():
    script = benchmark()
    for rows, (inputs, outputs) in ((128, (4096, 28672)), (64, (14336, 4096)), (8, (4096, 4096))):
        tilings = script.choices(rows, inputs, outputs, 6)
        assert len(set(tilings)) == len(tilings) >= 4 and all(t.fits(rows, inputs, outputs) for t in tilings)
        assert (inputs, outputs) not in script.GATED or all(t.gates(rows, inputs, outputs) for t in tilings)
        floor = 2 * inputs * outputs / 4.8e12
        assert all(script.predicted(t, rows, inputs, outputs) > floor for t in tilings)
