"""The attention kernels, interpreted on the CPU, against the float32 reference."""

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton.*:DeprecationWarning")

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import reference, tree_attention
from pallas_kernels.tilings import Tiling
from tests.kernels.attention_cases import CASES, Case, build, in_float32, row_error

SMALL = Tiling(split=64, block=32, rows=16)


def run(arguments, options, **more):
    """One compiled call; compiling is what takes the time here, so it is told not to try hard."""
    f = jax.jit(lambda *a: tree_attention(*a, **options, **more))
    return f.lower(*arguments).compile(compiler_options={"xla_backend_optimization_level": 0})(*arguments)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_triton_float32(case):
    arguments, options = build(case)
    want = run(arguments, options, backend="reference")
    got = run(arguments, options, backend="triton", tiling=SMALL, interpret=True)
    assert row_error(got, want) <= 1e-5
