"""Tiny targets with UNO adapters for the tests of the drafter."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxspec import DraftParams, ModelParams, load, load_draft
from jaxspec.drafters.uno import model as uno_model
from jaxspec.drafters.uno.config import UnoConfig
from tests.drafters.eagle_cases import tiny_target

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
VOCAB = 8


def target() -> ModelParams:
    """A random target with so few tokens that random drafts are accepted now and then."""
    return tiny_target(vocab=VOCAB, num_layers=1)


@cache
def random_adapter(seed: int = 1, scale: float = 0.5) -> DraftParams:
    """A random adapter for `target()`."""
    config = UnoConfig(target=target().config, rank=2, alpha=2 * scale)
    return DraftParams(uno_model.init_params(config, jax.random.key(seed)), config)


def without_effect(adapter: DraftParams) -> DraftParams:
    """The adapter with b = 0, as it is before any training."""
    tree = jax.tree_util.tree_map_with_path(lambda p, x: jnp.zeros_like(x) if p[-1].key == "b" else x, adapter.tree)
    return DraftParams(tree, adapter.config)


@cache
def recorded() -> tuple[ModelParams, DraftParams]:
    """The golden end-to-end case: a target of three layers and six tokens, and its adapter."""
    model = load(FIXTURES / "target_qwen3_smallvocab", dtype=jnp.float32)
    return model, load_draft(FIXTURES / "e2e_uno", model, dtype=jnp.float32)
