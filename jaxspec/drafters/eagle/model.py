"""The forward of an EAGLE draft head as pure functions over its parameter tree.

A head turns a pair (target feature at position p, token at p + 1) into a prediction of the feature at p + 1, and that
into logits for the token at p + 2. At later steps its own output takes the place of the target's feature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.drafters.eagle.config import EagleConfig
from jaxspec.models import decoder
from jaxspec.models.decoder import Attend
from jaxspec.models.layers import dense, gated_mlp, rms_norm
from pallas_kernels.layer.api import add_norm
from pallas_kernels.product.api import add_up


def param_shapes(config: EagleConfig) -> dict:
    """The whole parameter tree as shapes: nested dicts with Linen's names, tuples of ints as leaves."""
    c = config.layers
    E, n = c.hidden_size, len(config.taps)
    shapes: dict[str, Any] = {"fc": {"kernel": (config.feature_size if config.fused else E + config.feature_size, E)}}
    if config.fc_bias:
        shapes["fc"]["bias"] = (E,)
    if config.fc_norm:
        shapes["fc_norm"] = {str(i): {"scale": (config.target_hidden_size,)} for i in range(n)}
    if config.norm_before_fc:
        shapes["input_norm"] = {"scale": (config.feature_size,)}
    layers = {str(i): decoder.layer_shapes(c, i) for i in range(c.num_layers)}
    if config.fused:
        layers["0"]["hidden_norm"] = {"scale": (E,)}
        rows, columns = layers["0"]["attention"]["qkv"]["kernel"]
        layers["0"]["attention"]["qkv"]["kernel"] = (2 * rows, columns)
        shapes["final_norm"] = {"scale": (E,)}
    else:
        del layers["0"]["input_norm"]
    shapes["layers"] = layers
    if config.own_embedding:
        shapes["embedder"] = {"embedding": (c.vocab_size, E)}
    if config.own_head:
        shapes["head"] = {"kernel": (E, config.draft_vocab_size)}
    if config.reduced_vocab:
        shapes["target_ids"] = (config.draft_vocab_size,)
    if config.mask_token_id is not None:
        shapes["mask_hidden"] = (config.feature_size,)
    return shapes


def init_params(config: EagleConfig, key: jax.Array, dtype=jnp.float32) -> dict:
    """Random parameters: kernels of variance 1 / fan-in, scales of one; draft ids stand for the first target ids."""
    paths, tree = jax.tree_util.tree_flatten_with_path(param_shapes(config), is_leaf=lambda x: isinstance(x, tuple))

    def leaf(path, shape, key):
        name = path[-1].key
        if name == "target_ids":
            return jnp.arange(shape[0], dtype=jnp.int32)
        if name == "scale":
            return jnp.ones(shape, dtype)
        if name == "bias":
            return jnp.zeros(shape, dtype)
        fan_in = shape[-1] if len(shape) == 1 or name == "embedding" else shape[-2]
        return (jax.random.normal(key, shape) * fan_in**-0.5).astype(dtype)

    keys = jax.random.split(key, len(paths))
    return jax.tree_util.tree_unflatten(tree, [leaf(p, s, k) for (p, s), k in zip(paths, keys, strict=True)])


def compute_dtype(params: dict) -> jnp.dtype:
    """The type that the head computes in: that of its weights (of their scales where they are quantised)."""
    kernel = params["fc"]["kernel"]
    return kernel["scale"].dtype if isinstance(kernel, dict) else kernel.dtype


def embed(params: dict, config: EagleConfig, target: dict, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
    """Token embeddings from the head's own table or the target's, plain in both cases (see `EagleConfig`)."""
    owner = params if config.own_embedding else target
    return owner["embedder"]["embedding"][tokens].astype(compute_dtype(params))


def project(params: dict, config: EagleConfig, features: Float[Array, "B T W"]) -> Float[Array, "B T E"]:
    """What a step is fed where the target's features are known: EAGLE-3's ``fc``; EAGLE-1/2's feature as it is.

    Args:
      params, config: the head.
      features: all taps, side by side.
    """
    eps = config.layers.norm_eps
    x = features.astype(compute_dtype(params))
    if not config.fused:
        return x
    if config.norm_before_fc:
        x = rms_norm(x, params["input_norm"], eps)
    if config.fc_norm:
        parts = jnp.split(x, len(config.taps), axis=-1)
        x = jnp.concatenate([rms_norm(part, params["fc_norm"][str(i)], eps) for i, part in enumerate(parts)], -1)
    return dense(x, params["fc"])


def step(
    params: dict,
    config: EagleConfig,
    embedding: Float[Array, "B T E"],
    hidden: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    attend: Attend,
    caches: Sequence[Any],
    window: int | None = None,
) -> tuple[Float[Array, "B T E"], tuple]:
    """Runs the head's layers on pairs.

    Args:
      params, config: the head.
      embedding: of the token at position + 1 (`embed`).
      hidden: `project`'s output, or the state of the step before.
      positions: position of the pair, which is that of its feature.
      attend: see `models.decoder.Attend`.
      caches: what `attend` threads through, one per layer.
      window: attention window of all layers; None for what the checkpoint says.

    Returns:
      The recurrent state, which `logits` reads as well, and the caches.
    """
    c: ModelConfig = config.layers
    angles = decoder.layer_angles(c, positions)
    windows = c.windows if window is None else (window,) * c.num_layers
    p, updated = params["layers"]["0"], []

    def norm(y, name):
        return rms_norm(y, p[name], c.norm_eps)

    with jax.named_scope("attention"):
        if config.fused:
            normed = norm(hidden, "hidden_norm")
            mixed = jnp.concatenate([norm(embedding, "input_norm"), normed], -1)
            x = normed if config.norm_before_residual else hidden
        else:
            x = mixed = dense(jnp.concatenate([embedding, hidden], -1), params["fc"])
        parts, cache = decoder.attention(mixed, p["attention"], c, windows[0], angles[0], attend, caches[0])
        updated = [cache]
    with jax.named_scope("mlp"):
        x, normed = add_norm(x, parts, p["mlp_norm"]["scale"], eps=c.norm_eps)
        x = x + add_up(gated_mlp(normed, p["mlp"], c.activation, adder="norm"), x.dtype)
    windowed = dataclasses.replace(c, windows=windows)
    for i in range(1, c.num_layers):
        x, parts, cache = decoder.decoder_layer(x, params["layers"][str(i)], windowed, i, angles[i], attend, caches[i])
        x = x + add_up(parts, x.dtype)
        updated.append(cache)
    if config.norm_output:
        x = rms_norm(x, params["final_norm"], c.norm_eps)
    return x, tuple(updated)


def logits(
    params: dict,
    config: EagleConfig,
    target: dict,
    target_config: ModelConfig,
    state: Float[Array, "*R E"],
    exact: bool = False,
) -> Float[Array, "*R Vd"]:
    """Logits over the draft vocabulary, in float32, behind a recurrent state; `exact`: see `decoder.unembed`."""
    if config.fused and not config.norm_output:
        state = rms_norm(state, params["final_norm"], config.layers.norm_eps)
    if not config.own_head:
        return decoder.unembed(target, target_config, state, exact)
    return dense(state, params["head"], dtype=jnp.float32 if exact else None).astype(jnp.float32)


def to_target_ids(params: dict, config: EagleConfig, ids: Int[Array, "*R"]) -> Int[Array, "*R"]:
    """Draft ids → target ids."""
    return params["target_ids"][ids] if config.reduced_vocab else ids
