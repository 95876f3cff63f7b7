"""A decoder-only transformer over a nested-dict Flax parameter tree: Llama, Mistral, Qwen2/3, MiMo, Qwen3-MoE,
Phi-3, Gemma 2/3, DeepSeek-V2/V3.

Every weight is declared once, in `param_shapes`; conversion, random initialisation and the forward agree on it. A layer
takes `attend` as an argument: paged for decoding, dense causal for `jaxspec.forward` and training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.models.deepseek import latent_attention, latent_attention_shapes
from jaxspec.models.layers import dense, gated_mlp, rms_norm, rope_angles, split_gate
from jaxspec.models.moe import mixture_of_experts, moe_shapes
from pallas_kernels.layer.api import add_norm, apply_rope, split_qkv
from pallas_kernels.product.api import add_up

# attend(layer_cache, q [B,T,H,Dk], k [B,T,K,Dk], v [B,T,K,Dv], *, scale, window, softcap) -> (out [B,T,H,Dv], layer_cache)
# It may have a method `projected` that takes what queries, keys and values are projected from (`attend.PagedAttend`).
Attend = Callable[..., tuple[Array, Any]]

FINAL_NORM = -1
"""The tap that stands for the output of the final norm."""


class Output(NamedTuple):
    """What a forward gives: the final norm's output [B,T,E], the taps concatenated [B,T,n·E] or None, the caches."""

    hidden: Array
    features: Array | None
    layers: tuple


def attention_shapes(config: ModelConfig) -> dict:
    """Shapes of one layer's attention parameters."""
    E, H, K, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    width = (H * (1 + config.attention_gate) + 2 * K) * D
    qkv = {"kernel": (E, width)}
    out = {"kernel": (H * D, E)}
    if config.qkv_bias:
        qkv["bias"] = (width,)
    if config.out_bias:
        out["bias"] = (E,)
    attention = {"qkv": qkv, "out": out}
    if config.qk_norm:
        attention |= {"q_norm": {"scale": (D,)}, "k_norm": {"scale": (D,)}}
    return attention


def layer_shapes(config: ModelConfig, layer: int) -> dict:
    """Shapes of one decoder layer's parameters."""
    E, F = config.hidden_size, config.ffn_size
    attention = attention_shapes(config) if config.mla is None else latent_attention_shapes(config)
    shapes = {"input_norm": {"scale": (E,)}, "attention": attention}
    if config.sandwich_norms:
        shapes |= {"post_attention_norm": {"scale": (E,)}, "post_mlp_norm": {"scale": (E,)}}
    shapes["mlp_norm"] = {"scale": (E,)}
    if config.is_moe_layer(layer):
        shapes["moe"] = moe_shapes(config)
    else:
        mlp = {"gate_up": {"kernel": (E, 2 * F)}, "down": {"kernel": (F, E)}}
        if config.mlp_bias:
            mlp["gate_up"]["bias"], mlp["down"]["bias"] = (2 * F,), (E,)
        shapes["mlp"] = mlp
    return shapes


def param_shapes(config: ModelConfig) -> dict:
    """The whole parameter tree as shapes: nested dicts with Linen's names, tuples of ints as leaves."""
    E, V = config.hidden_size, config.vocab_size
    shapes = {
        "embedder": {"embedding": (V, E)},
        "layers": {str(i): layer_shapes(config, i) for i in range(config.num_layers)},
        "final_norm": {"scale": (E,)},
    }
    if not config.tie_embeddings:
        shapes["head"] = {"kernel": (E, V)}
    return shapes


def init_params(config: ModelConfig, key: jax.Array, dtype=jnp.float32) -> dict:
    """Random parameters of the right shapes (`init_tree`)."""
    return init_tree(param_shapes(config), key, dtype, config.norm_plus_one)


def init_tree(shapes: dict, key: jax.Array, dtype=jnp.float32, norm_plus_one: bool = False) -> dict:
    """Random parameters: normal kernels with variance 1 / fan-in, scales of (an effective) one, biases of zero."""
    paths, tree = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))

    def leaf(path, shape, key):
        name = path[-1].key
        if name == "scale":
            return jnp.full(shape, 0.0 if norm_plus_one else 1.0, dtype)
        if name in ("bias", "correction_bias"):
            return jnp.zeros(shape, dtype if name == "bias" else jnp.float32)
        fan_in = shape[-1] if name == "embedding" else shape[-2]
        return (jax.random.normal(key, shape) * fan_in**-0.5).astype(dtype)

    keys = jax.random.split(key, len(paths))
    return jax.tree_util.tree_unflatten(tree, [leaf(p, s, k) for (p, s), k in zip(paths, keys, strict=True)])


