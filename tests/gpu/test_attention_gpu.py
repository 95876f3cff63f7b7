"""Every attention back end, compiled, against the float32 reference: the interpreted cases and real sizes."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device, tree_attention
from pallas_kernels.attention import reference
from pallas_kernels.cache import reference as cache_reference
from pallas_kernels.cache.api import kv_compact, kv_compact_layers, kv_write
from pallas_kernels.tilings import Tiling
from tests.kernels.attention_cases import CASES, TOLERANCE, Case, build, in_float32, row_error

entry = importlib.import_module("pallas_kernels.attention.api")
LLAMA = dict(H=32, K=8, Dk=128, Dv=128)
REAL = (
    Case(**LLAMA, N=513, B=1, lengths=(8190,)),
    Case(**LLAMA, T=16, N=520, B=2, lengths=(8192, 3000)),
    Case(**LLAMA, T=60, N=33, S=64, B=2, lengths=(1000, 2048)),
    Case(**LLAMA, T=200, M=256, N=40, S=64, B=1, lengths=(2000,)),
    Case(**LLAMA, T=16, S=1, N=700, B=2, lengths=(300, 680)),
    Case(**LLAMA, T=512, N=80, tree=False, B=2, lengths=(700, 0)),  # a prefill chunk
    Case(**LLAMA, T=16, N=300, window=1024, sink=4, B=2, lengths=(4700, 500)),
    Case(**LLAMA, T=8, N=100, softcap=50.0, lengths=(1500, 31)),
    Case(H=32, K=32, Dk=192, Dv=128, T=8, N=100, lengths=(1500, 31)),
    Case(H=16, K=8, Dk=256, Dv=256, T=16, N=100, window=512, lengths=(1500, 31)),
    Case(H=24, K=8, Dk=96, Dv=96, T=7, N=100, lengths=(1500, 31)),
    Case(H=64, K=8, Dk=64, Dv=64, T=16, N=100, window=128, sink=4, lengths=(1500, 31)),
)


def check(case, dtype, backend, tiling=None):
    arguments, options = build(case, dtype)
    module = {"triton": entry.tree_attention_triton, "mosaic": entry._mosaic()}[backend]
    if module is None or not module.serves(*arguments[:3]):
        pytest.skip(f"{backend} does not serve this case; it falls to another back end")
    want = jax.jit(lambda *a: reference.tree_attention(*a, **options))(*in_float32(arguments))
    kernel = jax.jit(lambda *a: tree_attention(*a, **options, backend=backend, tiling=tiling))
    got = kernel(*arguments)
    assert row_error(got, want) <= TOLERANCE[jnp.dtype(dtype).name]
    for _ in range(3):  # an error that moves between runs is a race
        np.testing.assert_array_equal(np.asarray(kernel(*arguments)), np.asarray(got))


@pytest.mark.parametrize("backend, dtype", [("triton", jnp.float32), ("triton", jnp.bfloat16), ("mosaic", jnp.bfloat16)])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_small_cases(case, backend, dtype):
    mosaic, triton = Tiling(0, 64, rows=128, splits=3), Tiling(64, 32, rows=16)
    check(case, dtype, backend, mosaic if backend == "mosaic" else triton)


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
@pytest.mark.parametrize("case", REAL, ids=lambda c: c.name)
def test_real_sizes(case, backend):
    check(case, jnp.bfloat16, backend)


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_float16(backend):
    check(REAL[1], jnp.float16, backend)


def test_float32_real_size():
    check(REAL[6], jnp.float32, "triton")


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("splits", [33, 16, 5])
@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_tilings(backend, splits, stages):
    split = {} if backend == "mosaic" else {"split": 64 * -(-128 // splits)}
    check(REAL[1], jnp.bfloat16, backend, Tiling(**{"split": 0} | split, rows=64, num_stages=stages, splits=splits))


WORKERS = ((1, 2, 8), (1, 2, 2), (1, 2, 1), (1, 1, 8), (1, 1, 2), (1, 2, 4), (3, 2, 4), (5, 1, 2), (16, 2, 1))


@pytest.mark.parametrize("case", [REAL[1], REAL[6], REAL[2]], ids=lambda c: c.name)
@pytest.mark.parametrize("splits, readers, cluster", WORKERS)
def test_clusters(case, splits, readers, cluster):
    """Sums of several warpgroups and programs, added up through a neighbour's shared memory: also where most have no work."""
    check(case, jnp.bfloat16, "mosaic", Tiling(0, 64, num_stages=3, readers=readers, cluster=cluster, splits=splits))


ODD = (Case(**LLAMA, T=4, N=40, B=3, lengths=(0, 600, 31)), Case(**LLAMA, T=3, N=40, missing=2, tree=False))


