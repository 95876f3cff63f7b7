"""A weight and an adapter's first matrix in one product, interpreted; where the layers of a model take it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import layers
from pallas_kernels import adapted_product, device, product
from pallas_kernels import gated_lora as second
from tests.kernels.attention_cases import pretend_h200

KERNEL = product._kernel()
pytestmark = pytest.mark.skipif(KERNEL is None, reason="the Mosaic GPU kernel needs jax >= 0.11")


def interpreted():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=True)


def operands(rows, inputs, outputs, rank, blocks=None, shape=None):
    keys = jax.random.split(jax.random.key(inputs), 4)
    x = jax.random.normal(keys[0], shape or (1, rows, inputs), jnp.bfloat16)
    w, a = (jax.random.normal(k, (inputs, n), jnp.bfloat16) / inputs**0.5 for k, n in ((keys[1], outputs), (keys[2], rank)))
    b = jax.random.normal(keys[3], (rank, outputs)) / rank**0.5
    if blocks is not None:
        b = b * (np.arange(rank)[:, None] // (rank // (blocks.max() + 1)) == blocks)
    return x, w, a, b.astype(jnp.bfloat16)


def exact(x, w):
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64)


CASES = {
    "whole tiles": (8, 256, 192, 64, (64, 64, 4, 1, 1)),
    "cuts inside tiles, two consumers": (13, 320, 384, 128, (128, 64, 8, 2, 1)),
    "two parts, one row": (1, 256, 64, 128, (64, 64, 2, 1, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_columns_go_on_behind_those_of_the_weight(case, monkeypatch, capfd):
    rows, inputs, outputs, rank, tiling = CASES[case]
    monkeypatch.setattr(device, "capability", lambda: 9.0)
    monkeypatch.setattr(adapted_product, "TILINGS", {(16, inputs, outputs, rank): tiling})
    x, w, a, b = operands(rows, inputs, outputs, rank)
    found = adapted_product.adapted_product(x, w, a, b, interpret=interpreted())
    tiling = KERNEL.Tiling(*tiling)
    counts = np.repeat(tiling.parts(inputs, outputs + rank), tiling.columns)
    assert found.shape == (counts.max(), 1, rows, outputs + rank)
    assert found.dtype == (jnp.bfloat16 if counts.max() == 1 else jnp.float32)
    exists = np.arange(counts.max())[:, None, None, None] < counts
    total = np.where(exists, np.asarray(found, np.float64), 0).sum(0)[0]
    tolerance = 2e-2 if counts.max() == 1 else 1e-4
    np.testing.assert_allclose(total, np.concatenate([exact(x[0], w), exact(x[0], a)], 1), rtol=tolerance, atol=tolerance)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def test_what_is_not_served(monkeypatch):
    monkeypatch.setattr(adapted_product, "TILINGS", {(16, 256, 128, 64): (64, 64, 4, 1, 1)})
    x, w, a, b = operands(8, 256, 128, 64)
    assert adapted_product.adapted_product(x, w, a, b) is None  # no GPU
    monkeypatch.setattr(device, "capability", lambda: 9.0)
    assert adapted_product.tiling_of(x, w, a) is not None
    assert adapted_product.tiling_of(x[:, :, :64], w[:64], a[:64]) is None
    assert adapted_product.tiling_of(x.astype(jnp.float32), w.astype(jnp.float32), a.astype(jnp.float32)) is None
    assert adapted_product.tiling_of(jnp.concatenate([x] * 3, 1), w, a) is None  # 24 rows
    monkeypatch.setattr(device, "capability", lambda: 8.0)
    assert adapted_product.tiling_of(x, w, a) is None and adapted_product.joins(x, w, a)
    assert not adapted_product.joins(jnp.concatenate([x] * 9, 1), w, a)  # 72 rows
    assert not adapted_product.joins(x, w, a[:, :32]) and not adapted_product.joins(x[:, :1], w, a)
    assert not adapted_product.joins(x.astype(jnp.float32), w, a)


@pytest.mark.parametrize(("rows", "parts"), [(8, 1), (8, 4), (40, 1)])
def test_elsewhere_xla_multiplies_both_at_once(rows, parts, monkeypatch):
    monkeypatch.setattr(device, "capability", lambda: 8.0)
    monkeypatch.setattr(adapted_product, "product_parts", lambda rows, inputs, outputs: parts)
    x, w, a, b = operands(rows, 256, 192, 64)
    found = adapted_product.adapted_product(x, w, a, b)
    assert found.shape == (parts, 1, rows, 256) and found.dtype == (jnp.bfloat16 if parts == 1 else jnp.float32)
    total = np.asarray(found, np.float64).sum(0)[0]
    tolerance = 2e-2 if parts == 1 else 1e-4
    np.testing.assert_allclose(total, np.concatenate([exact(x[0], w), exact(x[0], a)], 1), rtol=tolerance, atol=tolerance)


def test_numbers_of_parts_are_even():
    """`gated_lora` adds up all parts of all columns."""
    for (most, inputs, outputs, rank), entry in adapted_product.TILINGS.items():
        tiling = KERNEL.Tiling(*entry)
        assert all(tiling.fits(rows, inputs, n) for rows in (1, most) for n in (outputs, rank))
        counts = tiling.parts(inputs, outputs + rank)
        assert counts.min() == counts.max()
        assert counts.size * inputs // tiling.depth // tiling.steps <= 132  # programs, all at once on an H200


def test_what_is_read_ahead_are_the_blocks_that_count():
    b = jnp.zeros((128, 256))
    assert adapted_product._ahead(b, np.repeat([1, -1, 0, 1], 64)).blocks == (1, -1, 0, 1)
    assert adapted_product._ahead(b, np.repeat([1, -1, 0, 1], 64)).tiling.depth == 64
    assert adapted_product._ahead(b, None).blocks == (0, 0, 0, 0)
    assert adapted_product._ahead(b, np.repeat([1, 0] * 4, 32)) is None  # changes within a tile
    assert adapted_product._ahead(jnp.zeros((96, 256)), None) is None
    assert adapted_product._ahead(jnp.zeros((128, 96)), None) is None


@pytest.mark.parametrize("shape", [(2, 3, 256), (1, 8, 256)])
def test_layers_with_an_adapter_take_it(shape, monkeypatch):
    blocks = np.repeat([0, 1], 128)
    x, w, a, b = operands(0, 256, 256, 128, blocks, shape)
    gate = jnp.broadcast_to(jnp.arange(shape[1])[None, :, None] > 0, (*shape[:2], 1))
    mlp = {"gate_up": {"kernel": w, "lora": dict(a=a, b=b, scale=2.0, gate=gate, blocks=blocks)}}
    wanted, plain = layers.gated(x, mlp, "silu"), layers.dense(x, mlp["gate_up"])
    calls, kernel = [], KERNEL.partial_products
    monkeypatch.setattr(device, "capability", lambda: 9.0)
    monkeypatch.setattr(adapted_product, "TILINGS", {(16, 256, 256, 128): (128, 64, 4, 2, 1)})

    def run(*args, **options):
        calls.append(options["ahead"])
        return kernel(*args, **options | {"interpret": interpreted()})

    gated = second.gated_lora
    monkeypatch.setattr(KERNEL, "partial_products", run)
    monkeypatch.setattr(second, "gated_lora", lambda *args, **o: gated(*args, **o | {"interpret": True}))
    found = layers.gated(x, mlp, "silu")
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=3e-2, atol=3e-2)
    found = layers.dense(x, mlp["gate_up"])
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(plain, np.float32), rtol=3e-2, atol=3e-2)
    assert [ahead.blocks for ahead in calls] == [(0, 0, 1, 1)] * 2


@pytest.mark.parametrize(("rows", "inputs", "outputs", "rank"), adapted_product.TILINGS)
def test_it_lowers_for_cuda(rows, inputs, outputs, rank, monkeypatch):
    monkeypatch.setattr(device, "capability", lambda: 9.0)
    shapes = (1, rows, inputs), (inputs, outputs), (inputs, rank), (rank, outputs)
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with pretend_h200():
        text = jax.jit(adapted_product.adapted_product).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1
