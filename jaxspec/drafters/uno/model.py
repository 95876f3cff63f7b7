"""A UNO adapter's parameter tree, and a target's tree with the adapter in it for one draft pass.

Both matrices are stored per fused product of ours: ``a`` [in, n·r] side by side and ``b`` [n·r, out], whose block i fills
the columns of module i only. The zeros cost a percent of a round's bytes and save a product and a concatenation for each
module.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxspec.drafters.uno.config import PRODUCTS, UnoConfig
from jaxspec.models import decoder


def param_shapes(config: UnoConfig) -> dict:
    """The adapter's tree as shapes: ``layers/{i}/{attention|mlp}/{product}/{a|b}``."""
    layers = {}
    for i in range(config.target.num_layers):
        target, layer = decoder.layer_shapes(config.target, i), {}
        for product in PRODUCTS:
            count = len(config.changed(product))
            if count:
                block, name = product
                inputs, outputs = target[block][name]["kernel"]
                pair = {"a": (inputs, count * config.rank), "b": (count * config.rank, outputs)}
                layer.setdefault(block, {})[name] = pair
        layers[str(i)] = layer
    return {"layers": layers}


def init_params(config: UnoConfig, key: jax.Array, dtype=jnp.float32) -> dict:
    """Random matrices, both of variance 1 / fan-in, so that the adapter changes something (a fresh LoRA has b = 0)."""
    return decoder.init_tree(param_shapes(config), key, dtype)


def blocks_of_columns(config: UnoConfig, product: tuple[str, str]) -> np.ndarray | None:
    """Which block of ``b`` each column of a product may differ from zero in: indices [out], -1 for none; None for all."""
    c, changed = config.target, config.changed(product)
    if len(changed) < 2:
        return None
    if product == ("attention", "qkv"):
        heads = ["q_proj"] * (c.num_heads // c.num_kv_heads) + ["k_proj", "v_proj"]
        modules = np.repeat(heads * c.num_kv_heads, c.head_dim)
    else:
        modules = np.repeat(["gate_proj", "up_proj"], c.ffn_size)
    return np.array([changed.index(m) if m in changed else -1 for m in modules])


def adapted(
    target: dict, adapter: dict, scale: float | Array, gate: Bool[Array, "B T 1"], config: UnoConfig | None = None
) -> dict:
    """The target's tree with the adapter beside its kernels, for the rows that `gate` opens; nothing is copied or merged.

    With its `config` a kernel may leave out the zeros in ``b``.
    """
    layers = dict(target["layers"])
    for i, blocks in adapter["layers"].items():
        layer = dict(layers[i])
        for block, products in blocks.items():
            shared = {"scale": scale, "gate": gate}
            loras = {name: {**pair, **shared} for name, pair in products.items()}
            for name, lora in loras.items() if config is not None else ():
                lora["blocks"] = blocks_of_columns(config, (block, name))
            layer[block] = {**layer[block], **{name: {**layer[block][name], "lora": lora} for name, lora in loras.items()}}
        layers[i] = layer
    return {**target, "layers": layers}
