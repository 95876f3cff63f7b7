"""The write and the compaction: what they move, and that a donated pool is changed in place."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache import reference, triton
from pallas_kernels.cache.api import kv_compact, kv_write


def pools(rng, P=9, S=4, K=2, Dk=8, Dv=4):
    return tuple(jnp.asarray(rng.standard_normal((P, S, K, D)), jnp.bfloat16) for D in (Dk, Dv))


def test_write_touches_its_slots_only():
    rng = np.random.default_rng(0)
    k_pages, v_pages = pools(rng)
    page, slot = jnp.array([[3, 3, 7], [1, 0, 99]]), jnp.array([[2, 3, 0], [1, 0, 0]])
    k, v = (jnp.asarray(rng.standard_normal((2, 3, 2, D)), jnp.float32) for D in (8, 4))
    got_k, got_v = jax.jit(kv_write)(k_pages, v_pages, page, slot, k, v)
    for before, after, new in ((k_pages, got_k, k), (v_pages, got_v, v)):
        want = np.array(before)
        for b in range(2):
            for t in range(3):
                if page[b, t] < want.shape[0]:
                    want[page[b, t], slot[b, t]] = np.asarray(new[b, t].astype(jnp.bfloat16))
        np.testing.assert_array_equal(np.asarray(after), want)


def test_compact_reads_before_it_writes():
    """A path 0, 2, 3 moves to 0, 1, 2: the source of one entry is the target of the next."""
    rng = np.random.default_rng(1)
    k_pages, v_pages = pools(rng)
    page = jnp.full((1, 3), 5)
    moved = jax.jit(kv_compact)(k_pages, v_pages, (page, jnp.array([[0, 2, 3]])), (page, jnp.array([[0, 1, 2]])))
    for before, after in zip((k_pages, v_pages), moved, strict=True):
        want = np.array(before)
        want[5, :3] = want[5, [0, 2, 3]]
        np.testing.assert_array_equal(np.asarray(after), want)


@pytest.mark.parametrize("kernel", [False, True], ids=["scatter", "kernel"])
def test_compaction_of_all_layers(kernel):
    """Two layers of unlike heads, two sequences, a path that overlaps itself, an entry that stays, one that is dropped."""
    rng = np.random.default_rng(2)
    layers = [*pools(rng), *pools(rng, K=3, Dk=6)]
    source = jnp.array([[5, 5, 6], [2, 0, 2]]), jnp.array([[0, 2, 1], [3, 0, 1]])
    target = jnp.array([[5, 5, 5], [2, 0, 99]]), jnp.array([[0, 1, 2], [0, 0, 1]])
    compact = partial(triton.kv_compact_layers, interpret=True) if kernel else reference.kv_compact_layers
    got = jax.jit(lambda x: compact(x, source, target))(layers)
    for before, after in zip(layers, got, strict=True):
        want = np.array(before)
        want[5, 1], want[5, 2], want[2, 0] = (np.array(before)[i] for i in ((5, 2), (6, 1), (2, 3)))
        np.testing.assert_array_equal(np.asarray(after), want)


def test_donated_pool_is_changed_in_place():
    dtype = jnp.float32  # a CPU scatters bfloat16 through a float32 copy; tests/gpu asks the same of bfloat16 there
    shape = jax.ShapeDtypeStruct((1000, 16, 8, 128), dtype)
    index = jax.ShapeDtypeStruct((8, 4), jnp.int32)
    new = jax.ShapeDtypeStruct((8, 4, 8, 128), dtype)
    size = 4 * np.prod(shape.shape)
    for compiled in (
        jax.jit(kv_write, donate_argnums=(0, 1)).lower(shape, shape, index, index, new, new).compile(),
        jax.jit(kv_compact, donate_argnums=(0, 1)).lower(shape, shape, (index, index), (index, index)).compile(),
    ):
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == 2 * size
        assert memory.temp_size_in_bytes < size // 10


@pytest.mark.parametrize("kernel", [False, True])
def test_a_write_to_several_pools_touches_its_slots_only(kernel):
    rng = np.random.default_rng(2)
    before = [jnp.asarray(rng.standard_normal((9, 4, 2, 24)), jnp.bfloat16) for _ in range(4)]
    page, slot = jnp.array([[3, 3, 7], [1, 0, 99]]), jnp.array([[2, 3, 0], [1, 0, 0]])
    entries = jnp.asarray(rng.standard_normal((2, 3, 4, 2, 24)), jnp.float32)
    write = partial(triton.kv_write_layers, interpret=True) if kernel else reference.kv_write_layers
    after = write(before, (page, slot), entries)
    for i in range(4):
        want = np.array(before[i])
        for b in range(2):
            for t in range(3):
                if page[b, t] < want.shape[0]:
                    want[page[b, t], slot[b, t]] = np.asarray(entries[b, t, i].astype(jnp.bfloat16))
        np.testing.assert_array_equal(np.asarray(after[i]), want)


def test_what_one_kernel_cannot_write_is_left_to_scatters():
    pool, entries = jax.ShapeDtypeStruct((9, 4, 2, 8), jnp.bfloat16), jax.ShapeDtypeStruct((2, 64, 128, 2, 8), jnp.float32)
    assert triton.serves([pool] * 128, entries) and not triton.serves([pool] * 129, entries)
    assert not triton.serves([pool], jax.ShapeDtypeStruct((2, 65, 1, 2, 8), jnp.float32))
