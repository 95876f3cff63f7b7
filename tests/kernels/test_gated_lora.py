"""The adapter's second half as a kernel, against the reference."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import layers
from pallas_kernels import device
from pallas_kernels.lora import reference
from pallas_kernels.lora import triton_gated as kernels
from pallas_kernels.product import api as product
from pallas_kernels.product.reference import gate_values
from tests.kernels.attention_cases import pretend_h200


def with_both_types(*cases):
    """Every case in one of the two types by turns; in the other one, too, where slow tests run."""
    types = (jnp.float32, jnp.bfloat16)
    slow = [pytest.mark.slow]
    return [pytest.param(*c, t, marks=[] if i % 2 == j else slow) for i, c in enumerate(cases) for j, t in enumerate(types)]


@pytest.mark.parametrize(("shape", "parts", "dtype"), with_both_types(((1, 8), (1, 1)), ((3, 7), (2, 4)), ((1, 1), (4, 2))))
def test_the_kernel_does_what_the_formula_says(dtype, shape, parts):
    keys = jax.random.split(jax.random.key(0), 4)
    y = jax.random.normal(keys[0], (parts[0], *shape, 128))
    hidden = jax.random.normal(keys[1], (parts[1], *shape, 48))
    b = jax.random.normal(keys[2], (48, 128)).astype(dtype)
    gate = jax.random.bernoulli(keys[3], 0.6, (*shape, 1)).at[0, 0].set(False)
    found = kernels.gated_lora(y, hidden, b, gate, scale=0.5, interpret=True)
    own, hidden = y.sum(0).astype(dtype), hidden.sum(0).astype(dtype)
    wanted = reference.gated_lora(*(a.astype(jnp.float32) for a in (own, hidden, b)), gate, scale=0.5)
    assert found.dtype == dtype
    tolerance = 2e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=tolerance, atol=tolerance)
    closed = ~np.asarray(gate)[..., 0]
    np.testing.assert_array_equal(np.asarray(found, np.float32)[closed], np.asarray(own, np.float32)[closed])


@pytest.mark.parametrize(
    ("shape", "parts", "silu", "dtype"), with_both_types(((1, 8), 1, True), ((1, 5), 3, True), ((3, 7), 2, False))
)
def test_both_products_in_one_array_and_an_activation(dtype, shape, parts, silu):
    """x @ a behind x @ w; gates and values by blocks of b; closed rows and b = 0 change no bit."""
    keys = jax.random.split(jax.random.key(3), 3)
    both = jax.random.normal(keys[0], (parts, *shape, 256 + 32)).astype(dtype if parts == 1 else jnp.float32)
    blocks = np.repeat([0, 1], 128)
    b = (jax.random.normal(keys[1], (32, 256)) * (np.repeat([0, 1], 16)[:, None] == blocks)).astype(dtype)
    gate = jax.random.bernoulli(keys[2], 0.6, (*shape, 1)).at[0, 0].set(False)

    def run(b, gate):
        out = kernels.gated_lora(both, None, b, gate, scale=0.5, blocks=blocks, silu=silu, interpret=True)
        assert out.dtype == dtype and out.shape == (*shape, 128 if silu else 256)
        return np.asarray(out, np.float32)

    total = both.astype(jnp.float32).sum(0).astype(dtype).astype(jnp.float32)
    wanted = reference.gated_lora(total[..., :256], total[..., 256:], b.astype(jnp.float32), gate, scale=0.5)
    wanted = gate_values(wanted.astype(dtype).astype(jnp.float32)) if silu else wanted.astype(dtype).astype(jnp.float32)
    found, tolerance = run(b, gate), 4e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(found, np.asarray(wanted), rtol=tolerance, atol=tolerance)
    base = run(b, jnp.zeros_like(gate))
    closed = ~np.asarray(gate)[..., 0]
    np.testing.assert_array_equal(found[closed], base[closed])
    np.testing.assert_array_equal(run(jnp.zeros_like(b), jnp.ones_like(gate)), base)
    assert not np.array_equal(found, base)


@pytest.mark.parametrize("width", [64, 32])
def test_blocks_of_zeros_are_left_out(width):
    """Columns belong to blocks 1, none, 0 of b's rows, `width` columns each; narrower than a program's 64 they do not count."""
    blocks = np.repeat([1, -1, 0, 1], width)
    keys = jax.random.split(jax.random.key(1), 3)
    y, hidden = jax.random.normal(keys[0], (1, 2, 5, 4 * width)), jax.random.normal(keys[1], (2, 2, 5, 32))
    b = jax.random.normal(keys[2], (32, 4 * width)) * (np.repeat([0, 1], 16)[:, None] == blocks)
    gate = jnp.ones((2, 5, 1), bool)
    given = b if width == 32 else b.at[0, 0].set(jnp.nan)  # outside the block of that column: not read
    found = kernels.gated_lora(y, hidden, given, gate, scale=1.0, blocks=blocks, interpret=True)
    wanted = reference.gated_lora(y[0], hidden.sum(0), b, gate, scale=1.0)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", [(1, 0), (-1, -1)])
def test_blocks_too_small_for_a_product_are_read_whole(blocks):
    """Rank 8 of two modules: 16 rows suit a tensor core, the 8 of one module do not."""
    blocks = np.repeat(blocks, 64)
    keys = jax.random.split(jax.random.key(2), 3)
    y, hidden = jax.random.normal(keys[0], (1, 2, 5, 128)), jax.random.normal(keys[1], (2, 2, 5, 16))
    b = jax.random.normal(keys[2], (16, 128)) * (np.repeat([0, 1], 8)[:, None] == blocks)
    gate = jnp.ones((2, 5, 1), bool)
    assert kernels.serves(y[0], b)
    found = kernels.gated_lora(y, hidden, b, gate, scale=1.0, blocks=blocks, interpret=True)
    wanted = reference.gated_lora(y[0], hidden.sum(0), b, gate, scale=1.0)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rank", "count"), [(8, 2), (5, 16), (16, 3), (16, 1)])
def test_every_case_that_is_served_lowers_for_cuda(rank, count):
    rows, columns = rank * count, 64 * count
    shapes = (2, 1, 8, columns), (2, 1, 8, rows), (rows, columns), (1, 8, 1)
    types = jnp.float32, jnp.float32, jnp.bfloat16, bool
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]
    assert kernels.serves(jax.ShapeDtypeStruct((1, 8, 64), jnp.bfloat16), avals[2])
    run = jax.jit(lambda *x: kernels.gated_lora(*x, scale=2.0, blocks=np.repeat(np.arange(count), 64)))
    with pretend_h200(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Triton.*", DeprecationWarning)
        text = run.trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 1


def test_what_is_not_finite_becomes_nothing():
    y = jnp.zeros((1, 1, 4, 64)).at[0, 0, 1, 3].set(jnp.inf).at[0, 0, 2, 5].set(jnp.nan)
    gate = jnp.ones((1, 4, 1), bool)
    assert not np.asarray(
        kernels.gated_lora(y, jnp.zeros((1, 1, 4, 16)), jnp.zeros((16, 64)), gate, scale=1.0, interpret=True)
    ).any()


def test_a_product_with_an_adapter_takes_the_kernel(monkeypatch):
    x = jax.random.normal(jax.random.key(0), (2, 3, 32))
    w, a, b = (jax.random.normal(jax.random.key(i), shape) for i, shape in ((1, (32, 64)), (2, (32, 16)), (3, (16, 64))))
    gate = jnp.arange(3)[None, :, None] > jnp.zeros((2, 1, 1))
    layer = {"kernel": w, "lora": {"a": a, "b": b, "scale": 2.0, "gate": gate}}
    wanted, calls, kernel = layers.dense(x, layer), [], kernels.gated_lora
    monkeypatch.setattr(device, "capability", lambda: 9.0)
    monkeypatch.setattr(product, "product_parts", lambda rows, inputs, outputs: 2)
    monkeypatch.setattr(kernels, "gated_lora", lambda *args, **o: calls.append(args) or kernel(*args, interpret=True, **o))
    found = layers.dense(x, layer)
    assert len(calls) == 1 and calls[0][0].shape[0] == calls[0][1].shape[0] == 2
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert not kernels.serves(jnp.zeros((1, 65, 32)), b) and not kernels.serves(x, b[:8])
