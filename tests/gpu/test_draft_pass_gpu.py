"""UNO's draft pass in bfloat16: with the kernels of its adapter and without."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import SpecConfig
from jaxspec.benchmarking import rounds, shapes
from jaxspec.drafters.uno import model as uno_model
from jaxspec.drafters.uno.config import UnoConfig
from jaxspec.models import decoder
from jaxspec.params import DraftParams, ModelParams
from jaxspec.round import context
from pallas_kernels.layer import triton_gated_rope_write
from pallas_kernels.lora import api as lora

CONFIG = dataclasses.replace(
    shapes.MODELS["llama-3.1-8b"],
    num_layers=2,
    windows=(),
    vocab_size=4096,
    hidden_size=1024,
    num_heads=8,
    num_kv_heads=2,
    ffn_size=2048,
)


def in_blocks(tree, adapter):
    """Zeros where a fused adapter's second matrices have them, so that modules do not read each other's half."""
    for layer in tree["layers"].values():
        for product in (("attention", "qkv"), ("mlp", "gate_up")):
            lora = layer[product[0]][product[1]]
            rows = np.repeat(range(len(adapter.changed(product))), adapter.rank)
            lora["b"] = jnp.where(rows[:, None] == uno_model.blocks_of_columns(adapter, product), lora["b"], 0)
    return tree


@pytest.mark.parametrize(("rank", "batch", "rows"), [(64, 1, 8), (128, 1, 16), (64, 8, 8), (16, 1, 8)])
def test_a_draft_pass(rank, batch, rows, monkeypatch):
    adapter = UnoConfig(CONFIG, rank=rank, alpha=rank / 2)
    target = ModelParams(shapes.random_tree(decoder.param_shapes(CONFIG), 0, jnp.bfloat16), CONFIG)
    draft = DraftParams(in_blocks(shapes.random_tree(uno_model.param_shapes(adapter), 1, jnp.bfloat16), adapter), adapter)
    case = rounds.RoundCase("uno", "UNO", SpecConfig(num_draft_tokens=rows), batch, 100, None)
    at = rounds.prepare(case, target, draft, 2)
    noise = jnp.arange(batch * (rows - 1), dtype=jnp.int32).reshape(batch, -1) * 7 + 1

    def run(adapter):
        def logits(target, adapter):
            ctx = context(at.program, target, at.state, ~at.state.done)
            return at.program.drafter.run(adapter, ctx, noise)

        return jax.jit(logits)(target.tree, adapter)

    found, without = run(draft.tree), run(jax.tree.map(jnp.zeros_like, draft.tree))
    np.testing.assert_array_equal(found[0][:, 0], without[0][:, 0])  # the exact token's row
    assert np.abs(np.asarray(found[0] - without[0])[:, 1:]).max() > 0.5
    monkeypatch.setattr(lora, "_by_kernel", lambda *case: False)
    monkeypatch.setattr(triton_gated_rope_write, "serves", lambda *case: False)
    jax.clear_caches()
    wanted = run(draft.tree)
    jax.clear_caches()
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        ours, theirs = (np.asarray(a, np.float32) for a in (ours, theirs))
        assert np.linalg.norm(ours - theirs) < 0.03 * np.linalg.norm(theirs)
