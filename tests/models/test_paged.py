"""What the forward over a paged cache does on a GPU: a single row beside one that does not exist, fused rope and write."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import ModelConfig
from jaxspec.kvcache import find_slots, init_layers
from jaxspec.models import attend, decoder, paged
from jaxspec.trees.tree import pack_bits
from pallas_kernels import device, tree_attention
from pallas_kernels.layer import triton_add_norm, triton_rope_write
from pallas_kernels.product import api as product
from pallas_kernels.tilings import product_parts

CONFIG = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=48,
    max_positions=64,
)

DECODE = decoder.decode


@functools.cache
def inputs():
    """Weights, and two prompts of seven tokens."""
    return decoder.init_params(CONFIG, jax.random.key(0)), jax.random.randint(jax.random.key(1), (2, 7), 0, 64)


def run(batch=1, T=1, taps=(0, 2), **options):
    """The outputs for T rows behind seven committed ones (and behind scratch entries, where `options` name some)."""

    params, prompts = inputs()

    @jax.jit  # anew in every call: what a test replaces is looked up while tracing
    def outputs(params, prompts):
        pools = init_layers(2, 23, 4, 2, 32, 32, jnp.float32)
        table = jnp.arange(1, 1 + 11 * batch).reshape(batch, 11)
        at = jnp.broadcast_to(jnp.arange(7), (batch, 7))
        base = jnp.zeros(batch, jnp.int32)
        x = decoder.embed(params, CONFIG, prompts[:batch])
        pools = paged.paged_forward(params, CONFIG, x, pools, table, base, at, jnp.ones((batch, 7), bool)).layers
        x = decoder.embed(params, CONFIG, jnp.full((batch, T), 5))
        positions = jnp.broadcast_to(7 + jnp.arange(T), (batch, T))
        valid = jnp.ones((batch, T), bool).at[0, 2:].set(False)
        return paged.paged_forward(params, CONFIG, x, pools, table, base + 7, positions, valid, taps=taps, **options)

    return outputs(params, prompts)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """What a GPU would run, as far as a CPU can: its choices, with the interpreted kernel. Counts the calls of that."""
    calls = []

    def switch():
        kernel, sums = triton_rope_write.rope_write, triton_add_norm.add_norm
        monkeypatch.setattr(device, "capability", lambda: 9.0)
        monkeypatch.setattr(attend, "tree_attention", lambda *a, **o: tree_attention(*a, backend="reference", **o))
        monkeypatch.setattr(triton_rope_write, "rope_write", lambda *a, **o: calls.append(o) or kernel(*a, interpret=True, **o))
        monkeypatch.setattr(triton_add_norm, "add_norm", lambda *a, **o: sums(*a, interpret=True, **o))
        return calls

    return switch


@pytest.mark.parametrize("visible", [False, True])
def test_a_row_beside_nothing_is_the_row_alone(on_a_gpu, visible):
    options = {}
    if visible:  # behind 31 entries that do not exist: one more needs a second word
        entries = jnp.full((1, 32), -1).at[0, -1].set(7)
        options = {"inflight_positions": entries, "visible": pack_bits(jnp.arange(32)[None, None] == 31)}
    alone = run(**options)
    on_a_gpu()
    beside = run(**options)
    for found, wanted in zip(jax.tree.leaves(beside), jax.tree.leaves(alone), strict=True):
        assert found.shape == wanted.shape
    np.testing.assert_allclose(beside.hidden, alone.hidden, atol=2e-6)
    np.testing.assert_allclose(beside.features, alone.features, atol=2e-6)
    for found, wanted in zip(beside.layers, alone.layers, strict=True):  # page 0 is scratch
        np.testing.assert_allclose(found.k[1:], wanted.k[1:], atol=2e-6)
        np.testing.assert_allclose(found.v[1:], wanted.v[1:], atol=2e-6)


@pytest.mark.parametrize("parts", [1, 2])
def test_rope_and_write_in_one_kernel_change_nothing(on_a_gpu, monkeypatch, parts):
    apart = run(batch=2, T=3)
    calls = on_a_gpu()
    monkeypatch.setattr(product, "product_parts", lambda rows, inputs, outputs: parts)
    together = run(batch=2, T=3)
    assert len(calls) == 2  # prompt and rows: both layers are traced once
    kept = np.array([[True, True, False], [True] * 3])
    np.testing.assert_allclose(together.hidden[kept], apart.hidden[kept], atol=2e-6)
    for found, wanted in zip(together.layers, apart.layers, strict=True):
        np.testing.assert_allclose(found.k[1:], wanted.k[1:], atol=2e-6)
        np.testing.assert_allclose(found.v[1:], wanted.v[1:], atol=2e-6)


def test_a_product_is_cut_where_its_columns_are_few():
    assert product_parts(4, 4096, 6144) == 4
    assert product_parts(4, 2048, 3072) == 8
    assert product_parts(1, 4096, 28672) == 1
    assert product_parts(64, 4096, 6144) == 1
    assert product_parts(4, 100, 64) == 1


@pytest.mark.parametrize("window", [None, 5])
def test_a_fresh_chunk_over_its_own_rows_is_the_one_over_the_pages(window):
    """Rows that exist and pages come out the same in float32; padded rows, poisoned here, touch neither."""
    config = dataclasses.replace(CONFIG, windows=(window, None))
    params, _ = inputs()
    batch, T = 2, 19
    table = jnp.arange(1, 1 + 5 * batch).reshape(batch, 5)
    valid = jnp.arange(T) < jnp.array([[T], [11]])
    x = decoder.embed(params, config, jax.random.randint(jax.random.key(1), (batch, T), 0, 64))
    x = jnp.where(valid[..., None], x, 1e3)
    positions = jnp.broadcast_to(jnp.arange(T), (batch, T))

    def result(fresh):
        pools = init_layers(2, 11, 4, 2, 32, 32, jnp.float32)
        out = paged.paged_forward(
            params, config, x, pools, table, jnp.zeros(batch, jnp.int32), positions, valid, taps=(1,), fresh=fresh
        )
        kept = [np.asarray(a)[np.asarray(valid)] for a in (out.hidden, out.features)]
        return *kept, *(np.asarray(pool)[1:] for layer in out.layers for pool in layer)

    for found, wanted in zip(result("xla"), result(None), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("options", "over_rows"),
    [({}, True), ({"softcap": 30.0}, False), ({"value_dim": 16}, False), ({"sink": 4}, False), ({"fresh": None}, False)],
)
def test_what_a_library_cannot_attend_to_reads_the_pages(monkeypatch, options, over_rows):
    read = []

    def kernel(q, k_pages, v_pages, *rest, **_):
        read.append(True)
        return jnp.zeros((*q.shape[:3], v_pages.shape[-1]))

    monkeypatch.setattr(attend, "tree_attention", kernel)
    width = options.get("value_dim", 32)
    (layer,) = init_layers(1, 3, 4, 2, 32, width, jnp.float32)
    at = jnp.arange(4)[None]
    paged_attend = attend.PagedAttend(
        jnp.array([[1, 2]]),
        jnp.zeros(1, jnp.int32),
        find_slots(jnp.array([[1, 2]]), 4, at, at >= 0),
        None,
        at,
        at,
        options.get("sink", 0),
        options.get("fresh", "xla"),
    )
    q, k, v = jnp.ones((1, 4, 4, 32)), jnp.ones((1, 4, 2, 32)), jnp.ones((1, 4, 2, width))
    out, _ = paged_attend(layer, q, k, v, scale=1.0, window=None, softcap=options.get("softcap"))
    assert out.shape == (1, 4, 4, width) and read == [True] * (not over_rows)


def test_only_the_wanted_rows_leave_the_last_layer():
    rows = jnp.array([[4, 0], [2, 2]])
    every, few = (run(batch=2, T=5, taps=(0, 1), rows=r) for r in (None, rows))
    same = (jax.tree.leaves((out.features, out.layers)) for out in (few, every))
    for found, wanted in zip(*same, strict=True):
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(few.hidden, jnp.take_along_axis(every.hidden, rows[..., None], 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("windows", "traces"), [((None, None), 1), ((4, None), 2)])
def test_a_layer_is_traced_once_for_all_of_its_kind(monkeypatch, windows, traces):
    params, prompts = inputs()
    config, calls, original = dataclasses.replace(CONFIG, windows=windows), [], decoder.decoder_layer
    monkeypatch.setattr(decoder, "decoder_layer", lambda *args: calls.append(args[3]) or original(*args))
    at, pools = jnp.broadcast_to(jnp.arange(7), (2, 7)), init_layers(2, 5, 4, 2, 32, 32, jnp.float32)
    forward = functools.partial(
        paged.paged_forward,
        config=config,
        x=decoder.embed(params, config, prompts),
        layers=pools,
        page_table=jnp.arange(1, 5).reshape(2, 2),
        base=jnp.zeros(2, jnp.int32),
        positions=at,
        valid=at >= 0,
    )
    shared = jax.jit(lambda params: forward(params))(params)
    assert len(calls) == traces
    monkeypatch.setattr(decoder, "decode", lambda *args, traced_once: DECODE(*args))
    apart = jax.jit(lambda params: forward(params))(params)
    assert len(calls) == traces + 2
    for found, wanted in zip(jax.tree.leaves(shared), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_layer_with_a_number_among_its_parameters_is_traced_by_itself(monkeypatch):
    params, _ = inputs()
    seen = []
    monkeypatch.setattr(decoder, "decode", lambda *args, traced_once: seen.append(traced_once) or DECODE(*args))
    run()
    numbered = {**params, "layers": {name: {**layer, "scale": 2.0} for name, layer in params["layers"].items()}}
    at, pools = jnp.arange(4)[None], init_layers(2, 3, 4, 2, 32, 32, jnp.float32)
    x = decoder.embed(params, CONFIG, at)
    paged.paged_forward(numbered, CONFIG, x, pools, jnp.array([[1, 2]]), jnp.zeros(1, jnp.int32), at, at >= 0)
    assert seen == [True, True, False]
