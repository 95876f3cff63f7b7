"""The pieces of a decoder layer as pure functions over nested-dict parameter trees (axis letters: `jaxspec.__init__`)."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import ModelConfig, RopeConfig
from pallas_kernels import device
from pallas_kernels.layer import add_norm
from pallas_kernels.lora import gated as kernels
from pallas_kernels.lora import shrink as lora_shrink
from pallas_kernels.product.api import gated_product, product, product_in_parts
from pallas_kernels.tilings import product_parts


def dense(x: Float[Array, "*R I"], layer: dict, dtype=None) -> Float[Array, "*R O"]:
    """x @ kernel + bias: the one place through which every product with a weight goes.

    ``kernel`` is an array [in, out] or a pair {"q": int8 [in, out], "scale": [out]}. ``lora`` holds the arguments of
    `gated_lora`; only a draft pass puts it there (`jaxspec.drafters.uno.model.adapted`). The result is of `dtype`,
    None for the type of x.
    """
    if "lora" in layer:
        return dense_with_lora(x, layer)
    kernel, dtype = layer["kernel"], x.dtype if dtype is None else dtype
    if isinstance(kernel, dict):
        y = jnp.matmul(x, kernel["q"].astype(x.dtype), preferred_element_type=dtype) * kernel["scale"].astype(dtype)
    else:
        y = product(x, kernel.astype(x.dtype), dtype)
    return y + layer["bias"].astype(dtype) if "bias" in layer else y


def dense_in_parts(x: Float[Array, "B T I"], layer: dict) -> Float[Array, "parts B T O"]:
    """`dense` as partial sums in float32 where a GPU had better cut the product along its inputs, else in one part."""
    kernel = layer["kernel"]
    if layer.keys() != {"kernel"} or isinstance(kernel, dict) or device.capability() is None:
        return dense(x, layer)[None]
    by_kernel = product_in_parts(x, kernel.astype(x.dtype))
    if by_kernel is not None:
        return by_kernel
    inputs, outputs = kernel.shape
    parts = product_parts(x.shape[0] * x.shape[1], inputs, outputs)
    if parts == 1:
        return dense(x, layer)[None]
    x = x.reshape(*x.shape[:2], parts, inputs // parts)
    kernel = kernel.reshape(parts, inputs // parts, outputs).astype(x.dtype)
    return jnp.einsum("BTSI,SIO->SBTO", x, kernel, preferred_element_type=jnp.float32)


def dense_for_norm(x: Float[Array, "B T I"], layer: dict) -> Float[Array, "parts B T O"]:
    """`dense` for `add_and_norm`: in parts only where that is a kernel; elsewhere XLA adds its own parts up best."""
    few = x.shape[0] * x.shape[1] < add_norm.LEAST_ROWS
    return dense(x, layer)[None] if few else dense_in_parts(x, layer)


def dense_with_lora(x: Float[Array, "B T I"], layer: dict, silu: bool = False) -> Float[Array, "B T O"]:
    """`gated_lora` on `dense`, on a GPU with the adapter's products as kernels; the last adds up the parts of all others.

    ``lora`` holds the arguments of `gated_lora`; its `blocks` names the block of rows of ``b`` that may differ from zero in
    each column, -1 for none. With `silu` the columns are gates and as many values: silu(gate) · value, [B, T, O / 2]. The
    kernels have no derivative; where one is wanted the scale is an array.
    """
    lora, layer = layer["lora"], {name: leaf for name, leaf in layer.items() if name != "lora"}
    a, b, scale, gate, blocks = *(lora[name] for name in ("a", "b", "scale", "gate")), lora.get("blocks")
    if not (isinstance(scale, float) and kernels.available() and kernels.serves(x, b, silu)):
        y = gated_lora(x, dense(x, layer), a, b, scale, gate)
        return gate_values(y, "silu") if silu else y
    both = product_and_hidden(x, layer, lora)
    if both is not None:
        return kernels.gated_lora(both[None], None, b, gate, scale=scale, blocks=blocks, silu=silu)
    hidden = lora_shrink.lora_shrink(x, a) if lora_shrink.serves(x, a) else dense_in_parts(x, {"kernel": a})
    return kernels.gated_lora(dense_in_parts(x, layer), hidden, b, gate, scale=scale, blocks=blocks, silu=silu)


def product_and_hidden(x: Float[Array, "B T I"], layer: dict, lora: dict) -> Float[Array, "B T O_plus_rank"] | None:
    """x @ kernel and, behind it, x @ a as one product; None where two are better.

    x @ a alone would be a kernel of 3 to 4 us for 1 us of bytes. XLA's products on a GPU read tiles of either matrix, so that
    nothing is copied, if both widths are multiples of 64 (otherwise it writes both out as one first).
    """
    kernel, a = layer["kernel"], lora["a"]
    if not {"kernel"} <= layer.keys() <= {"kernel", "lora"} or isinstance(kernel, dict):
        return None
    few = 1 < x.shape[0] * x.shape[1] <= kernels.MOST_ROWS and x.dtype == kernel.dtype == a.dtype and x.dtype.itemsize == 2
    if not few or device.capability() is None or kernel.shape[1] % 64 or a.shape[1] % 64:
        return None
    return x @ jnp.concatenate([kernel, a], 1)


def gated_lora(
    x: Float[Array, "*R I"], y: Float[Array, "*R O"], a: Array, b: Array, scale: float | Array, gate: Bool[Array, "*R 1"]
) -> Float[Array, "*R O"]:
    """y + scale · (x @ a) @ b (Hu et al. 2021, section 4.1) in the rows that `gate` opens; others keep y bit for bit.

    Whatever is not finite becomes 0: the keys and values of these rows stand in the same pages as those of other rows,
    where a masked NaN would still be a NaN after a product with 0.
    """
    changed = y + scale * ((x @ a.astype(x.dtype)) @ b.astype(x.dtype))
    return jnp.where(gate, jnp.where(jnp.isfinite(changed), changed, 0), y)


def rms_norm(x: Float[Array, "*R E"], layer: dict, eps: float, plus_one: bool = False) -> Float[Array, "*R E"]:
    """Root-mean-square norm (Zhang & Sennrich 2019) in float32; with `plus_one` the stored scale is w - 1 (Gemma)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    scale = layer["scale"].astype(jnp.float32)
    return (y * (1 + scale if plus_one else scale)).astype(x.dtype)


