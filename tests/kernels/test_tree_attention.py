"""The attention contract: kernels interpreted on the CPU against the float32 reference, and the choice of a back end."""

import importlib
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tilings, tree_attention
from pallas_kernels.attention import reference
from pallas_kernels.tilings import Problem, Tiling
from tests.kernels.attention_cases import CASES, TOLERANCE, Case, build, in_float32, pretend_h200, row_error

entry = importlib.import_module("pallas_kernels.attention.api")  # the name in the package is the function
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


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_blocks_of_slots(case):
    """What a CPU does over wide tables: block by block up to the longest sequence, whatever stands behind it."""
    arguments, options = build(case)
    q, k, v, table, *rest = arguments
    wide = jnp.pad(table, ((0, 0), (0, max(40 - table.shape[1], 0))))
    want = run((q, k, v, wide, *rest), options, backend="reference")
    sound = [
        jax.jit(partial(f, **options))(q, k, v, wide, *rest) for f in (reference.tree_attention, reference.blocked_attention)
    ]
    np.testing.assert_array_equal(sound[0].shape, want.shape)
    assert row_error(sound[1], sound[0]) <= 1e-6
    assert row_error(want, sound[0]) <= 1e-6


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
    Case(T=19, H=4, K=1, Dk=128, Dv=128, N=6, B=1, lengths=(70,)),  # queries by token: two warpgroups, without a merge
    Case(T=9, H=8, K=1, Dk=32, Dv=128, B=1, lengths=(90,), window=37, sink=3),  # eight tokens a warpgroup, with a merge
)


def check_mosaic(case, tiling, capfd):
    """Interpreted, in float32's neighbourhood, without a race."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    arguments, options = build(case, jnp.bfloat16)
    want = run(in_float32(arguments), options, backend="reference")
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    got = tree_attention(*arguments, **options, backend="mosaic", tiling=tiling, interpret=interpret)
    assert row_error(got, want) <= TOLERANCE["bfloat16"]
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # how the interpreter reports one


@needs_mosaic
@pytest.mark.parametrize("case", MOSAIC_CASES, ids=lambda c: c.name)
def test_mosaic(case, capfd):
    check_mosaic(case, Tiling(0, 64, rows=128, num_stages=2, splits=1 if case.T > 16 else 2), capfd)


WORKING = dict(K=1, B=1, Dk=32, Dv=128, N=20)
WORKERS = (  # case, splits, readers, cluster
    (Case(**WORKING | {"B": 2}, T=9, lengths=(290, 0)), 1, 2, 1),  # nine tokens: written in place, a tile's last rows not
    (Case(**WORKING, T=9, lengths=(290,)), 1, 1, 2),
    (Case(**WORKING, T=9, lengths=(290,), window=70, sink=3, missing=9), 1, 2, 2),  # workers with sinks, with a window, idle
    (Case(**WORKING, T=2, lengths=(290,), softcap=9.0), 3, 1, 2),  # clusters, then a merge
    (Case(**WORKING, T=9, lengths=(290,), window=70, sink=3), 4, 2, 1),  # more workers than blocks, window, then a merge
    # Queries regrouped; most workers idle, and rows that see nothing.
    (Case(T=5, H=6, K=2, Dk=32, Dv=32, N=6, lengths=(40, 0), missing=5, tree=False), 1, 2, 4),
)


@needs_mosaic
@pytest.mark.parametrize("case, splits, readers, cluster", WORKERS)
def test_mosaic_workers_add_up(case, splits, readers, cluster, capfd):
    """Warpgroups and programs that share the slots of the same rows, each idle or not: the same result, and no race."""
    check_mosaic(case, Tiling(0, 64, num_stages=2, readers=readers, cluster=cluster, splits=splits), capfd)


LLAMA = dict(H=32, K=8, Dk=128, Dv=128, B=1, N=64, lengths=(900,))
LOWERED = (
    Case(**LLAMA),
    Case(**LLAMA | {"N": 600}, T=16),
    Case(**LLAMA, T=64, window=128, sink=4, softcap=30.0),
    Case(T=8, H=8, K=8, Dk=192, Dv=128, B=1, N=64, lengths=(100,)),
    Case(T=8, H=4, K=2, Dk=96, Dv=96, B=1, N=64, lengths=(100,), tree=False),
    Case(T=8, H=4, K=2, Dk=256, Dv=256, B=1, N=64, lengths=(100,)),
    Case(T=8, H=6, K=2, Dk=64, Dv=64, B=1, N=64, lengths=(100,)),
    Case(T=600, H=6, K=2, Dk=64, Dv=64, B=1, N=64, lengths=(0,), tree=False),
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
    kernels = text.count({"triton": "__gpu$xla.gpu.triton", "mosaic": "mosaic_gpu_v2"}[backend])
    if backend == "triton":
        slots = case.N * case.S
        tiling = tilings.triton_tiling(Problem(case.T * case.H // case.K, case.Dk, case.Dv, 2, slots, case.B * case.K))
        assert kernels == (2 if tiling.split else 1)  # attention, and a merge only where there are splits
    else:
        assert kernels >= 1


@needs_mosaic
@pytest.mark.parametrize("splits, readers, cluster, kernels", [(1, 2, 8, 1), (1, 2, 1, 1), (1, 1, 16, 1), (3, 2, 4, 2)])
def test_clusters_lower_for_cuda(splits, readers, cluster, kernels):
    """What interpret mode cannot run: the sums in a neighbour's shared memory. One kernel, and a merge only of splits."""
    arguments, options = build(LOWERED[1], jnp.bfloat16)
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
    tiling = Tiling(0, 64, readers=readers, cluster=cluster, splits=splits)
    f = jax.jit(lambda *a: tree_attention(*a, **options, backend="mosaic", tiling=tiling))
    with pretend_h200():
        text = f.trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "mosaic_gpu_v2" in line]
    assert len(calls) + text.count("__gpu$xla.gpu.triton") == kernels
    placed = calls[0].rpartition("->")[2].count("tensor<1x16x32x128xbf16>")  # what the attention itself returns
    assert placed == (kernels == 1)


