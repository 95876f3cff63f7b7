"""The pieces of a decoder layer as pure functions over nested-dict parameter trees (axis letters: `jaxspec.__init__`)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig, RopeConfig
from pallas_kernels.layer import api as layer_kernels
from pallas_kernels.lora.api import Adapter, adapted_product, add_adapter
from pallas_kernels.product.api import Adder, gated_product, product, product_in_parts


def dense(x: Float[Array, "*R I"], layer: dict, dtype=None, adder: Adder | None = None) -> Array:
    """x @ kernel + bias: the one place through which every product with a weight goes.

    Args:
      x: rows.
      layer: ``kernel`` is an array [in, out] or a pair {"q": int8 [in, out], "scale": [out]}. ``lora`` holds the fields of
        `pallas_kernels.lora.api.Adapter`; only a draft pass puts it there (`jaxspec.drafters.uno.model.adapted`).
      dtype: of the result; None for the type of x.
      adder: what adds up parts of the result (`pallas_kernels.product.api.product_in_parts`); x is [B, T, I] then.

    Returns:
      [*R, O]; with an `adder` the parts of it, [parts, B, T, O].
    """
    if adder is not None and is_plain(layer):
        return product_in_parts(x, layer["kernel"].astype(x.dtype), adder)
    y = adapted(x, layer) if "lora" in layer else whole_product(x, layer, x.dtype if dtype is None else dtype)
    return y if adder is None else y[None]


def is_plain(layer: dict) -> bool:
    """Whether a product is one with an array alone: neither a bias, nor quantised, nor adapted."""
    return layer.keys() == {"kernel"} and not isinstance(layer["kernel"], dict)


def whole_product(x: Float[Array, "*R I"], layer: dict, dtype) -> Float[Array, "*R O"]:
    """`dense` without an adapter, in one part."""
    kernel = layer["kernel"]
    if isinstance(kernel, dict):
        y = jnp.matmul(x, kernel["q"].astype(x.dtype), preferred_element_type=dtype) * kernel["scale"].astype(dtype)
    else:
        y = product(x, kernel.astype(x.dtype), dtype)
    return y + layer["bias"].astype(dtype) if "bias" in layer else y


def adapted(x: Float[Array, "B T I"], layer: dict, silu: bool = False) -> Float[Array, "B T out"]:
    """`dense` with an adapter; with `silu` the columns are gates and as many values: silu(gate) * value, [B, T, O / 2]."""
    adapter, layer = split_adapter(layer)
    if is_plain(layer):
        return adapted_product(x, layer["kernel"], adapter, silu=silu)
    return add_adapter(x, dense(x, layer), adapter, silu=silu)


def split_adapter(layer: dict) -> tuple[Adapter, dict]:
    """The adapter of a product, and the product without it."""
    return Adapter(**layer["lora"]), {name: leaf for name, leaf in layer.items() if name != "lora"}


def rms_norm(x: Float[Array, "*R E"], layer: dict, eps: float, plus_one: bool = False) -> Float[Array, "*R E"]:
    """Root-mean-square norm (Zhang & Sennrich 2019) in float32; with `plus_one` the stored scale is w - 1 (Gemma)."""
    return layer_kernels.rms_norm(x, layer["scale"], eps, plus_one)


def activation(name: str, x: Array) -> Array:
    """A gate's non-linearity under its Hugging Face name."""
    if name == "silu":
        return jax.nn.silu(x)
    if name in ("gelu_pytorch_tanh", "gelu_new"):
        return jax.nn.gelu(x, approximate=True)
    if name == "gelu":
        return jax.nn.gelu(x, approximate=False)
    raise ValueError(f"unknown activation {name!r}; known: silu, gelu, gelu_pytorch_tanh, gelu_new")


def gated_mlp(x: Float[Array, "*R E"], mlp: dict, name: str, adder: Adder | None = None) -> Array:
    """down(act(gate(x)) * up(x)); gate and up are one product whose output holds gate, then up.

    [*R, E]; with an `adder` in parts, see `dense`.
    """
    return dense(gated(x, mlp["gate_up"], name), mlp["down"], adder=adder)


def gated(x: Float[Array, "*R E"], layer: dict, name: str) -> Float[Array, "*R F"]:
    """act(gate(x)) * up(x)."""
    if name == "silu" and "lora" in layer:
        return adapted(x, layer, silu=True)
    if name == "silu" and is_plain(layer):
        return gated_product(x, layer["kernel"].astype(x.dtype))
    gate, up = jnp.split(dense(x, layer), 2, axis=-1)
    return activation(name, gate) * up


def rope_frequencies(rope: RopeConfig, dim: int) -> Float[Array, " half"]:
    """Inverse wavelengths of the dim // 2 rotations, in float32."""
    exponent = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    base = 1.0 / (jnp.float32(rope.theta) ** exponent)
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / base
        low = rope.original_max_positions / rope.low_freq_factor
        high = rope.original_max_positions / rope.high_freq_factor
        smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        mixed = (1 - smooth) * base / rope.factor + smooth * base
        return jnp.where(wavelength > low, base / rope.factor, jnp.where(wavelength < high, base, mixed))
    if rope.kind == "yarn":

        def turns(rotations: float) -> float:
            return dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

        low, high = max(math.floor(turns(rope.beta_fast)), 0), min(math.ceil(turns(rope.beta_slow)), dim - 1)
        ramp = jnp.clip((jnp.arange(dim // 2, dtype=jnp.float32) - low) / max(high - low, 0.001), 0, 1)
        return base / rope.factor * ramp + base * (1 - ramp)
    raise ValueError(f"unknown rope kind {rope.kind!r}")


def rope_angles(rope: RopeConfig, dim: int, positions: Int[Array, "B T"]) -> tuple[Array, Array]:
    """cos and sin [B, T, dim // 2] of every rotation at every position, in float32."""
    angles = positions.astype(jnp.float32)[..., None] * rope_frequencies(rope, dim)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def split_gate(x: Float[Array, "B T O"], config: ModelConfig) -> tuple[Array, Array]:
    """Takes the gates, which stand behind each kv head's value, off a fused projection: (what `split_qkv` takes, gates)."""
    B, T, _ = x.shape
    K, D = config.num_kv_heads, config.head_dim
    G = config.num_heads // K
    x = x.reshape(B, T, K, 2 * G + 2, D)
    return x[..., : G + 2, :].reshape(B, T, -1), x[..., G + 2 :, :].reshape(B, T, -1)
