"""Products of a few rows, compiled: errors, and rows that do not depend on how many there are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.product import api as product

KERNEL = product._kernel()
pytestmark = pytest.mark.skipif(KERNEL is None or not KERNEL.available(), reason="needs Hopper and jax >= 0.11")
TILINGS = [
    (4096, 6144, (64, 128, 24, 1, 1)),  # cut alike
    (4096, 6144, (128, 64, 23, 2, 1)),  # unevenly
    (4096, 4096, (256, 64, 64, 2, 1)),  # whole tiles
]
SHARED = [
    (4096, 6144, (128, 64, 32, 2, 2)),
    (4096, 4096, (64, 128, 16, 1, 4)),
    (4096, 4096, (256, 64, 64, 2, 2)),
    (4096, 6144, (192, 64, 16, 3, 2, 64)),
    (4096, 4096, (64, 128, 16, 1, 2, 128, 1)),
]
GATES = [(256, 64, 64, 2, 1), (256, 64, 64, 2, 2, 128, 1)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("case", range(len(TILINGS + SHARED)))
def test_rows_of_a_product(case, dtype):
    inputs, outputs, tiling = (TILINGS + SHARED)[case]
    tiling = KERNEL.Tiling(*tiling)
    x = jax.random.normal(jax.random.key(0), (128, inputs)).astype(dtype)
    w = (jax.random.normal(jax.random.key(1), (inputs, outputs)) / inputs**0.5).astype(dtype)
    with jax.default_matmul_precision("highest"):
        wanted = np.asarray(x.astype(jnp.float32) @ w.astype(jnp.float32))

    @jax.jit
    def run(x, w):
        return KERNEL.add_parts(KERNEL.partial_products(x, w, tiling), tiling, inputs)

    every = np.asarray(run(x, w))
    np.testing.assert_allclose(every, wanted, atol=2e-4, rtol=2e-4)
    for rows in (100, 64, 33) if tiling.cluster > 1 else (100, 64, 17, 8, 5, 1):
        np.testing.assert_array_equal(np.asarray(run(x[:rows], w)), every[:rows])


@pytest.mark.parametrize("case", range(len(GATES)))
def test_gates_and_values_in_one(case):
    tiling = KERNEL.Tiling(*GATES[case])
    x = jax.random.normal(jax.random.key(0), (128, 4096)).astype(jnp.bfloat16)
    w = (jax.random.normal(jax.random.key(1), (4096, 28672)) / 64).astype(jnp.bfloat16)
    run = jax.jit(lambda x, w: KERNEL.partial_products(x, w, tiling, dtype=x.dtype, gated=True)[0])
    gate, value = np.split(np.asarray((x @ w).astype(jnp.float32)), 2, axis=1)
    every = np.asarray(run(x, w), np.float32)
    np.testing.assert_allclose(every, gate / (1 + np.exp(-gate)) * value, atol=2e-2, rtol=2e-2)
    for rows in (100, 33) if tiling.cluster > 1 else (100, 8, 2):
        np.testing.assert_array_equal(np.asarray(run(x[:rows], w), np.float32), every[:rows])