def shapes(Dk, Dv, S=16, q=jnp.bfloat16, cache=jnp.bfloat16, B=1, T=1):
    kv = [jax.ShapeDtypeStruct((4, S, 2, D), cache) for D in (Dk, Dv)]
    return jax.ShapeDtypeStruct((B, T, 4, Dk), q), *kv


def test_choice_of_backend():
    hopper = "triton" if MOSAIC is None else "mosaic"
    long = 8192
    assert entry.choose_backend(*shapes(128, 128), long, None) == "reference"
    for T, slots, want in ((1, 512, "triton"), (1, long, "triton"), (8, 512, "triton"), (9, long, hopper), (600, 512, hopper)):
        B = 8  # with two kv heads
        assert entry.choose_backend(*shapes(128, 128, B=B, T=T), slots, 9.0) == want, (T, slots)
    for T, B, slots, want in ((1, 8, 8256, hopper), (1, 1, 8256, "triton"), (16, 1, 640, "triton"), (64, 1, 640, hopper)):
        q, pool = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((B, T, 32, 128), (4, 16, 8, 128)))
        assert entry.choose_backend(q, pool, pool, slots, 9.0) == want, (T, B, slots)
    assert entry.choose_backend(*shapes(192, 128, T=16), long, 9.0) == hopper
    assert entry.choose_backend(*shapes(128, 128, T=16), long, 8.6) == "triton"
    assert entry.choose_backend(*shapes(128, 128, T=16), long, 10.0) == "triton"
    assert entry.choose_backend(*shapes(128, 128, S=1, T=16), long, 9.0) == "triton"
    assert entry.choose_backend(*shapes(80, 80, T=16), long, 9.0) == "triton"
    assert entry.choose_backend(*shapes(64, 64, q=jnp.float32, cache=jnp.float32, T=16), long, 9.0) == "triton"


def test_fallback_warns_once():
    entry._warn_fallback.cache_clear()
    with pytest.warns(UserWarning, match="head sizes 20/20"):
        assert entry.choose_backend(*shapes(20, 20), 8192, 9.0) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert entry.choose_backend(*shapes(20, 20), 8192, 9.0) == "reference"


def test_unserved_backend_by_name_is_an_error():
    arguments, options = build(Case(Dk=20, Dv=20))
    with pytest.raises(ValueError, match="does not serve head sizes 20/20"):
        tree_attention(*arguments, **options, backend="triton")


