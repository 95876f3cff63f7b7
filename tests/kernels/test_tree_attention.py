"""The attention contract: kernels interpreted on the CPU against the float32 reference, and the choice of a back end."""

import contextlib
import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tilings, tree_attention
from pallas_kernels.tilings import Tiling
from tests.kernels.attention_cases import CASES, TOLERANCE, Case, build, in_float32, row_error

entry = importlib.import_module("pallas_kernels.tree_attention")  # the name in the package is the function
MOSAIC = entry._mosaic()
needs_mosaic = pytest.mark.skipif(MOSAIC is None, reason="the Mosaic GPU kernel needs jax >= 0.11")
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
    assert row_error(got, want) <= TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    "case", [Case(T=6, lengths=(90, 7)), Case(T=5, window=20, sink=2, softcap=6.0, lengths=(90, 33))], ids=lambda c: c.name
)
def test_triton_half(case, dtype):
    arguments, options = build(case, dtype)
    want = run(in_float32(arguments), options, backend="reference")
    got = run(arguments, options, backend="triton", tiling=SMALL, interpret=True)
    assert got.dtype == dtype
    assert row_error(got, want) <= TOLERANCE[jnp.dtype(dtype).name]


@pytest.mark.parametrize("q_dtype, cache_dtype", [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)])
def test_triton_mixed(q_dtype, cache_dtype):
    arguments, options = build(Case(T=4, lengths=(60,), B=1), q_dtype, cache_dtype)
    want = run(in_float32(arguments), options, backend="reference")
    got = run(arguments, options, backend="triton", tiling=SMALL, interpret=True)
    assert row_error(got, want) <= TOLERANCE["bfloat16"]


def test_one_split_writes_the_result_itself():
    arguments, options = build(Case(T=3, lengths=(0, 100)))
    want = run(arguments, options, backend="reference")
    got = run(arguments, options, backend="triton", tiling=Tiling(split=0, block=64, rows=16), interpret=True)
    assert row_error(got, want) <= TOLERANCE["float32"]


def test_row_that_sees_nothing_is_zero():
    case = Case(T=4, lengths=(0, 0), missing=4)
    arguments, options = build(case)
    for backend, more in (("reference", {}), ("triton", {"tiling": SMALL, "interpret": True})):
        out = np.asarray(run(arguments, options, backend=backend, **more))
        assert (out[-1] == 0).all(), backend
        assert (np.abs(out[0]).max(-1) > 0).all(), backend


def test_split_boundaries_do_not_follow_the_length():
    """Keys beyond the rows' reach change nothing, not a bit: the split grid belongs to the table, not to the sequence."""
    short, options = build(Case(T=2, B=1, N=8, lengths=(70,)))
    q, k, v, table, *rest = short
    longer = jnp.concatenate([table, jnp.full((1, 8), 1, jnp.int32)], axis=1)
    a = run(short, options, backend="triton", tiling=SMALL, interpret=True)
    b = run((q, k, v, longer, *rest), options, backend="triton", tiling=SMALL, interpret=True)
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_sinks_do_not_depend_on_the_chunking():
    """A key below `sink` is seen whether it is committed or still in flight."""
    arguments, options = build(Case(T=24, tree=False, B=1, window=5, sink=3, lengths=(0,)))
    q, k, v, table, length, _, positions, entries = arguments
    whole = run(arguments, options, backend="reference")
    later = (q[:, 8:], k, v, table, length + 8, None, positions[:, 8:], entries[:, 8:])
    tail = run(later, options, backend="reference")
    np.testing.assert_allclose(np.asarray(whole[:, 8:]), np.asarray(tail), atol=1e-6)


MOSAIC_CASES = (
    Case(T=3, M=9, lengths=(31, 100)),
    Case(T=6, window=37, sink=3, lengths=(90,), B=1, missing=2),
    Case(T=17, H=8, K=2, N=6, B=1, lengths=(70,), softcap=9.0),  # two warpgroups
    Case(T=2, H=2, K=2, Dk=96, Dv=32, N=3, S=64, B=1, lengths=(100,), tree=False),
)


