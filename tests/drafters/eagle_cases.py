"""Tiny targets and EAGLE heads for the tests of the drafter."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import ModelParams, load, load_draft
from jaxspec.config import ModelConfig
from jaxspec.drafters.eagle import model as eagle_model
from jaxspec.drafters.eagle.config import EagleConfig
from jaxspec.loading import DraftParams
from jaxspec.models import decoder
from jaxspec.models.decoder import FINAL_NORM

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


@cache
def tiny_target(vocab: int = 24, seed: int = 0, **over) -> ModelParams:
    """A random Llama of two layers in float32."""
    settings = dict(
        family="llama",
        vocab_size=vocab,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        ffn_size=32,
        max_positions=512,
    )
    config = ModelConfig(**settings | over)
    params = decoder.init_params(config, jax.random.key(seed))
    # Sharper logits than a fresh model gives, so that greedy choices do not hang on rounding.
    params["final_norm"]["scale"] = params["final_norm"]["scale"] * 4
    return ModelParams(params, config)


def head_config(target: ModelConfig, fused: bool, *, width: int | None = None, num_layers: int = 1, **over) -> EagleConfig:
    """The configuration of a head for a target."""
    width = width or target.hidden_size
    layers = ModelConfig(
        family="eagle",
        vocab_size=target.vocab_size,
        hidden_size=width,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        ffn_size=24,
        max_positions=target.max_positions,
        qk_norm=over.pop("qk_norm", False),
        qkv_bias=over.pop("qkv_bias", False),
    )
    settings = dict(
        layers=layers,
        fused=fused,
        taps=(0, 1, 2) if fused else (FINAL_NORM,),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        own_head=fused,
        fc_bias=not fused,
    )
    return EagleConfig(**settings | over)


VARIANTS = {
    "eagle": dict(fused=False),
    "eagle3": dict(fused=True, draft_vocab_size=15, reduced_vocab=True),
    "eagle31": dict(fused=True, fc_norm=True, norm_output=True),
    "speculators": dict(fused=True, norm_before_fc=True, norm_before_residual=True, num_layers=2),
    "deepspec": dict(fused=True, qk_norm=True, own_embedding=True),
    "wide": dict(fused=True, width=24, own_embedding=True, qkv_bias=True),
    "borrowed head": dict(fused=True, own_head=False),
    "peagle": dict(fused=True, num_layers=2, mask_token_id=3),
}


@cache
def random_head(variant: str, seed: int = 1) -> DraftParams:
    """A random head of every kind for `tiny_target()`."""
    config = head_config(tiny_target().config, **VARIANTS[variant])
    params = eagle_model.init_params(config, jax.random.key(seed))
    if config.reduced_vocab:
        ids = np.random.default_rng(0).permutation(config.layers.vocab_size)[: config.draft_vocab_size]
        params["target_ids"] = jnp.asarray(np.sort(ids), jnp.int32)
    return DraftParams(params, config)


@cache
def trained(name: str) -> tuple[ModelParams, DraftParams]:
    """A target of 14 tokens and a head that was trained on it for a moment: "e2e_eagle2" or "e2e_eagle3"."""
    target = load(FIXTURES / "target_llama_smallvocab", dtype=jnp.float32)
    return target, load_draft(FIXTURES / name, target.config, dtype=jnp.float32)


def prompts(vocab: int, lengths=(9, 1, 14, 5), seed: int = 3) -> list[list[int]]:
    """Random prompts of mixed lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]