@pytest.mark.parametrize("case", [*REAL[7:], *ODD], ids=lambda c: c.name)
def test_clusters_of_other_shapes(case):
    check(case, jnp.bfloat16, "mosaic", Tiling(0, 64, num_stages=2, readers=2 if case.Dk + case.Dv <= 256 else 1, cluster=4))


@pytest.mark.parametrize(
    "tiling", [(0, 128, 16, 4, 3), (0, 128, 32), (0, 64, 64), (1024, 128, 16, 4, 2), (256, 128, 16, 8, 3)], ids=str
)
@pytest.mark.parametrize("T", [1, 16, 60])
def test_small_row_tiles(T, tiling):
    check(Case(**LLAMA, T=T, N=36, B=3, lengths=(510, 0, 129)), jnp.bfloat16, "triton", Tiling(*tiling))


@pytest.mark.parametrize(
    "case", [Case(**LLAMA, T=T, N=N, B=B) for T in (1, 16, 64) for N in (36, 100) for B in (1, 8)], ids=lambda c: c.name
)
def test_default_choice(case):
    """What `backend=None` picks on this chip for short tables and long ones."""
    check(case, jnp.bfloat16, entry.choose_backend(*build(case, jnp.bfloat16)[0][:3], case.N * case.S, device.capability()))


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_what_nobody_wrote_is_never_read(backend):
    """Partial results of a table far longer than the sequence stay unwritten; memory full of NaN must not leak in."""
    arguments, options = build(Case(**LLAMA, T=4, B=1, N=8, lengths=(100,)), jnp.bfloat16)
    q, k, v, table, *rest = arguments
    longer = jnp.concatenate([table, jnp.zeros((1, 8192 - 8), jnp.int32)], axis=1)  # 128k slots
    f = jax.jit(lambda *a: tree_attention(*a, **options, backend=backend))
    want = reference.tree_attention(*in_float32(arguments), **options)
    for _ in range(3):
        poison = [jnp.full((1 << 24,), jnp.nan) for _ in range(8)]
        jax.block_until_ready(poison)
        del poison
        assert row_error(f(q, k, v, longer, *rest), want) <= TOLERANCE["bfloat16"]


def test_default_backend_is_a_kernel():
    arguments, options = build(REAL[0], jnp.bfloat16)
    text = jax.jit(lambda *a: tree_attention(*a, **options)).lower(*arguments).as_text()
    assert "mosaic_gpu" in text or "triton" in text


def test_commit_is_in_place():
    pool = jax.ShapeDtypeStruct((1000, 16, 8, 128), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((8, 4), jnp.int32)
    new = jax.ShapeDtypeStruct((8, 4, 8, 128), jnp.bfloat16)
    size = 2 * np.prod(pool.shape)
    for compiled in (
        jax.jit(kv_write, donate_argnums=(0, 1)).lower(pool, pool, index, index, new, new).compile(),
        jax.jit(kv_compact, donate_argnums=(0, 1)).lower(pool, pool, (index, index), (index, index)).compile(),
    ):
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == 2 * size
        assert memory.temp_size_in_bytes < size // 10


@pytest.mark.parametrize("B, A", [(1, 1), (1, 8), (8, 5), (3, 16)])
def test_compaction_of_all_layers(B, A):
    """The kernel moves what the scatters move, overlapping paths included, and nothing else."""
    rng = np.random.default_rng(A)
    P, S = 200, 16
    pools = [jnp.asarray(rng.standard_normal((P, S, K, D)), jnp.bfloat16) for K, D in ((8, 128), (8, 128), (3, 96), (1, 576))]
    table = rng.permutation(np.arange(1, P))[: B * 4].reshape(B, 4)
    path = np.sort(np.stack([rng.permutation(40)[:A] for _ in range(B)]), axis=1)
    base = rng.integers(0, 20, (B, 1))
    source, target = base + path, base + np.arange(A)[None]
    places = [(jnp.asarray(np.take_along_axis(table, x // S, 1)), jnp.asarray(x % S)) for x in (source, target)]
    want = jax.jit(lambda x: cache_reference.kv_compact_layers(x, *places))(pools)
    compiled = jax.jit(lambda x: kv_compact_layers(x, *places), donate_argnums=0).lower(pools).compile()
    assert "triton" in compiled.as_text() and compiled.memory_analysis().temp_size_in_bytes < 1e6
    for got, expected in zip(compiled(pools), want, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("readers", [1, 2])
def test_clusters_of_sixteen(readers):
    """Last: a chip that cannot start them ends the process."""
    check(REAL[1], jnp.bfloat16, "mosaic", Tiling(0, 64, num_stages=3, readers=readers, cluster=16))
