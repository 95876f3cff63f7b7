"""Tiny random models and a character tokenizer: enough to run every code path in milliseconds."""

from __future__ import annotations

import functools

import jax
import numpy as np

import jaxspec
from jaxspec.config import ModelConfig
from jaxspec.models.decoder import init_params

VOCAB = 61
CHARACTERS = [chr(32 + i) for i in range(VOCAB)]


class CharTokenizer:
    """One character a token; ids 0 … VOCAB - 1 are the printable characters from space on."""

    has_chat_template = False
    vocab = {c: i for i, c in enumerate(CHARACTERS)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.vocab[c] for c in text]

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return "".join(CHARACTERS[i] for i in ids)


def config(layers: int = 2, width: int = 32, heads: int = 4, vocab: int = VOCAB, **changes) -> ModelConfig:
    values = {
        "family": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_size": 2 * width,
        "max_positions": 256,
    }
    return ModelConfig(**{**values, **changes})


@functools.cache
def target(seed: int = 0, **changes) -> jaxspec.ModelParams:
    made = config(**changes)
    return jaxspec.ModelParams(init_params(made, jax.random.key(seed)), made, CharTokenizer(), source=f"tiny target {seed}")


@functools.cache
def small_draft(seed: int = 1) -> jaxspec.ModelParams:
    made = config(layers=1, width=16, heads=2)
    return jaxspec.ModelParams(init_params(made, jax.random.key(seed)), made, CharTokenizer(), source=f"tiny draft {seed}")


def prompts(count: int, seed: int = 0, longest: int = 21) -> list[list[int]]:
    """Prompts of different lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, longest + 1, count)]
