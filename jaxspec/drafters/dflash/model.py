"""The forward of a block draft as pure functions over its parameter tree.

Context tokens enter every layer's cache as keys and values of the projected target features and never pass a norm, an
MLP or a residual of the draft. A block of slots then attends to them and to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.drafters.dflash.config import DFlashConfig
from jaxspec.models import decoder
from jaxspec.models.decoder import Attend
from jaxspec.models.layers import dense, gated_mlp, rms_norm
from pallas_kernels.layer.api import apply_rope
from pallas_kernels.product.api import add_up


def param_shapes(config: DFlashConfig) -> dict:
    """The whole parameter tree as shapes: nested dicts with Linen's names, tuples of ints as leaves."""
    c = config.layers
    E, V, r = c.hidden_size, c.vocab_size, config.markov_rank
    shapes: dict[str, Any] = {
        "fc": {"kernel": (config.feature_size, E)},
        "context_norm": {"scale": (E,)},
        "layers": {str(i): decoder.layer_shapes(c, i) for i in range(c.num_layers)},
        "final_norm": {"scale": (E,)},
    }
    if config.conv_kernel:
        width = 2 * config.conv_kernel
        conv = {"base": (2, config.conv_kernel, E), "dynamic": {"kernel": (E, width * (E // config.conv_group))}}
        for layer in shapes["layers"].values():
            layer |= {"attention_conv": dict(conv), "mlp_conv": dict(conv)}
    if config.own_embedding:
        shapes["embedder"] = {"embedding": (V, E)}
    if config.own_head:
        shapes["head"] = {"kernel": (E, config.draft_vocab_size)}
    if config.reduced_vocab:
        shapes["target_ids"] = (config.draft_vocab_size,)
    if config.selector_rank:
        table = {"embedding": (V, config.selector_rank)}
        hidden = {"kernel": (E, config.selector_rank)}
        shapes["selector"] = {"predecessor": table, "successor": dict(table), "hidden": hidden}
    if config.markov is not None:
        markov = {"predecessor": {"embedding": (V, r)}, "out": {"kernel": (r, config.draft_vocab_size)}}
        if config.markov == "gated":
            markov["gate"] = {"kernel": (E + r, r), "bias": (r,)}
        if config.markov == "rnn":
            markov["joint"] = {"kernel": (2 * r + E, 3 * r), "bias": (3 * r,)}
        shapes["markov"] = markov
    if config.confidence is not None:
        width = E + (r if config.confidence == "markov" else 0)
        shapes["confidence"] = {"kernel": (width, 1), "bias": (1,)}
    return shapes


def init_params(config: DFlashConfig, key: jax.Array, dtype=jnp.float32) -> dict:
    """Random parameters as in `decoder.init_tree`; convolutions begin as the identity, draft ids as the first target ids."""
    shapes = {name: part for name, part in param_shapes(config).items() if name != "target_ids"}
    params = decoder.init_tree(shapes, key, dtype)
    if config.conv_kernel:
        identity = jnp.zeros((2, config.conv_kernel, config.hidden_size), dtype).at[:, 0].set(1)
        for layer in params["layers"].values():
            layer["attention_conv"]["base"] = layer["mlp_conv"]["base"] = identity
    if config.reduced_vocab:
        params["target_ids"] = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
    return params


def compute_dtype(params: dict) -> jnp.dtype:
    """The type that the draft computes in: that of its weights (of their scales where they are quantised)."""
    kernel = params["fc"]["kernel"]
    return kernel["scale"].dtype if isinstance(kernel, dict) else kernel.dtype


def project(params: dict, config: DFlashConfig, features: Float[Array, "B T W"]) -> Float[Array, "B T E"]:
    """Context features: all taps through ``fc`` and its norm, once for all layers."""
    x = dense(features.astype(compute_dtype(params)), params["fc"])
    return rms_norm(x, params["context_norm"], config.layers.norm_eps)


def key_value_kernel(qkv: dict, config: ModelConfig) -> dict:
    """The key and value columns of a fused projection, in its own order: per kv head one key, one value."""
    K, D = config.num_kv_heads, config.head_dim
    G = config.num_heads // K

    def columns(x: Array) -> Array:
        return x.reshape(*x.shape[:-1], K, G + 2, D)[..., G:, :].reshape(*x.shape[:-1], K * 2 * D)

    return jax.tree.map(columns, qkv)


def with_context_product(params: dict, config: DFlashConfig) -> dict:
    """The parameters with the key and value columns of all layers side by side in one kernel, ``context``, for a product
    that reads them where they lie: a tenth more memory, and no copy of columns in every round. Shapes give shapes.
    """

    def join(layers: list[dict]) -> dict:
        columns = [key_value_kernel(layer["qkv"], config.layers) for layer in layers]
        context = jax.tree.map(lambda *parts: jnp.concatenate(parts, -1), *columns)
        if config.layers.qk_norm:
            context["k_norm"] = {"scale": jnp.stack([layer["k_norm"]["scale"] for layer in layers])[:, None]}
        return context

    layers = [params["layers"][str(i)]["attention"] for i in range(config.layers.num_layers)]
    abstract = isinstance(jax.tree.leaves(layers)[0], jax.ShapeDtypeStruct)
    return {**params, "context": jax.eval_shape(join, layers) if abstract else join(layers)}


def context_entries(
    params: dict, config: DFlashConfig, context: Float[Array, "B T E"], positions: Int[Array, "B T"]
) -> list[tuple[Array, Array]]:
    """Keys and values [B, T, K, D] of context tokens, one pair for each layer; arguments as for `context_heads`."""
    heads = context_heads(params, config, context, positions)
    return [(heads[:, :, i, 0], heads[:, :, i, 1]) for i in range(config.layers.num_layers)]


def context_heads(
    params: dict, config: DFlashConfig, context: Float[Array, "B T E"], positions: Int[Array, "B T"]
) -> Float[Array, "B T layers 2 K D"]:
    """Keys and values of context tokens in every layer.

    Args:
      params, config: the draft; `with_context_product` is applied if it has not been.
      context: from `project`.
      positions: positions of the tokens, those of their features.
    """
    c = config.layers
    params = params if "context" in params else with_context_product(params, config)
    shape = (*context.shape[:2], c.num_layers, c.num_kv_heads, 2, c.head_dim)
    k, v = jnp.moveaxis(dense(context, params["context"]).reshape(shape), 4, 0)
    if c.qk_norm:
        k = rms_norm(k, params["context"]["k_norm"], c.norm_eps)
    angles = decoder.layer_angles(c, positions)
    k = jnp.stack([apply_rope(k[:, :, i], angles[i]) for i in range(c.num_layers)], 2)
    return jnp.stack([k, v], 3)


def embed(params: dict, config: DFlashConfig, target: dict, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
    """Embeddings of a block: plain rows of the draft's own table or the target's, times the draft's scale."""
    owner = params if config.own_embedding else target
    x = owner["embedder"]["embedding"][tokens].astype(compute_dtype(params))
    return x if config.embedding_scale == 1.0 else x * jnp.asarray(config.embedding_scale, x.dtype)


def dynamic_kernels(conv: dict, z: Float[Array, "B T E"], config: DFlashConfig) -> Float[Array, "2 B T taps E"]:
    """DFlash2's convolution weights, for the input of a sub-layer and for its output; `config.conv_group` channels share the
    dynamic part."""
    B, T, E = z.shape
    dynamic = dense(z, conv["dynamic"]).reshape(B, T, 2, config.conv_kernel, E // config.conv_group)
    dynamic = jnp.repeat(dynamic, config.conv_group, axis=-1)
    return jnp.moveaxis(dynamic, 2, 0) + conv["base"].astype(z.dtype)[:, None, None]


def convolve(x: Float[Array, "B T E"], kernel: Float[Array, "B T taps E"]) -> Float[Array, "B T E"]:
    """y[t] = Σ_o kernel[t, o] · x[t - o], with nothing before the block."""
    out = kernel[:, :, 0] * x
    for o in range(1, kernel.shape[2]):
        out = out + kernel[:, :, o] * jnp.pad(x, ((0, 0), (o, 0), (0, 0)))[:, : x.shape[1]]
    return out


def convolved_layer(
    x: Float[Array, "B T E"], p: dict, config: DFlashConfig, window: int | None, angles, attend: Attend, cache: Any
) -> tuple[Float[Array, "B T E"], Any]:
    """One pre-norm layer of DFlash2 over the slots of a block: the input and the output of both sub-layers are convolved."""
    c = config.layers

    def sublayer(name: str, norm: str, function):
        z = rms_norm(x, p[norm], c.norm_eps)
        before, after = dynamic_kernels(p[f"{name}_conv"], z, config)
        y, extra = function(convolve(z, before))
        return convolve(y, after), extra

    def attention(z):
        parts, updated = decoder.attention(z, p["attention"], c, window, angles, attend, cache)
        return add_up(parts, z.dtype), updated

    with jax.named_scope("attention"):
        y, cache = sublayer("attention", "input_norm", attention)
        x = x + y
    with jax.named_scope("mlp"):
        y, _ = sublayer("mlp", "mlp_norm", lambda z: (gated_mlp(z, p["mlp"], c.activation), None))
        return x + y, cache


def run_block(
    params: dict,
    config: DFlashConfig,
    x: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    attends: Sequence[Attend],
    caches: Sequence[Any],
    windows: Sequence[int | None],
) -> tuple[Float[Array, "B T E"], tuple]:
    """Runs a block through all layers and the final norm.

    Args:
      params, config: the draft.
      x: from `embed`.
      positions: positions of the slots.
      attends: how each layer attends (`models.decoder.Attend`): its mask inside the block differs.
      caches: what they thread through.
      windows: attention window of each layer.
    """
    if not config.conv_kernel:
        windowed = replace(config.layers, windows=tuple(windows))
        return decoder.run_layers(params, windowed, x, positions, attends, caches)[1:]
    angles, updated = decoder.layer_angles(config.layers, positions), []
    for i in range(config.layers.num_layers):
        x, cache = convolved_layer(x, params["layers"][str(i)], config, windows[i], angles[i], attends[i], caches[i])
        updated.append(cache)
    return rms_norm(x, params["final_norm"], config.layers.norm_eps), tuple(updated)


def logits(
    params: dict, config: DFlashConfig, target: dict, target_config: ModelConfig, hidden: Float[Array, "*R E"]
) -> Float[Array, "*R Vd"]:
    """Logits over the draft vocabulary, in float32, before any correction by the token before."""
    if config.own_head:
        out = dense(hidden, params["head"]).astype(jnp.float32)
    else:
        out = decoder.unembed(target, replace(target_config, logit_softcap=None), hidden)
    if config.output_multiplier != 1.0:
        out = out * config.output_multiplier
    cap = config.logit_softcap
    return out if cap is None else cap * jnp.tanh(out / cap)
