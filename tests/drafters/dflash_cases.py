"""Tiny block drafts of every family for the tests of the drafter."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import DraftParams, ModelParams, load, load_draft
from jaxspec.config import ModelConfig
from jaxspec.drafters.dflash import model as dflash_model
from jaxspec.drafters.dflash.config import DFlashConfig
from tests.drafters.eagle_cases import tiny_target

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
VOCAB = 8


def target() -> ModelParams:
    """A random target with so few tokens that random drafts are accepted now and then."""
    return tiny_target(vocab=VOCAB, num_layers=1)


def draft_config(target: ModelConfig, *, num_layers: int = 1, windows=(), width: int | None = None, **over) -> DFlashConfig:
    """The configuration of a draft for a target."""
    layers = ModelConfig(
        family="dflash",
        vocab_size=target.vocab_size,
        hidden_size=width or target.hidden_size,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        ffn_size=24,
        max_positions=target.max_positions,
        windows=windows,
        qk_norm=True,
        qkv_bias=over.pop("qkv_bias", False),
    )
    settings = dict(
        layers=layers,
        taps=(0, 1),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        block_size=5,
        mask_token_id=target.vocab_size - 1,
    )
    return DFlashConfig(**settings | over)


DSPARK = dict(anchor_predicts=True, block_size=4, markov_rank=3, own_embedding=True, own_head=True)
VARIANTS = {
    "dflash": dict(num_layers=2),
    "sliding": dict(num_layers=2, windows=(3, None), causal=(True, False)),
    "symmetric": dict(
        windows=(3,), causal=(False,), embedding_scale=1.5, output_multiplier=0.75, logit_softcap=6.0, qkv_bias=True
    ),
    "dflash2": dict(conv_kernel=2, conv_group=4, selector_rank=3, selector_top_k=4),
    "causal head": dict(causal_head=True),
    "deepspec": dict(anchor_predicts=True, block_size=4, own_embedding=True, own_head=True, width=24),
    "speculators": dict(own_embedding=True, own_head=True, reduced_vocab=True, draft_vocab_size=6, layout="speculators"),
    "dspark": dict(**DSPARK, markov="vanilla", confidence="markov"),
    "dspark gated": dict(**DSPARK, markov="gated", confidence="hidden"),
    "dspark rnn": dict(**DSPARK, markov="rnn"),
}


@cache
def random_draft(variant: str, seed: int | None = None) -> DraftParams:
    """A random draft of every family for `target()`; by default one that the target agrees with now and then."""
    seed = {"deepspec": 5}.get(variant, 1) if seed is None else seed
    config = draft_config(target().config, **VARIANTS[variant])
    params = dflash_model.init_params(config, jax.random.key(seed))
    if config.reduced_vocab:
        ids = np.random.default_rng(0).permutation(VOCAB)[: config.draft_vocab_size]
        params["target_ids"] = jnp.asarray(np.sort(ids), jnp.int32)
    if config.confidence is not None:
        params["confidence"]["kernel"] *= 4  # sure of itself, one way or the other
    return DraftParams(params, config)


@cache
def recorded(name: str) -> tuple[ModelParams, DraftParams]:
    """A target of six tokens and a draft whose blocks it accepts now and then: "e2e_dflash" or "e2e_dflash2"."""
    model = load(FIXTURES / "target_qwen3_smallvocab", dtype=jnp.float32)
    return model, load_draft(FIXTURES / name, model.config, dtype=jnp.float32)
