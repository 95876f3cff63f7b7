"""The bytes that a round must read: against hand counts, and against the floors that the peer table states."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxspec.benchmarking import reads, rounds, shapes, suites
from pallas_kernels import device
from pallas_kernels.product import api as product

PEER_FLOOR_MS = {
    "plain": 3.54,
    "eagle3 3/1/4": 4.09,
    "eagle3 5/4/8": 4.45,
    "eagle3 3/4/16": 4.09,
    "eagle3 5/8/64": 4.45,
    "eagle 5/4/8": 5.37,
    "ngram 16": 3.54,
    "standalone 3/1/4": 5.29,
    "dflash 16": 4.34,
}
"""Weights of a round / 4.24 TB/s at the Llama-3.1-8B shape, without KV, as stated beside SGLang's figures."""


def reads_of(row: str, target_name: str, context: int, dtype, rows: int = 1) -> dict[str, int]:
    entry = suites.PEER_ROWS[row]
    target = jax.eval_shape(lambda: shapes.random_model(target_name, dtype))
    draft = None
    if entry.draft is not None:
        name = "tiny" if target_name == "tiny" and entry.draft in shapes.MODELS else entry.draft
        draft = jax.eval_shape(lambda: shapes.random_draft(name, target.config, dtype))
    case = dataclasses.replace(entry.case, context=max(context, 1), batch=rows)
    batch = rounds.prepare(case, target, draft, 2)
    return reads.round_reads(batch.program, target.tree, batch.draft_tree, batch.state, context)


def test_a_plain_round_reads_every_kernel_once_and_the_committed_keys_and_values():
    c = shapes.MODELS["tiny"]
    E, F, D, V, N = c.hidden_size, c.ffn_size, c.head_dim, c.vocab_size, c.num_layers
    layer = E * (c.num_heads + 2 * c.num_kv_heads) * D + c.num_heads * D * E + 3 * E * F
    found = reads_of("plain", "tiny", 40, jnp.float32, rows=3)
    assert found == {"products": 4 * N * layer, "head": 4 * E * V, "attention": 4 * N * 3 * 40 * 2 * c.num_kv_heads * D}
    assert reads_of("ngram 16", "tiny", 40, jnp.float32, rows=3) == found  # looking n-grams up needs no weights


def test_an_eagle3_round_reads_its_head_once_a_level_and_its_layer_once_less():
    c, draft = shapes.MODELS["tiny"], shapes.eagle3(shapes.MODELS["tiny"])
    E, F, D = c.hidden_size, c.ffn_size, c.head_dim
    kv = 40 * 2 * c.num_kv_heads * D
    layer = 2 * E * (c.num_heads + 2 * c.num_kv_heads) * D + c.num_heads * D * E + 3 * E * F + kv
    found = reads_of("eagle3 3/1/4", "tiny", 40, jnp.float32)
    assert found["draft"] == 4 * (3 * E * draft.draft_vocab_size + 2 * layer)
    assert found["extend"] == 4 * (3 * E * E + layer)
    plain = reads_of("plain", "tiny", 40, jnp.float32)
    assert all(found[part] == plain[part] for part in ("products", "head", "attention"))


def test_quantised_weights_count_as_they_are_stored():
    target = jax.eval_shape(lambda: shapes.random_model("tiny", jnp.float32))

    def quantise(path, leaf):
        if path[-1].key != "kernel":
            return leaf
        return {"q": jax.ShapeDtypeStruct(leaf.shape, jnp.int8), "scale": jax.ShapeDtypeStruct(leaf.shape[1:], jnp.float32)}

    small = jax.tree_util.tree_map_with_path(quantise, target.tree)
    batch = rounds.prepare(suites.PEER_ROWS["plain"].case, target, None, 2)
    whole = reads.round_reads(batch.program, target.tree, None, batch.state, 0)
    found = reads.round_reads(batch.program, small, None, batch.state, 0)
    assert 4 * found["products"] == whole["products"]
    assert 4 * found["head"] == whole["head"]


@pytest.mark.parametrize("row", ["plain", "eagle3 3/1/4"])
def test_the_kernel_that_attends_makes_no_difference(row, monkeypatch):
    small = dataclasses.replace(shapes.MODELS["llama-1b"], num_layers=6, windows=())
    monkeypatch.setitem(shapes.MODELS, "small", small)
    plain = reads_of(row, "small", 40, jnp.bfloat16)
    monkeypatch.setattr(device, "capability", lambda: 8.0)  # Triton's chips
    assert reads_of(row, "small", 40, jnp.bfloat16) == plain
    assert plain["attention"] == 6 * 2 * 40 * 8 * 64 * 2


@pytest.mark.parametrize("row", ["eagle3 3/1/4", "eagle 5/4/8"])
def test_floors_of_the_peer_table(row):
    found = sum(reads_of(row, "llama-3.1-8b", 0, jnp.bfloat16).values()) / 4.24e9
    assert found == pytest.approx(PEER_FLOOR_MS[row], abs=0.006)


@pytest.mark.slow
@pytest.mark.parametrize("row", PEER_FLOOR_MS)
def test_every_floor_of_the_peer_table(row):
    # A block draft's context entries read the key and value columns of its projections a second time: 84 MB.
    again = 0.02 if row == "dflash 16" else 0.0
    found = sum(reads_of(row, "llama-3.1-8b", 0, jnp.bfloat16).values()) / 4.24e9
    assert found == pytest.approx(PEER_FLOOR_MS[row] + again, abs=0.006)


def test_weights_that_xla_multiplies_as_one_count():
    x, w, a = (jnp.zeros(shape, jnp.bfloat16) for shape in ((8, 512), (512, 256), (512, 64)))
    program = jax.make_jaxpr(lambda x, w, a: x @ jnp.concatenate([w, a], 1))(x, w, a).jaxpr
    tracer = reads._Tracer(batch=1, context=1)
    tracer.walk(program, dict.fromkeys(program.invars[1:], ("weight", None)), "target/mlp")
    assert tracer.bytes == {"products": (w.size + a.size) * 2}


@pytest.mark.skipif(product._kernel() is None, reason="this jax has no Mosaic GPU kernels")
def test_weights_that_a_mosaic_kernel_multiplies_count():
    skinny_product = product._kernel()
    tiling = skinny_product.Tiling(128, 64, 8, 2, 1)
    x, w = jnp.zeros((128, 512), jnp.bfloat16), jnp.zeros((512, 256), jnp.bfloat16)
    program = jax.make_jaxpr(lambda x, w: skinny_product.partial_products(x, w, tiling, dtype=jnp.float32))(x, w).jaxpr
    tracer = reads._Tracer(batch=1, context=1)
    tracer.walk(program, {program.invars[1]: ("weight", None)}, "target/mlp")
    assert tracer.bytes == {"products": w.size * 2}
