"""A residual sum with the norm behind it, compiled: against the reference, and rows that do not depend on others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layer import reference, triton_add_norm


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("rows", "width", "parts"), [(128, 4096, 2), (512, 4096, 1), (17, 576, 4), (64, 2048, 1)])
def test_sums_and_norms(rows, width, parts, dtype):
    keys = jax.random.split(jax.random.key(width), 3)
    x, scale = jax.random.normal(keys[0], (rows, width)).astype(dtype), jax.random.normal(keys[1], (width,)).astype(dtype)
    p = jax.random.normal(keys[2], (parts, rows, width)).astype(jnp.float32 if parts > 1 else dtype)
    run = jax.jit(lambda x, p: triton_add_norm.add_norm(x, p, scale, eps=1e-5))
    total, normed = run(x, p)
    wanted, _ = reference.add_norm(x, p, scale, eps=1e-5)
    rounding = 1e-6 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (total, wanted)), rtol=rounding, atol=rounding)
    wanted = reference.rms_norm(total, scale, 1e-5)
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (normed, wanted)), rtol=10 * rounding, atol=10 * rounding)
    for few, every in zip(run(x[3:20], p[:, 3:20]), (total, normed), strict=True):
        np.testing.assert_array_equal(np.asarray(few, np.float32), np.asarray(every[3:20], np.float32))
