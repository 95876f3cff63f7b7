"""The forward of a multi-token-prediction layer as pure functions over its parameter tree.

A layer turns a pair (hidden state at position p, token at p + 1) into a state whose logits predict the token at p + 2.
Embedding and head are the target's.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.drafters.mtp.config import MtpConfig
from jaxspec.models import decoder
from jaxspec.models.decoder import Attend
from jaxspec.models.layers import dense, rms_norm
from pallas_kernels.product.api import add_up


class Step(NamedTuple):
    """What a layer gives: its state behind its output norm (the head reads it) and before, and its cache."""

    normed: Float[Array, "B T E"]
    raw: Float[Array, "B T E"]
    cache: Any


def param_shapes(config: MtpConfig) -> dict:
    """The whole parameter tree as shapes: nested dicts with Linen's names, tuples of ints as leaves."""
    E = config.layers.hidden_size

    def layer(i: int) -> dict:
        return {
            "embedding_norm": {"scale": (E,)},
            "hidden_norm": {"scale": (E,)},
            "proj": {"kernel": (2 * E, E)},
            "block": decoder.layer_shapes(config.layers, i),
            "final_norm": {"scale": (E,)},
        }

    return {"layers": {str(i): layer(i) for i in range(config.num_layers)}}


def init_params(config: MtpConfig, key: jax.Array, dtype=jnp.float32) -> dict:
    """Random parameters, as `decoder.init_params` makes them."""
    return decoder.init_tree(param_shapes(config), key, dtype, norm_plus_one=config.layers.norm_plus_one)


def compute_dtype(params: dict) -> jnp.dtype:
    """The type that the layers compute in: that of their weights (of their scales where they are quantised)."""
    kernel = params["layers"]["0"]["proj"]["kernel"]
    return kernel["scale"].dtype if isinstance(kernel, dict) else kernel.dtype


def embed(
    params: dict,
    config: MtpConfig,
    target: dict,
    target_config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T E"]:
    """The embedding half of the pairs at `positions`, from the target's table; zero at position 0 where the family says so."""
    x = decoder.embed(target, target_config, tokens, compute_dtype(params))
    return jnp.where(positions[..., None] == 0, 0, x) if config.zero_first_embedding else x


def step(
    params: dict,
    config: MtpConfig,
    layer: int,
    embedding: Float[Array, "B T E"],
    hidden: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    attend: Attend,
    cache: Any,
    window: int | None = None,
) -> Step:
    """Runs one MTP layer on pairs.

    Args:
      params, config: all MTP layers.
      layer: which of them.
      embedding: of the token at position + 1 (`embed`).
      hidden: the target's feature, or the state of the step before.
      positions: position of the pair, which is that of its feature.
      attend: see `models.decoder.Attend`.
      cache: what `attend` threads through.
      window: attention window; None for full attention.
    """
    c, p = config.layers, params["layers"][str(layer)]
    if window is not None:
        c = dataclasses.replace(c, windows=(window,) * c.num_layers)

    def norm(y, name):
        return rms_norm(y, p[name], c.norm_eps, c.norm_plus_one)

    halves = [norm(embedding, "embedding_norm"), norm(hidden.astype(embedding.dtype), "hidden_norm")]
    x = dense(jnp.concatenate(halves[::-1] if config.hidden_first else halves, -1), p["proj"])
    angles = decoder.layer_angles(c, positions)[layer]
    x, parts, cache = decoder.decoder_layer(x, p["block"], c, layer, angles, attend, cache)
    raw = x + add_up(parts, x.dtype)
    return Step(norm(raw, "final_norm"), raw, cache)


def logits(
    params: dict, config: MtpConfig, layer: int, target: dict, target_config: ModelConfig, state: Float[Array, "*R E"]
) -> Float[Array, "*R V"]:
    """Next-token logits in float32 behind recycled states: the layer's norm where it is still due, then the head."""
    if not config.recycle_normed:
        c = config.layers
        state = rms_norm(state, params["layers"][str(layer)]["final_norm"], c.norm_eps, c.norm_plus_one)
    return decoder.unembed(target, target_config, state)
