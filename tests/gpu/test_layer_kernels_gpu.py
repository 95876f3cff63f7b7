"""The small kernels of a layer, compiled, against what XLA makes of the references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache import reference as cache_reference
from pallas_kernels.cache import triton as cache_triton
from pallas_kernels.layer import reference
from pallas_kernels.layer.triton_gated_rope_write import gated_rope_write
from pallas_kernels.layer.triton_rope_write import rope_write
from pallas_kernels.lora.api import product_and_hidden
from pallas_kernels.lora.triton_gated import gated_lora
from pallas_kernels.lora.triton_shrink import lora_shrink, serves
from pallas_kernels.product.api import product_in_parts
from pallas_kernels.vocabulary.triton import top_k
from tests.kernels.test_gated_rope_write import case as gated_case
from tests.kernels.test_rope_write import arguments


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 8, 4, 128), (8, 16, 8, 4, 128), (2, 5, 3, 3, 64), (1, 600, 8, 4, 64)])
def test_rope_write(shape, by_head):
    B, T = shape[:2]
    heads, cos, sin, k_pages, v_pages, page, slot = arguments(*shape, jnp.float32, jnp.bfloat16)
    page = page.at[0, 0].set(k_pages.shape[0])  # an entry that belongs to no page
    parts = jnp.stack([heads / 4, heads / 2, heads / 4])
    run = jax.jit(lambda *a: rope_write(*a, dtype=jnp.bfloat16, by_head=by_head))
    q, k, v = run(parts, cos, sin, k_pages, v_pages, page, slot)
    heads = heads.astype(jnp.bfloat16).reshape(1, B, T, -1)
    expected = reference.rope_write(heads, cos, sin, k_pages, v_pages, page, slot, dtype=jnp.bfloat16)
    for found, wanted in zip((q, k, v), expected, strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("B", "T", "rank"), [(1, 8, 384), (8, 8, 128), (3, 5, 48)])
def test_gated_lora(B, T, rank, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    y, hidden = jax.random.normal(keys[0], (4, B, T, 6144)), jax.random.normal(keys[1], (8, B, T, rank))
    b = jax.random.normal(keys[2], (rank, 6144)).astype(dtype) / rank**0.5
    gate = jax.random.bernoulli(keys[3], 0.7, (B, T, 1)).at[:, 0].set(False)
    found = jax.jit(lambda *a: gated_lora(*a, scale=0.5))(y, hidden, b, gate)
    own = y.sum(0).astype(dtype)
    with jax.default_matmul_precision("highest"):
        change = hidden.sum(0).astype(dtype).astype(jnp.float32) @ b.astype(jnp.float32)
    wanted = jnp.where(gate, own.astype(jnp.float32) + 0.5 * change, own.astype(jnp.float32))
    tolerance = 1e-4 if dtype == jnp.float32 else 4e-2
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted), rtol=tolerance, atol=tolerance)
    if dtype == jnp.float32:
        np.testing.assert_allclose(found[:, 0], own[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "inputs", "rank"), [(8, 4096, 384), (8, 14336, 128), (16, 4096, 256), (3, 2560, 48)])
def test_lora_shrink(rows, inputs, rank):
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (1, rows, inputs), jnp.bfloat16)
    a = jax.random.normal(keys[1], (inputs, rank), jnp.bfloat16) / inputs**0.5
    assert serves(x, a)
    found = jax.jit(lora_shrink)(x, a).sum(0)
    np.testing.assert_allclose(found, np.asarray(x, np.float32) @ np.asarray(a, np.float32), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("rows", "rank"), [(8, 384), (64, 256), (16, 128)])
def test_gated_lora_by_blocks(rows, rank):
    """As in a fused projection: three modules' columns, each with a block of b's rows; two programs' worth of columns each."""
    keys = jax.random.split(jax.random.key(1), 4)
    count = rank // 128
    blocks = np.tile(np.repeat([*range(count), -1], 128), 3)
    y = jax.random.normal(keys[0], (1, 1, rows, blocks.size)).astype(jnp.bfloat16)
    hidden = jax.random.normal(keys[1], (14 if rows < 64 else 1, 1, rows, rank)) / 4
    b = jax.random.normal(keys[2], (rank, blocks.size)) * (np.repeat(range(count), 128)[:, None] == blocks) / 128**0.5
    b, gate = b.astype(jnp.bfloat16), jax.random.bernoulli(keys[3], 0.7, (1, rows, 1))
    found = jax.jit(lambda *a: gated_lora(*a, scale=2.0, blocks=blocks))(y, hidden, b, gate)
    change = np.asarray(hidden.sum(0).astype(jnp.bfloat16), np.float32) @ np.asarray(b, np.float32)
    wanted = np.asarray(y[0], np.float32) + np.where(gate, 2 * change, 0)
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=2e-2, atol=4e-2)


