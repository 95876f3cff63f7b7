"""The adapter's second half, rotary embedding and KV write in one kernel, against the reference."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layer import reference
from pallas_kernels.layer.triton_gated_rope_write import gated_rope_write, serves
from tests.kernels.attention_cases import pretend_h200
from tests.kernels.test_rope_write import arguments


def case(B, T, K, G, D, dtype, rank=32, parts=1, pool_dtype=None):
    _, cos, sin, k_pages, v_pages, page, slot = arguments(B, T, K, G, D, dtype, pool_dtype or dtype)
    keys, outputs = jax.random.split(jax.random.key(1), 3), K * (G + 2) * D
    blocks = np.tile(np.repeat([0] * G + [1, -1], D), K)  # queries, keys; values are not adapted
    y = jax.random.normal(keys[0], (parts, B, T, outputs + rank)).astype(dtype if parts == 1 else jnp.float32)
    b = jax.random.normal(keys[1], (rank, outputs)) * (np.arange(rank)[:, None] // (rank // 2) == blocks)
    gate = jax.random.bernoulli(keys[2], 0.6, (B, T, 1)).at[0, 0].set(False)
    page = page.at[0, -1].set(k_pages.shape[0])  # an entry that belongs to no page
    return y, b.astype(dtype), gate, cos, sin, k_pages, v_pages, page, slot, blocks


@pytest.mark.parametrize(
    ("shape", "dtype", "parts", "pool_dtype", "by_head"),
    [
        ((1, 8, 2, 4, 64), jnp.bfloat16, 1, None, True),
        ((3, 7, 2, 3, 32), jnp.bfloat16, 2, jnp.float32, False),
        ((3, 7, 2, 3, 32), jnp.bfloat16, 2, jnp.float32, True),
        ((2, 1, 1, 1, 128), jnp.float32, 3, None, False),
        pytest.param((1, 8, 2, 4, 64), jnp.bfloat16, 1, None, False, marks=pytest.mark.slow),
        pytest.param((2, 1, 1, 1, 128), jnp.float32, 3, None, True, marks=pytest.mark.slow),
    ],
)
def test_it_does_what_the_reference_does(shape, dtype, parts, pool_dtype, by_head):
    y, b, gate, *rest, blocks = case(*shape, dtype, parts=parts, pool_dtype=pool_dtype)
    B, T, K, G, D = shape
    assert serves(jnp.zeros((B, T, 4), dtype), b, blocks, rest[0], *rest[2:4])
    found = gated_rope_write(y, b, gate, *rest, scale=0.5, blocks=blocks, by_head=by_head, interpret=True)
    wanted = reference.gated_rope_write(y.astype(jnp.float32).sum(0).astype(dtype), b, gate, *rest, scale=0.5)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
        ours, theirs = (np.asarray(a, np.float32) for a in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def test_closed_rows_and_an_adapter_without_effect():
    y, b, gate, *rest, blocks = case(1, 8, 2, 2, 64, jnp.bfloat16)

    def run(b, gate):
        return gated_rope_write(y, b, gate, *rest, scale=2.0, blocks=blocks, interpret=True)

    changed, base = run(b, gate), run(b, jnp.zeros_like(gate))
    closed = ~np.asarray(gate)[..., 0]
    np.testing.assert_array_equal(np.asarray(changed[0])[closed], np.asarray(base[0])[closed])
    assert not np.array_equal(changed[0], base[0])
    page, slot = (np.asarray(a)[closed & (np.asarray(rest[4]) < rest[2].shape[0])] for a in rest[4:6])
    for ours, theirs in zip(changed[1:], base[1:], strict=True):
        np.testing.assert_array_equal(np.asarray(ours)[page, slot], np.asarray(theirs)[page, slot])
    for ours, theirs in zip(run(jnp.zeros_like(b), jnp.ones_like(gate)), base, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    poisoned = run(jnp.full_like(b, jnp.nan), jnp.ones_like(gate))
    assert not any(np.isnan(np.asarray(a, np.float32)).any() for a in poisoned)


def test_what_it_does_not_serve():
    y, b, _, cos, _, k_pages, v_pages, *_, blocks = case(1, 8, 2, 2, 64, jnp.bfloat16)
    assert not serves(y, b, np.roll(blocks, 16), cos, k_pages, v_pages)  # changes within a head
    assert not serves(y, b, blocks, cos[..., :16], k_pages, v_pages)  # partial rotation
    assert not serves(y, b[:16], blocks, cos, k_pages, v_pages)  # eight rows a block
    assert serves(y, b[:16], None, cos, k_pages, v_pages)


@pytest.mark.parametrize("rows", [8, 16, 64])
def test_it_lowers_for_cuda(rows):
    y, b, gate, *rest, blocks = case(1, 1, 2, 4, 128, jnp.bfloat16, rank=256)
    arrays = jax.eval_shape(lambda *a: a, y, b, gate, *rest)
    arrays = [jax.ShapeDtypeStruct((1, rows, *a.shape[2:]) if a.shape[:2] == (1, 1) else a.shape, a.dtype) for a in arrays]
    arrays[0] = jax.ShapeDtypeStruct((1, 1, rows, y.shape[-1]), jnp.bfloat16)
    run = jax.jit(lambda *a: gated_rope_write(*a, scale=2.0, blocks=blocks))
    with pretend_h200(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Triton.*", DeprecationWarning)
        text = run.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 1
