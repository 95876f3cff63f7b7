"""A residual sum with the norm behind it as one kernel, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device
from pallas_kernels.layer import api, reference
from pallas_kernels.layer import triton_add_norm as kernels
from tests.kernels.attention_cases import pretend_h200


def operands(shape, parts, dtype, of_parts):
    keys = jax.random.split(jax.random.key(shape[-1]), 3)
    x = jax.random.normal(keys[0], shape).astype(dtype)
    return x, jax.random.normal(keys[1], (parts, *shape)).astype(of_parts), jax.random.normal(keys[2], shape[-1:]).astype(dtype)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(
    ("shape", "parts", "dtype", "of_parts"),
    [
        ((2, 13, 64), 1, jnp.float32, jnp.float32),
        ((1, 25, 576), 3, jnp.bfloat16, jnp.float32),
        ((17, 100), 2, jnp.float32, jnp.float32),
        ((20, 1, 2048), 1, jnp.float16, jnp.float16),
    ],
)
def test_the_kernel_adds_and_norms(shape, parts, dtype, of_parts, plus_one):
    x, p, scale = operands(shape, parts, dtype, of_parts)
    assert kernels.serves(x, p)
    total, normed = kernels.add_norm(x, p, scale, eps=1e-5, plus_one=plus_one, interpret=True)
    wanted = reference.add_norm(x, p, scale, eps=1e-5, plus_one=plus_one)
    assert total.shape == normed.shape == shape and total.dtype == normed.dtype == dtype
    np.testing.assert_array_equal(total, wanted[0])
    rounding = 1e-6 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (normed, wanted[1])), rtol=rounding, atol=rounding)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    x, p, scale = operands((9, 192), 4, jnp.float32, jnp.float32)
    every = kernels.add_norm(x, p, scale, eps=1e-6, interpret=True)
    few = kernels.add_norm(x[4:6], p[:, 4:6], scale, eps=1e-6, interpret=True)
    for a, b in zip(every, few, strict=True):
        np.testing.assert_array_equal(a[4:6], b)


def test_what_is_not_served():
    x, p, _ = operands((32, 64), 1, jnp.float32, jnp.float32)
    assert kernels.serves(x, p) and not kernels.serves(x[:16], p[:, :16])
    assert not kernels.serves(jnp.zeros((32, 64), jnp.int32), p)
    assert not kernels.serves(jnp.zeros((2000, 64)), p) and not kernels.serves(x[:0], p)
    assert not kernels.serves(jnp.zeros((32, 16384)), p)


def test_layers_use_it_on_a_gpu_and_it_has_derivatives(monkeypatch):
    x, p, scale = operands((3, 7, 64), 2, jnp.float32, jnp.float32)

    def run(x, p, scale):
        total, normed = api.add_norm(x, p, scale, eps=1e-5)
        return jnp.sum(total * jnp.cos(normed))

    wanted = jax.value_and_grad(run, (0, 1, 2))(x, p, scale)
    calls, kernel = [], kernels.add_norm
    monkeypatch.setattr(device, "capability", lambda: 9.0)
    monkeypatch.setattr(kernels, "add_norm", lambda *a, **o: calls.append(o) or kernel(*a, interpret=True, **o))
    np.testing.assert_allclose(run(x, p, scale), wanted[0], rtol=1e-6)
    assert calls == [{"eps": 1e-5, "plus_one": False}]
    for a, b in zip(jax.grad(run, (0, 1, 2))(x, p, scale), wanted[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parts", [1, 4])
def test_lowers_for_cuda(parts):
    shapes = (2, 4096), (parts, 2, 4096), (4096,)
    avals = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, (jnp.bfloat16, jnp.float32, jnp.bfloat16), strict=True)]
    with pretend_h200():
        run = jax.jit(lambda *a: kernels.add_norm(*a, eps=1e-5))
        text = run.trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 1
