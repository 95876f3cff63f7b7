"""A weight and an adapter's first matrix in one product, and the layers that take it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import layers
from pallas_kernels import device
from pallas_kernels.lora import api
from pallas_kernels.lora import triton_gated as kernels


def operands(shape, outputs, rank, blocks=None):
    keys, inputs = jax.random.split(jax.random.key(0), 4), shape[-1]
    x = jax.random.normal(keys[0], shape, jnp.bfloat16)
    w, a = (jax.random.normal(k, (inputs, n), jnp.bfloat16) / inputs**0.5 for k, n in ((keys[1], outputs), (keys[2], rank)))
    b = jax.random.normal(keys[3], (rank, outputs)) / rank**0.5
    if blocks is not None:
        b = b * (np.arange(rank)[:, None] // (rank // (blocks.max() + 1)) == blocks)
    return x, w, a, b.astype(jnp.bfloat16)


def test_where_both_are_one_product(monkeypatch):
    x, w, a, _ = operands((1, 8, 256), 192, 64)

    def both(x=x, w=w, a=a):
        return api.product_and_hidden(x, w, a)

    assert both() is None  # no GPU
    monkeypatch.setattr(device, "capability", lambda: 8.0)
    wanted = np.asarray(x, np.float64)[0] @ np.concatenate([np.asarray(w, np.float64), np.asarray(a, np.float64)], 1)
    np.testing.assert_allclose(np.asarray(both(), np.float32)[0], wanted, rtol=2e-2, atol=2e-2)
    assert both(jnp.concatenate([x] * 8, 1)) is not None and both(jnp.concatenate([x] * 9, 1)) is None  # 64 and 72 rows
    assert both(x[:, :1]) is None  # XLA multiplies a single row element by element
    assert both(a=a[:, :32]) is None and both(w=w[:, :96]) is None  # XLA would copy them
    assert both(*(each.astype(jnp.float32) for each in (x, w, a))) is None and both(w=w.astype(jnp.float32)) is None


@pytest.mark.parametrize("shape", [(2, 3, 256), (1, 8, 256)])
def test_layers_with_an_adapter_take_it(shape, monkeypatch):
    blocks = np.repeat([0, 1], 128)
    x, w, a, b = operands(shape, 256, 128, blocks)
    gate = jnp.broadcast_to(jnp.arange(shape[1])[None, :, None] > 0, (*shape[:2], 1))
    layer = {"kernel": w, "lora": dict(a=a, b=b, scale=2.0, gate=gate, blocks=blocks)}
    biased = {**layer, "bias": jnp.arange(256.0).astype(jnp.bfloat16) / 64}
    wanted = [layers.gated(x, layer, "silu"), *(layers.dense(x, each) for each in (layer, biased))]
    calls, gated = [], kernels.gated_lora
    monkeypatch.setattr(device, "capability", lambda: 9.0)

    def run(y, hidden, *args, **options):
        calls.append((y.shape, hidden))
        return gated(y, hidden, *args, **options | {"interpret": True})

    monkeypatch.setattr(kernels, "gated_lora", run)
    every = [layers.gated(x, layer, "silu"), layers.dense(x, layer)]
    assert calls == [((1, *shape[:2], 256 + 128), None)] * 2
    every.append(layers.dense(x, biased))  # two products, the bias in one of them
    assert calls[2][0] == (1, *shape[:2], 256) and calls[2][1] is not None
    for found, expected in zip(every, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=3e-2, atol=3e-2)