def test_tiling_is_checked():
    with pytest.raises(ValueError, match="multiple of 32"):
        Tiling(split=100, block=64)
    with pytest.raises(ValueError, match="cluster 1, 2, 4, 8 or 16"):
        Tiling(0, cluster=3)
    with pytest.raises(ValueError, match="at most 64 rows"):
        Tiling(0, rows=128, readers=2)
    with pytest.raises(ValueError, match="at least 1"):
        Tiling(0, splits=0)


def problem(T, L, B, heads=(4, 8), head_dim=128, itemsize=2):
    return Problem(T * heads[0], head_dim, head_dim, itemsize, L, B * heads[1])


@pytest.mark.parametrize("B", [1, 8])
@pytest.mark.parametrize("T", [1, 16, 64])
def test_short_tables_are_split_only_for_few_programs(T, B):
    """At 512 slots and batch 1, splits of 128 took 6.7 us against 10.3 without (T = 1), 7.5 against 10.4 (T = 16)."""
    tiling = tilings.triton_tiling(problem(T, 640, B))
    assert tiling.split == (128 if B == 1 and T < 64 else 0)
    assert B * 8 * -(-T * 4 // tiling.rows) <= 132 or tiling.rows == 64  # the smallest tile that fits in one wave


@pytest.mark.parametrize("table", [tilings.triton_tiling, tilings.mosaic_tiling])
@pytest.mark.parametrize("B", [1, 8])
@pytest.mark.parametrize("L", [4096, 8256, 32832, 131072])
def test_long_tables_fill_the_chip(L, B, table):
    for T in (1, 16, 64):
        tiling = table(problem(T, L, B))
        splits = -(-L // tiling.split) if tiling.split else tiling.splits
        workers = B * 8 * -(-T * 4 // tiling.rows) * splits * tiling.readers * tiling.cluster
        assert workers >= 66  # half of the multiprocessors
        assert tiling.split == 0 or tiling.split >= 256


@pytest.mark.parametrize(
    "T, L, B, want",
    [
        (16, 8256, 1, (16, 64, 2, 1, 2)),  # 16.1 us; 16.7 with three stages, 18.4 in clusters of two
        (16, 32832, 1, (16, 64, 2, 1, 2)),  # 40.4 us; 41.0 with three stages, 43 in clusters of two
        (16, 8256, 8, (1, 64, 2, 2, 2)),  # 68.6 us; 72.5 with three stages
        (16, 576, 8, (1, 64, 2, 2, 2)),  # 11.6 us; 11.8 with three stages, Triton 14.8
        (64, 576, 8, (1, 128, 1, 1, 3)),  # 15.9 us; 16.2 with four stages
        (64, 8256, 1, (8, 128, 1, 1, 3)),  # 29.8 us; 29.8 with four stages
    ],
)
def test_mosaic_takes_what_was_fastest_on_the_h200(T, L, B, want):
    tiling = tilings.mosaic_tiling(problem(T, L, B))
    assert (tiling.splits, tiling.rows, tiling.readers, tiling.cluster, tiling.num_stages) == want


@pytest.mark.parametrize("D", [96, 192, 256])
def test_clusters_of_odd_heads(D):
    """Whole lines of 128 bytes for every program, and all of it fits in shared memory."""
    for B in (4, 8):
        tiling = tilings.mosaic_tiling(problem(16, 8256, B, head_dim=D))
        assert D % (32 * tiling.cluster) == 0
        assert tiling.readers * tiling.num_stages * tiling.block * 4 * D + 128 * D <= 224 * 1024


def test_prefill_chunks_are_not_split():
    for table in (tilings.triton_tiling, tilings.mosaic_tiling):
        tiling = table(problem(1024, 8192, 1))
        assert tiling.split == 0 and tiling.splits == 1


def test_wide_heads_take_short_steps():
    """A step's keys and values, times the stages in flight, must fit in a multiprocessor's shared memory."""
    for L in (512, 8192):
        for T in (1, 16, 64, 1024):
            for Dk, Dv in ((64, 64), (128, 128), (192, 128), (256, 256), (576, 512)):
                tiling = tilings.triton_tiling(Problem(T * 4, Dk, Dv, 2, L, 8))
                assert tiling.block * (Dk + Dv) * 2 * (tiling.num_stages - 1) <= 160_000, (T, L, Dk, tiling)
