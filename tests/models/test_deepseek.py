"""Latent attention and routing within groups."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from jaxspec.kvcache import init_layers
from jaxspec.models import decoder
from jaxspec.models.attend import causal_attend
from jaxspec.models.moe import route
from jaxspec.models.paged import paged_forward

MOE = MoEConfig(num_experts=12, num_experts_per_token=3, ffn_size=8, num_groups=4, num_groups_per_token=2, routed_scale=2.5)
V2 = dataclasses.replace(MOE, group_score="max", normalize_weights=False)
V3 = dataclasses.replace(MOE, group_score="top2", scoring="sigmoid")


def route_one(scores: np.ndarray, choice: np.ndarray, moe: MoEConfig) -> dict[int, float]:
    """Expert → weight of one row, restated with plain loops."""
    size = moe.num_experts // moe.num_groups
    best = 1 if moe.group_score == "max" else 2
    value = [np.sort(choice[g * size : (g + 1) * size])[-best:].sum() for g in range(moe.num_groups)]
    groups = np.argsort(value)[-moe.num_groups_per_token :]
    allowed = [e for e in range(moe.num_experts) if e // size in groups]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: moe.num_experts_per_token]
    total = scores[chosen].sum() if moe.normalize_weights else 1.0
    return {e: scores[e] / total * moe.routed_scale for e in chosen}


@pytest.mark.parametrize("moe", [V2, V3], ids=["V2", "V3"])
def test_routing_chooses_within_the_best_groups(moe):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(1, 40, 6)).astype(np.float32), rng.normal(size=(6, 12)).astype(np.float32)
    # A bias large enough to make some choices that the scores alone would not make, negative for some experts.
    bias = rng.normal(size=12).astype(np.float32)
    router = {"kernel": jnp.asarray(kernel)} | ({"correction_bias": jnp.asarray(bias)} if moe is V3 else {})
    chosen, weights = jax.jit(route, static_argnums=2)(jnp.asarray(x), router, moe)
    logits = x[0] @ kernel
    biased = 0
    for row, (experts, found) in enumerate(zip(np.asarray(chosen[0]), np.asarray(weights[0]), strict=True)):
        if moe is V3:
            scores = 1 / (1 + np.exp(-logits[row]))
            expected = route_one(scores, scores + bias, moe)
            biased += set(expected) != set(route_one(scores, scores, moe))
        else:
            scores = np.exp(logits[row]) / np.exp(logits[row]).sum()
            expected = route_one(scores, scores, moe)
        assert set(experts.tolist()) == set(expected)
        np.testing.assert_allclose(found, [expected[e] for e in experts.tolist()], rtol=1e-5)
    assert biased > 0 or moe is V2


def tiny(query_rank: int | None) -> ModelConfig:
    return ModelConfig(
        family="deepseek_v2",
        vocab_size=20,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=10,
        ffn_size=24,
        max_positions=64,
        rope=RopeConfig(interleaved=True),
        mla=MLAConfig(12, 6, 4, 5, query_rank),
        moe=dataclasses.replace(V2, dense_layers=(0,), shared_ffn_size=16),
    )


@pytest.mark.parametrize("query_rank", [None, 7])
def test_paged_chunks_equal_one_dense_pass(query_rank):
    config = tiny(query_rank)
    params = decoder.init_params(config, jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 20, (2, 11)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(11), (2, 11))
    x = decoder.embed(params, config, tokens)
    dense = jax.jit(lambda x: decoder.decode(params, config, x, positions, causal_attend(positions), [None] * 2).hidden)(x)

    layers = init_layers(2, 9, 3, config.num_kv_heads, config.key_head_dim, config.value_head_dim, jnp.float32)
    assert layers[0].k.shape[-1] == 10 and layers[0].v.shape[-1] == 5
    table = jnp.asarray([[5, 2, 8, 1], [3, 7, 4, 6]], jnp.int32)
    for start, stop in ((0, 6), (6, 11)):
        out = jax.jit(paged_forward, static_argnums=1)(
            params,
            config,
            x[:, start:stop],
            layers,
            table,
            jnp.full(2, start),
            positions[:, start:stop],
            jnp.ones((2, stop - start), bool),
        )
        layers = out.layers
        np.testing.assert_allclose(out.hidden, dense[:, start:stop], atol=2e-5)


HF_COMMON = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    moe_intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    n_shared_experts=2,
    n_routed_experts=6,
    num_experts_per_tok=2,
    kv_lora_rank=12,
    qk_rope_head_dim=4,
    v_head_dim=6,
    qk_nope_head_dim=6,
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    bos_token_id=0,
    eos_token_id=1,
    head_dim=4,
)


@pytest.mark.parametrize(
    "changes",
    [
        dict(q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1),
        dict(q_lora_rank=8, topk_method="group_limited_greedy", n_group=3, topk_group=2),
    ],
    ids=["V2-Lite", "V2"],
)
def test_v2_equals_transformers(changes, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**HF_COMMON, **changes)).eval()
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(2, 32, 12)
    with torch.no_grad():
        expected = model(torch.tensor(tokens[None])).logits[0].numpy()
    params = jaxspec.load(tmp_path, dtype=jnp.float32)
    assert params.config.moe.num_groups == changes["n_group"]
    np.testing.assert_allclose(jaxspec.forward(params, tokens).logits, expected, atol=2e-5)