def add_up(parts: Float[Array, "parts *R O"], dtype) -> Float[Array, "*R O"]:
    """A product from its parts (`dense_in_parts`), rounded once."""
    return parts[0] if parts.shape[0] == 1 else parts.sum(0).astype(dtype)


def add_and_norm(
    x: Float[Array, "*R E"], parts: Float[Array, "parts *R E"], layer: dict, eps: float, plus_one: bool = False,
    adapted: bool = False,
) -> tuple[Float[Array, "*R E"], Float[Array, "*R E"]]:  # fmt: skip
    """The residual stream with a sublayer's output added, which comes in parts, and its `rms_norm`.

    `adapted` says that the sublayer ends in an adapter, thus in a kernel of ours: XLA cannot make the sum part of that.
    """
    if add_norm.available() and add_norm.serves(x, parts, 1 if adapted else add_norm.LEAST_ROWS):
        return _add_norm(x, parts, layer["scale"], eps, plus_one)
    x = x + add_up(parts, x.dtype)
    return x, rms_norm(x, layer, eps, plus_one)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _add_norm(x, parts, scale, eps, plus_one):
    return add_norm.add_norm(x, parts, scale, eps=eps, plus_one=plus_one)


@_add_norm.defjvp
def _add_norm_differentiated(eps, plus_one, primals, tangents):
    def plain(x, parts, scale):
        x = x + add_up(parts, x.dtype)
        return x, rms_norm(x, {"scale": scale}, eps, plus_one)

    return jax.jvp(plain, primals, tangents)


