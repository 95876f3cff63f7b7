"""Where training starts: pieces of the target, brought into the form that a draft head has them in."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.models import decoder
from jaxspec.models.attend import causal_attend


def plain_layers(target: ModelConfig, num_layers: int = 1, **changes: Any) -> ModelConfig:
    """Llama layers of the target's widths: what a draft of any target can be made of.

    The target's vocabulary, widths, heads, activation, norm epsilon and rotary base stay; windows, experts, latent attention,
    gates, q/k norms, soft caps and 1 + w norms go.
    """
    rope = dataclasses.replace(target.rope, interleaved=False, fraction=1.0)
    if target.mla is not None:
        rope = dataclasses.replace(rope, attention_factor=1.0)
    plain = dict(
        family="llama",
        num_layers=num_layers,
        windows=(None,) * num_layers,
        rope=rope,
        rope_local=None,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        attention_gate=False,
        norm_plus_one=False,
        sandwich_norms=False,
        embedding_scale=1.0,
        attention_scale=0.0,
        attention_softcap=None,
        logit_softcap=None,
        moe=None,
        mla=None,
        num_mtp_layers=0,
        mtp_family=None,
        architecture="LlamaForCausalLM",
    )
    return dataclasses.replace(target, **(plain | changes))


def norm_scale(config: ModelConfig, norm: dict) -> Float[Array, " E"]:
    """What a norm multiplies by, in float32, whether it stores w or w - 1."""
    scale = norm["scale"].astype(jnp.float32)
    return 1 + scale if config.norm_plus_one else scale


def size(x: Array) -> Float[Array, ""]:
    """Root mean square of an array."""
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def invertible(scale: Float[Array, " E"]) -> Float[Array, " E"]:
    """A norm's scale with entries near zero moved away from it, so that it can be divided by."""
    least = 0.1 * size(scale)
    return jnp.where(jnp.abs(scale) < least, jnp.where(scale < 0, -least, least), scale)


def residual_size(key: jax.Array, target: ModelConfig, tree: Any, token_counts: Int[Array, " V"]) -> Float[Array, ""]:
    """Median root mean square of the residual stream that enters the final norm, on tokens drawn by frequency."""
    logits = jnp.log(token_counts.astype(jnp.float32) + 1e-3)
    tokens = jax.random.categorical(key, logits, shape=(4, 32)).astype(jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    out = decoder.decode(
        tree,
        target,
        decoder.embed(tree, target, tokens),
        positions,
        causal_attend(positions),
        (None,) * target.num_layers,
        (target.num_layers,),
    )
    return jnp.median(jnp.sqrt(jnp.mean(jnp.square(out.features.astype(jnp.float32)), -1)))


def layer_from_target(
    key: jax.Array, config: ModelConfig, target: ModelConfig, tree: Any, layer: int, layer_of_draft: int = 0
) -> dict:
    """A decoder layer with the target's weights where it has such weights in this form; others are random, biases zero.

    Args:
      key: for what is random.
      config: the draft's layers (`plain_layers`).
      target, tree: the target.
      layer: which of the target's layers.
      layer_of_draft: which of the draft's layers.
    """
    made = decoder.init_tree(decoder.layer_shapes(config, layer_of_draft), key)
    source = tree["layers"][str(layer)]
    attention = target.mla is None and not target.attention_gate and config.qk_norm >= target.qk_norm
    for norm in ("input_norm", "mlp_norm"):
        made[norm]["scale"] = norm_scale(target, source[norm])
    if attention:
        _copy(made["attention"], source["attention"])
    if "mlp" in source:
        _copy(made["mlp"], source["mlp"])
    return made


def _copy(into: dict, source: dict) -> None:
    """Takes kernels and biases over where both sides have them in one shape."""
    for name, part in into.items():
        for leaf, value in part.items():
            found = source.get(name, {}).get(leaf)
            if found is not None and not isinstance(found, dict) and found.shape == value.shape:
                part[leaf] = found.astype(jnp.float32)


def copy_heads(into: dict, config: ModelConfig, source: dict, target: ModelConfig) -> None:
    """Attention heads of the target for a layer that has more heads, or more key/value heads, than the target.

    A head takes the target's query and output of its number, and the keys and values that the target's head reads; heads that
    the target does not have stay as they are.
    """
    E, D = config.hidden_size, config.head_dim
    if target.head_dim != D or "kernel" not in source.get("qkv", {}):
        return

    def split(kernel, c: ModelConfig):
        parts = kernel.reshape(E, c.num_kv_heads, c.num_heads // c.num_kv_heads + 2, D)
        return parts[:, :, :-2].reshape(E, c.num_heads, D), parts[:, :, -2], parts[:, :, -1]

    q, k, v = split(into["qkv"]["kernel"], config)
    theirs = split(source["qkv"]["kernel"].astype(jnp.float32), target)
    count = min(config.num_heads, target.num_heads)
    q = q.at[:, :count].set(theirs[0][:, :count])
    firsts = jnp.arange(config.num_kv_heads) * (config.num_heads // config.num_kv_heads)  # the first head that reads each
    read, known = firsts * target.num_kv_heads // target.num_heads, firsts < target.num_heads
    k, v = (
        jnp.where(known[:, None], theirs[i][:, jnp.minimum(read, target.num_kv_heads - 1)], own) for i, own in ((1, k), (2, v))
    )
    grouped = q.reshape(E, config.num_kv_heads, -1, D)
    into["qkv"]["kernel"] = jnp.concatenate([grouped, k[:, :, None], v[:, :, None]], 2).reshape(E, -1)
    rows = count * D
    into["out"]["kernel"] = into["out"]["kernel"].at[:rows].set(source["out"]["kernel"][:rows].astype(jnp.float32))