def full_precision(params: dict):
    """A context in which float32 models multiply in float32: a GPU would round their products to TF32."""
    exact = params["embedder"]["embedding"].dtype == jnp.float32
    return jax.default_matmul_precision("highest") if exact else contextlib.nullcontext()


def embed(params: dict, config: ModelConfig, tokens: Int[Array, "B T"], dtype=None) -> Float[Array, "B T E"]:
    """Token embeddings, scaled as the model wants them (Gemma: the scale is rounded to the stored type first)."""
    table = params["embedder"]["embedding"]
    x = table[tokens]
    x = x if dtype is None else x.astype(dtype)
    return x if config.embedding_scale == 1.0 else x * jnp.asarray(config.embedding_scale, x.dtype)


def unembed(params: dict, config: ModelConfig, hidden: Float[Array, "*R E"], exact: bool = False) -> Float[Array, "*R V"]:
    """Next-token logits in float32 from the final norm's output.

    With `exact` they are the product's sums, which are made in float32 anyway: rounded to 16 bits, the largest of a small
    model's logits often tie. The other way is for training, whose derivatives are products of 16 bits then.
    """
    dtype = jnp.float32 if exact else hidden.dtype
    if config.tie_embeddings:
        logits = jnp.matmul(hidden, params["embedder"]["embedding"].astype(hidden.dtype).T, preferred_element_type=dtype)
    else:
        logits = dense(hidden, params["head"], dtype=dtype)
    logits = logits.astype(jnp.float32)
    cap = config.logit_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def attention(
    x: Float[Array, "B T E"], params: dict, config: ModelConfig, window: int | None, angles, attend: Attend, cache
) -> tuple[Float[Array, "parts B T out"], Any]:
    """Projections, q/k norms, rotary embedding, attention, a sigmoid gate (Qwen3-Next), output projection.

    Returns:
      What the sublayer adds to the residual stream, in parts, and the cache.
    """
    options = {"scale": config.attention_scale, "window": window, "softcap": config.attention_softcap}
    if hasattr(attend, "projected") and not config.qk_norm and not config.attention_gate:
        out, cache = attend.projected(cache, x, params["qkv"], angles, **options)
    else:
        projected = add_up(dense(x, params["qkv"], adder="any"), x.dtype)
        if config.attention_gate:
            projected, gate = split_gate(projected, config)
        q, k, v = split_qkv(projected, config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            q = rms_norm(q, params["q_norm"], config.norm_eps, config.norm_plus_one)
            k = rms_norm(k, params["k_norm"], config.norm_eps, config.norm_plus_one)
        out, cache = attend(cache, apply_rope(q, angles), apply_rope(k, angles), v, **options)
    out = out.reshape(*x.shape[:2], -1)
    if config.attention_gate:
        out = out * jax.nn.sigmoid(gate)
    return dense(out, params["out"], adder="norm"), cache


def decoder_layer(
    x: Float[Array, "B T E"],
    params: dict,
    config: ModelConfig,
    layer: int,
    angles,
    attend: Attend,
    cache,
    normed: Float[Array, "B T E"] | None = None,
    rows: Int[Array, "B R"] | None = None,
) -> tuple[Float[Array, "B kept E"], Float[Array, "parts B kept E"], Any]:
    """One pre-norm layer before its last sum, which may be one kernel with the norm behind it.

    With `sandwich_norms` the outputs of attention and MLP are normed before they are added.

    Args:
      x: the residual stream.
      params, config: of the layer, and the model.
      layer: its number.
      angles: from `layer_angles`.
      attend, cache: see `Attend`.
      normed: the layer's `input_norm` of x, where it is there already.
      rows: those that go through the MLP and come out; None: all.

    Returns:
      The residual stream with the attention's output in it, what the MLP adds in parts, the cache.
    """

    def norm(x, name):
        return rms_norm(x, params[name], config.norm_eps, config.norm_plus_one)

    normed = norm(x, "input_norm") if normed is None else normed
    with jax.named_scope("attention"):
        inputs = (normed, params["attention"], config, config.windows[layer], angles, attend, cache)
        if config.mla is None:
            parts, cache = attention(*inputs)
        else:
            y, cache = latent_attention(*inputs)
            parts = y[None]
        if rows is not None:
            x = jnp.take_along_axis(x, rows[..., None], 1)
            parts = jnp.take_along_axis(parts, rows[None, ..., None], 2)
        if config.sandwich_norms:
            parts = norm(add_up(parts, x.dtype), "post_attention_norm")[None]
    with jax.named_scope("mlp"):
        x, normed = add_norm(
            x,
            parts,
            params["mlp_norm"]["scale"],
            eps=config.norm_eps,
            plus_one=config.norm_plus_one,
            adapted="lora" in params["attention"]["out"],
        )
        if "moe" in params:
            parts = mixture_of_experts(normed, params["moe"], config)[None]
        else:
            parts = gated_mlp(normed, params["mlp"], config.activation, adder="norm")
        if config.sandwich_norms:
            parts = norm(add_up(parts, x.dtype), "post_mlp_norm")[None]
    return x, parts, cache


def layer_angles(config: ModelConfig, positions: Int[Array, "B T"]) -> list:
    """Rotary angles for every layer: local ones (Gemma 3) where a layer has a window and the model says so."""
    dim = config.rotary_dim
    full = rope_angles(config.rope, dim, positions)
    local = full if config.rope_local is None else rope_angles(config.rope_local, dim, positions)
    return [full if window is None else local for window in config.windows]


def decode(
    params: dict,
    config: ModelConfig,
    x: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    attend: Attend,
    layers: Sequence[Any],
    taps: tuple[int, ...] = (),
    rows: Int[Array, "B R"] | None = None,
    traced_once: bool = False,
) -> Output:
    """Runs all layers on embeddings.

    Args:
      params: the parameter tree.
      config: the model.
      x: what enters layer 0 (`embed`).
      positions: logical positions, for the rotary embedding.
      attend: writes keys and values and attends; see `Attend`.
      layers: what `attend` threads through, one entry per layer.
      taps: which features to return: i is the residual stream entering layer i, `FINAL_NORM` the output of the last norm.
      rows: those whose final hidden state is wanted, None for all: of the others the last layer makes keys and values alone.
        No tap may lie behind that layer then.
      traced_once: see `run_layers`.
    """
    attends = [attend] * config.num_layers
    stream, hidden, updated = run_layers(params, config, x, positions, attends, layers, rows, traced_once)
    tapped = [hidden if t == FINAL_NORM else stream[t] for t in taps]
    return Output(hidden, jnp.concatenate(tapped, -1) if tapped else None, updated)


def run_layers(
    params: dict,
    config: ModelConfig,
    x: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    attends: Sequence[Attend],
    caches: Sequence[Any],
    rows: Int[Array, "B R"] | None = None,
    traced_once: bool = False,
) -> tuple[list[Array], Float[Array, "B kept E"], tuple]:
    """All layers and the final norm, each layer with its own `Attend`; arguments as for `decode`.

    Args:
      traced_once: trace and lower a layer once for all that are of one kind (the window, what parameters there are). XLA
        inlines the calls before anything else, so the compiled program is the same. For an `attends` of one `Attend` that
        depends on its arguments alone.

    Returns:
      The residual stream entering every layer and leaving the last, the final norm's output, the caches.
    """
    angles = layer_angles(config, positions)
    every = [params["layers"][str(i)] for i in range(config.num_layers)]
    stream, updated = [x], []
    hidden = rms_norm(x, every[0]["input_norm"], config.norm_eps, config.norm_plus_one)

    def apply(x, hidden, layer, norm, angles, cache, kept, index):
        x, parts, cache = decoder_layer(x, layer, config, index, angles, attends[index], cache, hidden, kept)
        adapted = "lora" in layer.get("mlp", {}).get("down", {})
        options = {"eps": config.norm_eps, "plus_one": config.norm_plus_one, "adapted": adapted}
        return *add_norm(x, parts, norm["scale"], **options), cache

    if traced_once:
        apply = jax.jit(apply, static_argnums=7)
    for i, layer in enumerate(every):
        last = i == config.num_layers - 1
        norm = params["final_norm"] if last else every[i + 1]["input_norm"]
        index = config.windows.index(config.windows[i]) if traced_once else i  # the first of its kind stands for all
        x, hidden, cache = apply(x, hidden, layer, norm, angles[i], caches[i], rows if last else None, index)
        stream.append(x)
        updated.append(cache)
    return stream, hidden, tuple(updated)