@pytest.mark.parametrize("rows", [8, 16, 64])
@pytest.mark.parametrize("case", [(4096, 6144, 384), (4096, 4096, 128), (4096, 28672, 256), (14336, 4096, 128)])
def test_a_product_with_its_adapter(case, rows):
    """Both products in one, then the gate; closed rows do not depend on the adapter."""
    inputs, outputs, rank = case
    count = {384: 3, 256: 2, 128: 1}[rank]
    patterns = {
        3: np.tile(np.repeat([0, 0, 0, 0, 1, 2], 128), 8),
        2: np.repeat([0, 1], outputs // 2),
        1: np.zeros(outputs, int),
    }
    blocks, silu = patterns[count], count == 2
    keys = jax.random.split(jax.random.key(2), 4)
    x = jax.random.normal(keys[0], (1, rows, inputs)).astype(jnp.bfloat16)
    w, a = (jax.random.normal(k, (inputs, n)) / inputs**0.5 for k, n in ((keys[1], outputs), (keys[2], rank)))
    w, a = w.astype(jnp.bfloat16), a.astype(jnp.bfloat16)
    b = jax.random.normal(keys[3], (rank, outputs)) * (np.repeat(range(count), 128)[:, None] == blocks) / 128**0.5
    b, gate = b.astype(jnp.bfloat16), (jnp.arange(rows) % 5 > 0)[None, :, None]

    @jax.jit
    def joined(x, w, a, b, gate):
        both = product_and_hidden(x, w, a)[None]
        return both.astype(jnp.float32).sum(0), gated_lora(both, None, b, gate, scale=2.0, blocks=blocks, silu=silu)

    def run(x, b, gate):
        return joined(x, w, a, b, gate)

    both, found = run(x, b, gate)
    x32, w32, a32, b32 = (np.asarray(each, np.float32) for each in (x, w, a, b))
    own, hidden = x32[0] @ w32, x32[0] @ a32
    np.testing.assert_allclose(both[0], np.concatenate([own, hidden], 1), rtol=2e-2, atol=2e-2)
    wanted = own + np.where(gate[0], 2 * np.asarray(jnp.asarray(hidden, jnp.bfloat16), np.float32) @ b32, 0)
    if silu:
        half = outputs // 2
        wanted = np.asarray(jax.nn.silu(wanted[:, :half])) * wanted[:, half:]
    np.testing.assert_allclose(np.asarray(found[0], np.float32), wanted, rtol=4e-2, atol=6e-2)
    base = run(x, b, jnp.zeros_like(gate))[1]
    np.testing.assert_array_equal(run(x, jnp.zeros_like(b), gate)[1], base)
    np.testing.assert_array_equal(np.asarray(found)[~np.asarray(gate)[..., 0]], np.asarray(base)[~np.asarray(gate)[..., 0]])


@pytest.mark.parametrize(("B", "T", "parts"), [(1, 8, 1), (1, 16, 1), (2, 7, 2), (4, 16, 1)])
def test_gated_rope_write(B, T, parts):
    y, b, gate, *rest, blocks = gated_case(B, T, 8, 4, 128, jnp.bfloat16, rank=256, parts=parts)
    b = b / 16
    found = jax.jit(lambda *args: gated_rope_write(*args, scale=2.0, blocks=blocks))(y, b, gate, *rest)
    columns = b.shape[1]
    heads = jax.jit(lambda *args: gated_lora(*args, scale=2.0, blocks=blocks))(y[..., :columns], y[..., columns:], b, gate)
    wanted = jax.jit(lambda *args: rope_write(*args, dtype=jnp.bfloat16))(heads.reshape(1, B, T, 8, 6, 128), *rest)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("rows", "size", "k"), [(64, 32000, 8), (1, 128256, 4), (8, 151936, 16)])
def test_top_k(rows, size, k):
    values = jax.random.randint(jax.random.key(0), (rows, size), -400, 400) / 64  # many ties
    best, where, mass = jax.jit(lambda x: top_k(x, k))(values)
    order = np.argsort(-np.asarray(values), axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(where, order)
    np.testing.assert_array_equal(best, np.take_along_axis(np.asarray(values), order, 1))
    np.testing.assert_allclose(mass, jnp.exp(values - values.max(1, keepdims=True)).sum(1), rtol=1e-4)


@pytest.mark.parametrize(("B", "T"), [(1, 16), (8, 3)])
def test_a_write_to_several_pools(B, T):
    keys = jax.random.split(jax.random.key(0), 12)
    pools = [jax.random.normal(k, (40, 16, 8, 128)).astype(jnp.bfloat16) for k in keys[:10]]
    page = jax.random.permutation(keys[10], jnp.arange(39))[: B * T].reshape(B, T).at[0, 0].set(99)
    entries = jax.random.normal(keys[11], (B, T, 10, 8, 128)).astype(jnp.bfloat16)
    slot = jnp.broadcast_to(jnp.arange(T) % 16, (B, T))
    found = jax.jit(lambda p, e: cache_triton.kv_write_layers(p, (page, slot), e))(pools, entries)
    wanted = cache_reference.kv_write_layers(pools, (page, slot), entries)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("shape", [(4096, 6144), (2048, 3072), (4096, 384)])
def test_a_product_in_parts_adds_up(shape):
    x = jax.random.normal(jax.random.key(0), (1, 4, shape[0])).astype(jnp.bfloat16)
    w = (jax.random.normal(jax.random.key(1), shape) / shape[0] ** 0.5).astype(jnp.bfloat16)
    parts = jax.jit(product_in_parts)(x, w)
    assert parts.shape[0] > 1
    with jax.default_matmul_precision("highest"):
        wanted = x.astype(jnp.float32) @ w.astype(jnp.float32)
    np.testing.assert_allclose(np.asarray(parts.sum(0)), np.asarray(wanted), atol=2e-3)
