"""Models and drafts of well-known shapes with random weights, made on the device tensor by tensor."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config import ConfigError, ModelConfig, RopeConfig
from jaxspec.drafters.dflash.config import DFlashConfig
from jaxspec.drafters.dflash.config import default_taps as dflash_taps
from jaxspec.drafters.eagle.config import EagleConfig
from jaxspec.drafters.eagle.config import default_taps as eagle_taps
from jaxspec.drafters.kinds import KINDS, imported, shapes_of
from jaxspec.drafters.mtp.config import MtpConfig, mtp_config
from jaxspec.drafters.uno.config import UnoConfig
from jaxspec.models import decoder
from jaxspec.models.decoder import FINAL_NORM
from jaxspec.params import DraftParams, ModelParams

LLAMA_ROPE = RopeConfig(
    theta=500000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
)


def _model(family: str, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int, **more):
    return ModelConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        **{"max_positions": 131072, **more},
    )


MODELS: dict[str, ModelConfig] = {
    "llama-3.1-8b": _model("llama", 4096, 32, 32, 8, 128, 14336, 128256, norm_eps=1e-5, rope=LLAMA_ROPE),
    "llama-1b": _model("llama", 2048, 16, 32, 8, 64, 8192, 128256, norm_eps=1e-5, rope=LLAMA_ROPE, tie_embeddings=True),
    "qwen3-8b": _model("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, rope=RopeConfig(theta=1e6), qk_norm=True),
    "smollm2-135m": _model(
        "llama", 576, 30, 9, 3, 64, 1536, 49152, norm_eps=1e-5, rope=RopeConfig(theta=1e5), tie_embeddings=True
    ),
    "tiny": _model("llama", 32, 4, 4, 2, 8, 64, 64),
}
"""Targets (and draft models) by name."""


def eagle3(target: ModelConfig) -> EagleConfig:
    """One layer of the target's sizes behind three taps, with a vocabulary of its own of at most 32000 tokens."""
    vocab = min(32000, target.vocab_size // 2)
    return EagleConfig(
        layers=_layers(target, 1),
        fused=True,
        taps=eagle_taps(target.num_layers),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=vocab,
        reduced_vocab=True,
        own_head=True,
    )


def eagle2(target: ModelConfig) -> EagleConfig:
    """One layer of the target's sizes, with the target's embedding and head."""
    return EagleConfig(
        layers=_layers(target, 1),
        fused=False,
        taps=(FINAL_NORM,),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        fc_bias=True,
    )


def dflash(target: ModelConfig, num_layers: int = 5, block_size: int = 16) -> DFlashConfig:
    """Layers of the target's sizes over blocks of 16, with the target's embedding and head."""
    num_layers = min(num_layers, target.num_layers - 2)
    return DFlashConfig(
        layers=_layers(target, num_layers),
        taps=dflash_taps(target.num_layers, num_layers),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        block_size=block_size,
        mask_token_id=target.vocab_size - 1,
        num_target_layers=target.num_layers,
    )


def dspark(target: ModelConfig) -> DFlashConfig:
    """Two layers over blocks of 7 with a vanilla Markov head of rank 256 and a confidence head that reads it."""
    rank = min(256, target.hidden_size)
    block = dflash(target, 2, 7)
    return dataclasses.replace(block, anchor_predicts=True, markov="vanilla", markov_rank=rank, confidence="markov")


def mtp(target: ModelConfig) -> MtpConfig:
    """One layer of the target's kind, as DeepSeek-V3 has."""
    return mtp_config(target, "deepseek", 1)


def uno(target: ModelConfig) -> UnoConfig:
    """Rank 128 on every linear layer, as the published adapters."""
    return UnoConfig(target, rank=min(128, target.hidden_size // 4), alpha=2048.0)


def _layers(target: ModelConfig, num_layers: int) -> ModelConfig:
    """Plain layers of the target's sizes."""
    return _model(
        "llama",
        target.hidden_size,
        num_layers,
        target.num_heads,
        target.num_kv_heads,
        target.head_dim,
        target.ffn_size,
        target.vocab_size,
        norm_eps=target.norm_eps,
        rope=target.rope,
        max_positions=target.max_positions,
    )


def drafts() -> dict[str, Callable[[ModelConfig], Any]]:
    """Drafts of a target by name: (the target's configuration) -> that of a draft of a well-known shape."""
    return {kind.head: imported(kind.example) for kind in KINDS.values() if kind.head is not None and kind.example is not None}


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "fan_in"))
def _draw(key: jax.Array, *, shape: tuple[int, ...], dtype: Any, fan_in: int) -> jax.Array:
    """Uniform numbers of variance 1 / fan_in from one random byte each: quick to make, and no zeros."""
    scale = 1 / (math.sqrt((256**2 - 1) / 12) * math.sqrt(fan_in))
    return ((jax.random.bits(key, shape, jnp.uint8).astype(jnp.float32) - 127.5) * scale).astype(dtype)


def random_tree(shapes: dict, seed: int, dtype: Any, norm_plus_one: bool = False) -> dict:
    """Random parameters on the default device, one program per shape: a large model never exists on the host.

    Args:
      shapes: nested dicts with tuples as leaves (`models.decoder.param_shapes` and the drafts' like).
      seed: of all tensors.
      dtype: of the floating ones.
      norm_plus_one: scales are stored as w - 1.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys, leaves = jax.random.split(jax.random.key(seed), len(paths)), []
    for (path, shape), key in zip(paths, keys, strict=True):
        name = path[-1].key
        if name == "target_ids":
            leaves.append(jnp.arange(shape[0], dtype=jnp.int32))
        elif name == "scale":
            leaves.append(jnp.full(shape, 0.0 if norm_plus_one else 1.0, dtype))
        elif name in ("bias", "correction_bias"):
            leaves.append(jnp.zeros(shape, dtype if name == "bias" else jnp.float32))
        else:
            fan_in = shape[-1] if name == "embedding" or len(shape) == 1 else shape[-2]
            leaves.append(_draw(key, shape=shape, dtype=jnp.dtype(dtype), fan_in=fan_in))
    return jax.tree_util.tree_unflatten(tree, leaves)


def random_model(name: str, dtype: Any, seed: int = 0) -> ModelParams:
    """A model of a built-in shape. Raises ConfigError with the known names."""
    if name not in MODELS:
        raise ConfigError(f"no built-in shape is called {name!r}; there are {', '.join(MODELS)}")
    config = MODELS[name]
    tree = random_tree(decoder.param_shapes(config), seed, dtype, config.norm_plus_one)
    return ModelParams(tree, config, source=f"random weights, shape {name}")


def random_draft(name: str, target: ModelConfig, dtype: Any, seed: int = 1) -> DraftParams | ModelParams:
    """A draft for a target: one of `drafts`, or a model of a built-in shape for STANDALONE."""
    known = drafts()
    if name in known:
        config = known[name](target)
        return DraftParams(random_tree(shapes_of(config), seed, dtype), config, f"random weights, {name}")
    if name not in MODELS:
        raise ConfigError(f"no built-in draft is called {name!r}; there are {', '.join((*known, *MODELS))}")
    return random_model(name, dtype, seed)
