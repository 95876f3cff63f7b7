"""Rotary embedding and KV write as one kernel, against the reference."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layer import reference
from pallas_kernels.layer.triton_rope_write import rope_write, serves


def arguments(B, T, K, G, D, dtype, pool_dtype, seed=0):
    keys = jax.random.split(jax.random.key(seed), 6)
    heads = jax.random.normal(keys[0], (B, T, K, G + 2, D)).astype(dtype)
    angles = jax.random.uniform(keys[1], (B, T, D // 2), maxval=600.0)
    pages = 3 + B * T
    k_pages, v_pages = (jax.random.normal(k, (pages, 4, K, D)).astype(pool_dtype) for k in keys[2:4])
    page = jax.random.permutation(keys[4], jnp.arange(1, 1 + B * T)).reshape(B, T).astype(jnp.int32)
    slot = jax.random.randint(keys[5], (B, T), 0, 4)
    return heads, jnp.cos(angles), jnp.sin(angles), k_pages, v_pages, page, slot


CASES = [
    ((1, 1, 2, 4, 64), jnp.float32, jnp.float32),
    ((2, 5, 3, 3, 32), jnp.bfloat16, jnp.bfloat16),
    ((1, 7, 1, 1, 128), jnp.bfloat16, jnp.float32),
    ((3, 2, 2, 8, 256), jnp.float32, jnp.bfloat16),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "pool_dtype", "by_head"),
    [
        pytest.param(*case, by_head, marks=[pytest.mark.slow] if by_head != by_default else [])
        for case, by_default in zip(CASES, (False, True, True, False), strict=True)
        for by_head in (False, True)
    ],
)
def test_the_kernel_does_what_the_reference_does(shape, dtype, pool_dtype, by_head):
    parts = 2 if by_head else 1
    heads, cos, sin, k_pages, v_pages, page, slot = arguments(*shape, dtype, pool_dtype)
    B, T, K, G, D = shape
    page = page.at[0, 0].set(k_pages.shape[0])  # an entry that belongs to no page
    assert serves(heads, cos, k_pages, v_pages)
    other = jax.random.normal(jax.random.key(9), heads.shape)
    in_parts = jnp.stack([heads - other, other]) if parts == 2 else heads[None]  # in float32
    q, k, v = rope_write(in_parts, cos, sin, k_pages, v_pages, page, slot, dtype=dtype, by_head=by_head, interpret=True)

    wanted = reference.rope_write(heads.reshape(1, B, T, -1), cos, sin, k_pages, v_pages, page, slot, dtype=dtype)
    tolerance = 1e-2 if dtype == jnp.bfloat16 or pool_dtype == jnp.bfloat16 else 1e-6
    for ours, theirs in zip((q, k, v), wanted, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    untouched = np.ones(k_pages.shape[:2], bool)
    for b, t in itertools.product(range(B), range(T)):
        if page[b, t] < k_pages.shape[0]:
            untouched[page[b, t], slot[b, t]] = False
    np.testing.assert_array_equal(np.asarray(k, np.float32)[untouched], np.asarray(k_pages, np.float32)[untouched])


def test_what_the_kernel_does_not_serve():
    heads, cos, _, k_pages, v_pages, *_ = arguments(1, 1, 2, 2, 96, jnp.float32, jnp.float32)
    assert not serves(heads, cos, k_pages, v_pages)  # 48 is no power of two
    heads, cos, _, k_pages, v_pages, *_ = arguments(1, 1, 2, 2, 64, jnp.float32, jnp.float32)
    assert not serves(heads, cos[..., :16], k_pages, v_pages)  # partial rotation
    assert not serves(heads, cos, k_pages, v_pages[..., :32])