@needs_mosaic
@pytest.mark.parametrize("case", MOSAIC_CASES, ids=lambda c: c.name)
def test_mosaic(case, capfd):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    arguments, options = build(case, jnp.bfloat16)
    want = run(in_float32(arguments), options, backend="reference")
    got = tree_attention(
        *arguments, **options, backend="mosaic", tiling=Tiling(0 if case.T > 16 else 128, 64, rows=128, num_stages=2),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )  # fmt: skip
    assert row_error(got, want) <= TOLERANCE["bfloat16"]
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # how the interpreter reports one


def pretend_h200():
    """From jax 0.11 on, Pallas' Triton lowering must be told which GPU it lowers for."""
    try:
        from jax.sharding import AbstractDevice, AbstractMesh

        device = AbstractDevice("NVIDIA H200", 1, "cuda")
        return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    except ImportError:
        return contextlib.nullcontext()


LLAMA = dict(H=32, K=8, Dk=128, Dv=128, B=1, N=64, lengths=(900,))
LOWERED = (
    Case(**LLAMA),
    Case(**LLAMA, T=16),
    Case(**LLAMA, T=64, window=128, sink=4, softcap=30.0),
    Case(T=8, H=8, K=8, Dk=192, Dv=128, B=1, N=64, lengths=(100,)),
    Case(T=8, H=4, K=2, Dk=96, Dv=96, B=1, N=64, lengths=(100,), tree=False),
    Case(T=8, H=4, K=2, Dk=256, Dv=256, B=1, N=64, lengths=(100,)),
)


@pytest.mark.parametrize("backend", ["triton", pytest.param("mosaic", marks=needs_mosaic)])
@pytest.mark.parametrize("case", LOWERED, ids=lambda c: c.name)
def test_lowers_for_cuda(case, backend):
    arguments, options = build(case, jnp.bfloat16)
    avals = [None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
    f = jax.jit(lambda *a: tree_attention(*a, **options, backend=backend))
    with pretend_h200(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Triton.*", DeprecationWarning)
        text = f.trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count({"triton": "__gpu$xla.gpu.triton", "mosaic": "mosaic_gpu_v2"}[backend]) >= 2  # attention, merge


def shapes(Dk, Dv, S=16, q=jnp.bfloat16, cache=jnp.bfloat16):
    kv = [jax.ShapeDtypeStruct((4, S, 2, D), cache) for D in (Dk, Dv)]
    return jax.ShapeDtypeStruct((1, 1, 4, Dk), q), *kv


def test_choice_of_backend():
    hopper = "triton" if MOSAIC is None else "mosaic"
    assert entry.choose_backend(*shapes(128, 128), None) == "reference"
    assert entry.choose_backend(*shapes(128, 128), 9.0) == hopper
    assert entry.choose_backend(*shapes(192, 128), 9.0) == hopper
    assert entry.choose_backend(*shapes(128, 128), 8.6) == "triton"
    assert entry.choose_backend(*shapes(128, 128), 10.0) == "triton"
    assert entry.choose_backend(*shapes(128, 128, S=1), 9.0) == "triton"
    assert entry.choose_backend(*shapes(80, 80), 9.0) == "triton"
    assert entry.choose_backend(*shapes(64, 64, q=jnp.float32, cache=jnp.float32), 9.0) == "triton"


def test_fallback_warns_once():
    entry._warn_fallback.cache_clear()
    with pytest.warns(UserWarning, match="head sizes 20/20"):
        assert entry.choose_backend(*shapes(20, 20), 9.0) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert entry.choose_backend(*shapes(20, 20), 9.0) == "reference"


def test_unserved_backend_by_name_is_an_error():
    arguments, options = build(Case(Dk=20, Dv=20))
    with pytest.raises(ValueError, match="does not serve head sizes 20/20"):
        tree_attention(*arguments, **options, backend="triton")


def test_tiling_is_checked():
    with pytest.raises(ValueError, match="multiple of 32"):
        Tiling(split=100, block=64)


@pytest.mark.parametrize("table", [tilings.triton_tiling, tilings.mosaic_tiling])
def test_wide_trees_keep_their_splits(table):
    """Verify trees of every size share split boundaries; only prefill chunks do without."""
    assert len({table(rows, 128, 128, 2, 8192).split for rows in (4, 64, 256)}) == 1
    assert table(4096, 128, 128, 2, 8192).split == 0
