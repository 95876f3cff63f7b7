"""Tiny targets with MTP layers for the tests of the drafter."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import ModelParams, load
from jaxspec.config import ModelConfig, MoEConfig, RopeConfig
from jaxspec.drafters.mtp import model as mtp_model
from jaxspec.drafters.mtp.config import MtpConfig, mtp_config
from jaxspec.loading import DraftParams
from jaxspec.models import decoder

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def with_mtp(params: ModelParams, config: MtpConfig, seed: int = 7) -> ModelParams:
    """A target with other, random MTP layers."""
    draft = DraftParams(mtp_model.init_params(config, jax.random.key(seed)), config)
    return ModelParams(params.tree, dataclasses.replace(params.config, num_mtp_layers=config.num_layers), drafts={"mtp": draft})


@cache
def dense_target(vocab: int = 24) -> ModelParams:
    """A random Qwen2 of one layer in float32."""
    config = ModelConfig(
        family="mimo",
        vocab_size=vocab,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        ffn_size=32,
        max_positions=512,
        qkv_bias=True,
    )
    params = decoder.init_params(config, jax.random.key(0))
    # Sharper logits than a fresh model gives, so that greedy choices do not hang on rounding.
    params["final_norm"]["scale"] = params["final_norm"]["scale"] * 4
    return ModelParams(params, config)


@cache
def gated_target() -> ModelParams:
    """Qwen3-Next's attention layer with experts as a target of its own: gates, partial rotation, 1 + w, a shared expert."""
    moe = MoEConfig(num_experts=3, num_experts_per_token=2, ffn_size=8, shared_ffn_size=8, shared_gate=True)
    config = dataclasses.replace(
        dense_target().config,
        family="qwen3_next",
        num_kv_heads=2,
        qkv_bias=False,
        qk_norm=True,
        attention_gate=True,
        norm_plus_one=True,
        rope=RopeConfig(fraction=0.5),
        moe=moe,
    )
    params = decoder.init_params(config, jax.random.key(1))
    params["final_norm"]["scale"] = params["final_norm"]["scale"] + 3
    return ModelParams(params, config)


@cache
def target(name: str) -> ModelParams:
    """Targets by name: two of the golden cases with their own layers, random ones, and some with two or three MTP layers."""
    if name in ("mtp_mimo", "mtp_deepseek_v3"):
        return load(FIXTURES / name, dtype=jnp.float32)
    if name == "gated":
        return with_mtp(gated_target(), mtp_config(gated_target().config, "qwen3_next", 1))
    config = mtp_config(dense_target().config, "mimo", {"raw": 1, "two layers": 2}.get(name, 3))
    if name == "raw":
        config = dataclasses.replace(config, recycle_normed=False, feature_tap=dense_target().config.num_layers)
    if name == "three layers, no chain":
        config = dataclasses.replace(config, chain_states=False)
    return with_mtp(dense_target(), config)


TARGETS = ("mtp_mimo", "mtp_deepseek_v3", "gated", "raw", "two layers", "three layers", "three layers, no chain")


def prompts(vocab: int, lengths=(9, 1, 14, 5), seed: int = 3) -> list[list[int]]:
    """Random prompts of mixed lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]
