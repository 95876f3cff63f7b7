"""The adapter's first half as a kernel, against the reference."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lora import reference
from pallas_kernels.lora import triton_shrink as kernels
from tests.kernels.attention_cases import pretend_h200


@pytest.mark.parametrize(
    ("shape", "inputs", "rank", "parts"),
    [((1, 8), 1024, 48, 2), ((3, 5), 512, 32, 1), ((1, 1), 5120, 16, 5), ((2, 3), 4608, 16, 9)],
)
def test_the_parts_add_up_to_the_product(shape, inputs, rank, parts):
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (*shape, inputs), jnp.bfloat16)
    a = jax.random.normal(keys[1], (inputs, rank), jnp.bfloat16)
    assert kernels.serves(x, a)
    found = kernels.lora_shrink(x, a, interpret=True)
    assert found.shape == (parts, *shape, rank) and found.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(found).sum(0), reference.shrink(x, a), atol=1e-3)


def test_what_is_not_served():
    def serves(rows=8, inputs=512, rank=16, x=jnp.bfloat16, a=jnp.bfloat16):
        return kernels.serves(jax.ShapeDtypeStruct((1, rows, inputs), x), jax.ShapeDtypeStruct((inputs, rank), a))

    assert serves() and serves(rows=16)
    assert not serves(rows=17) and not serves(inputs=768) and not serves(rank=8)
    assert not serves(x=jnp.float32, a=jnp.float32) and not serves(a=jnp.float32)


@pytest.mark.parametrize(("rows", "inputs", "rank"), [(8, 4096, 384), (16, 14336, 128), (1, 512, 16)])
def test_it_lowers_for_cuda(rows, inputs, rank):
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, rows, inputs), (inputs, rank))]
    with pretend_h200(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Triton.*", DeprecationWarning)
        text = jax.jit(kernels.lora_shrink).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 1