def activation(name: str, x: Array) -> Array:
    """A gate's non-linearity under its Hugging Face name."""
    if name == "silu":
        return jax.nn.silu(x)
    if name in ("gelu_pytorch_tanh", "gelu_new"):
        return jax.nn.gelu(x, approximate=True)
    if name == "gelu":
        return jax.nn.gelu(x, approximate=False)
    raise ValueError(f"unknown activation {name!r}; known: silu, gelu, gelu_pytorch_tanh, gelu_new")


def gated_mlp(x: Float[Array, "*R E"], mlp: dict, name: str) -> Float[Array, "*R E"]:
    """down(act(gate(x)) * up(x)); gate and up are one product whose output holds gate, then up."""
    return dense(gated(x, mlp, name), mlp["down"])


def gated_mlp_in_parts(x: Float[Array, "B T E"], mlp: dict, name: str) -> Float[Array, "parts B T E"]:
    """`gated_mlp` in parts, as `dense_for_norm`."""
    return dense_for_norm(gated(x, mlp, name), mlp["down"])


def gated(x: Float[Array, "*R E"], mlp: dict, name: str) -> Float[Array, "*R F"]:
    """act(gate(x)) * up(x)."""
    if name == "silu" and "lora" in mlp["gate_up"]:
        return dense_with_lora(x, mlp["gate_up"], silu=True)
    layer = mlp["gate_up"]
    if name == "silu" and layer.keys() == {"kernel"} and not isinstance(layer["kernel"], dict):
        done = gated_product(x, layer["kernel"].astype(x.dtype))
        if done is not None:
            return done
    return gate_values(dense(x, layer), name)


def gate_values(y: Float[Array, "*R twice_F"], name: str) -> Float[Array, "*R F"]:
    """act(gate) * up of a product that holds gate, then up."""
    gate, up = jnp.split(y, 2, axis=-1)
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


def apply_rope(x: Float[Array, "B T H D"], angles: tuple[Array, Array], interleaved: bool = False) -> Float[Array, "B T H D"]:
    """Rotates the channel pairs (i, i + D/2), or (2i, 2i + 1) when `interleaved`.

    When the angles cover fewer channels than a head has, the remaining ones pass unchanged (partial rotation).
    Interleaved input comes out in half-split order, as DeepSeek's reference does: queries and keys agree, so scores do.
    """
    cos, sin = (a[:, :, None] for a in angles)
    width = 2 * cos.shape[-1]
    y = x[..., :width].astype(jnp.float32)
    first, second = (y[..., 0::2], y[..., 1::2]) if interleaved else jnp.split(y, 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
    return rotated if width == x.shape[-1] else jnp.concatenate([rotated, x[..., width:]], -1)


def split_gate(x: Float[Array, "B T O"], config: ModelConfig) -> tuple[Array, Array]:
    """Takes the gates, which stand behind each kv head's value, off a fused projection: (what `split_qkv` takes, gates)."""
    B, T, _ = x.shape
    K, D = config.num_kv_heads, config.head_dim
    G = config.num_heads // K
    x = x.reshape(B, T, K, 2 * G + 2, D)
    return x[..., : G + 2, :].reshape(B, T, -1), x[..., G + 2 :, :].reshape(B, T, -1)


def split_heads(x: Float[Array, "*R O"], config: ModelConfig) -> Float[Array, "*R K G_plus_2 D"]:
    """A fused projection by kv head: [its G query heads, key, value], laid out so that it shards over kv heads."""
    K = config.num_kv_heads
    return x.reshape(*x.shape[:-1], K, config.num_heads // K + 2, config.head_dim)


def split_qkv(x: Float[Array, "B T O"], config: ModelConfig) -> tuple[Array, Array, Array]:
    """Queries [B,T,H,D], keys and values [B,T,K,D] of a fused projection."""
    heads = split_heads(x, config)
    G = heads.shape[3] - 2
    return heads[..., :G, :].reshape(*x.shape[:2], -1, config.head_dim), heads[..., G, :], heads[..., G + 1, :]
