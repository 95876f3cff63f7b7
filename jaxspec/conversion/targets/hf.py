"""Tensor names of Hugging Face decoders → rules for our tree; shared with every format that stores decoder layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.conversion.mapping import COPY, TRANSPOSE, Ignored, Rule, Transform, concatenate, stack
from jaxspec.files.readers import TensorSource

ROTARY_BUFFERS = Ignored(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)", "a buffer computed from the configuration")
VISION = (
    Ignored(r"(model\.)?vision_tower\..*", "the vision tower: only the text model is converted"),
    Ignored(r"(model\.)?multi_modal_projector\..*", "the image projector: only the text model is converted"),
)


def split_heads(p: np.ndarray, config: ModelConfig) -> list[np.ndarray]:
    """Our fused projection [..., (H + 2K)·D] → q, k, v with heads in HF's order, each [..., heads·D]."""
    K, D = config.num_kv_heads, config.head_dim
    G = config.num_heads // K
    lead = p.shape[:-1]
    p = p.reshape(*lead, K, G + 2, D)
    return [p[..., :G, :].reshape(*lead, K * G * D), p[..., G, :].reshape(*lead, K * D), p[..., G + 1, :].reshape(*lead, K * D)]


def join_heads(parts: list[np.ndarray], config: ModelConfig) -> np.ndarray:
    """The inverse of `split_heads`: per kv head its G query heads, its key head, its value head."""
    K, D = config.num_kv_heads, config.head_dim
    lead = parts[0].shape[:-1]
    q, k, v = (p.reshape(*lead, K, -1, D) for p in parts)
    return np.concatenate([q, k, v], axis=-2).reshape(*lead, -1)


def fuse_qkv(config: ModelConfig) -> Transform:
    """q, k, v weights [out, in] (or biases [out]) → the fused projection laid out per kv head."""
    return Transform(
        "fuse q, k, v", lambda t: join_heads([x.T for x in t], config), lambda p: [x.T for x in split_heads(p, config)]
    )


def regroup_qkv(config: ModelConfig) -> Transform:
    """Phi-3's projection [q | k | v, in] → the fused projection laid out per kv head."""
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    cuts = (H * D, (H + K) * D)
    return Transform(
        "regroup q, k, v",
        lambda t: join_heads(np.split(t[0].T, cuts, axis=-1), config),
        lambda p: [np.concatenate(split_heads(p, config), axis=-1).T],
    )


@dataclass(frozen=True)
class Layout:
    """How a family names the parts of a layer, where it differs from Llama."""

    norms: tuple[tuple[str, str], ...] = (("input_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm"))
    qkv: str | None = None
    gate_up: str | None = None
    attention: str = "self_attn"
    mlp: str = "mlp"
    out: str = "o_proj"


LLAMA = Layout()
GEMMA = Layout(
    norms=(
        ("input_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("mlp_norm", "pre_feedforward_layernorm"),
        ("post_mlp_norm", "post_feedforward_layernorm"),
    )
)
LAYOUTS: dict[str, Layout] = {"gemma2": GEMMA, "gemma3": GEMMA, "phi3": Layout(qkv="qkv_proj", gate_up="gate_up_proj")}
"""Family → layout; families that are not listed use Llama's names."""


def attention_rules(config: ModelConfig, target: str, source: str, layout: Layout = LLAMA) -> list[Rule]:
    """Rules of one attention block: `target` is its path in our tree, `source` the prefix of its tensors."""
    rules = []
    for part, leaf, wanted in (("weight", "kernel", True), ("bias", "bias", config.qkv_bias)):
        if wanted and layout.qkv:
            rules.append(Rule(f"{target}/qkv/{leaf}", (f"{source}.{layout.qkv}.{part}",), regroup_qkv(config)))
        elif wanted:
            names = tuple(f"{source}.{x}_proj.{part}" for x in "qkv")
            rules.append(Rule(f"{target}/qkv/{leaf}", names, fuse_qkv(config)))
    rules.append(Rule(f"{target}/out/kernel", (f"{source}.{layout.out}.weight",), TRANSPOSE))
    if config.out_bias:
        rules.append(Rule(f"{target}/out/bias", (f"{source}.{layout.out}.bias",), COPY))
    if config.qk_norm:
        rules += [Rule(f"{target}/{n}/scale", (f"{source}.{n}.weight",), COPY) for n in ("q_norm", "k_norm")]
    return rules


def mlp_rules(config: ModelConfig, target: str, source: str, layout: Layout = LLAMA, ffn: int | None = None) -> list[Rule]:
    """Rules of one gated MLP; `ffn` is its width where it is not the configuration's."""
    F = config.ffn_size if ffn is None else ffn
    rules = []
    for part, leaf, wanted in (("weight", "kernel", True), ("bias", "bias", config.mlp_bias)):
        if wanted and layout.gate_up:
            rules.append(Rule(f"{target}/gate_up/{leaf}", (f"{source}.{layout.gate_up}.{part}",), TRANSPOSE))
        elif wanted:
            names = (f"{source}.gate_proj.{part}", f"{source}.up_proj.{part}")
            rules.append(Rule(f"{target}/gate_up/{leaf}", names, concatenate(F, F)))
    rules.append(Rule(f"{target}/down/kernel", (f"{source}.down_proj.weight",), TRANSPOSE))
    if config.mlp_bias:
        rules.append(Rule(f"{target}/down/bias", (f"{source}.down_proj.bias",), COPY))
    return rules


def moe_rules(config: ModelConfig, target: str, source: str) -> list[Rule]:
    """Rules of a mixture of experts whose experts are stored one by one."""
    X, F = config.moe.num_experts, config.moe.ffn_size
    gate_up = tuple(f"{source}.experts.{x}.{part}_proj.weight" for x in range(X) for part in ("gate", "up"))
    down = tuple(f"{source}.experts.{x}.down_proj.weight" for x in range(X))
    return [
        Rule(f"{target}/router/kernel", (f"{source}.gate.weight",), TRANSPOSE),
        Rule(f"{target}/experts/gate_up/kernel", gate_up, stack(concatenate(F, F), X)),
        Rule(f"{target}/experts/down/kernel", down, stack(TRANSPOSE, X)),
    ]


def layer_rules(config: ModelConfig, target: str, source: str, *, moe: bool, layout: Layout = LLAMA) -> list[Rule]:
    """Rules of one decoder layer: norms, attention, MLP or experts."""
    rules = [Rule(f"{target}/{ours}/scale", (f"{source}.{theirs}.weight",), COPY) for ours, theirs in layout.norms]
    rules += attention_rules(config, f"{target}/attention", f"{source}.{layout.attention}", layout)
    if moe:
        return rules + moe_rules(config, f"{target}/moe", f"{source}.{layout.mlp}")
    return rules + mlp_rules(config, f"{target}/mlp", f"{source}.{layout.mlp}", layout)


def model_rules(config: ModelConfig, prefix: str = "model.", head: str = "lm_head.weight") -> list[Rule]:
    """Rules of a whole decoder whose tensors are called ``{prefix}embed_tokens.weight`` and so on."""
    layout = LAYOUTS.get(config.family, LLAMA)
    rules = [Rule("embedder/embedding", (f"{prefix}embed_tokens.weight",), COPY)]
    for i in range(config.num_layers):
        rules += layer_rules(config, f"layers/{i}", f"{prefix}layers.{i}", moe=config.is_moe_layer(i), layout=layout)
    rules.append(Rule("final_norm/scale", (f"{prefix}norm.weight",), COPY))
    if not config.tie_embeddings:
        rules.append(Rule("head/kernel", (head,), TRANSPOSE))
    return rules


RulesOf = Callable[[ModelConfig, str, str], list[Rule]]
FAMILY_RULES: dict[str, RulesOf] = {}
"""Families whose layers are not made of `layer_rules` bring a function (config, prefix, head) → rules."""


def rules_for(config: ModelConfig, prefix: str = "model.", head: str = "lm_head.weight") -> list[Rule]:
    """The table of a family."""
    return FAMILY_RULES.get(config.family, model_rules)(config, prefix, head)


def find_prefix(tensors: TensorSource) -> tuple[str, str]:
    """The prefix of the text model's tensors and the name of its head: multimodal and bare models wrap them differently."""
    prefixes = [n[: -len("embed_tokens.weight")] for n in tensors.info if n.endswith("embed_tokens.weight")]
    for known, head in (
        ("model.", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("", "lm_head.weight"),
    ):
        if known in prefixes:
            return known, head
    return "model.", "lm_head.weight"


def ignored_for(config: ModelConfig, prefix: str, head: str) -> list[Ignored]:
    """Tensors that the published files of a family hold beside the parameters."""
    ignored = [ROTARY_BUFFERS]
    if config.family == "gemma3":
        ignored += VISION
    if config.tie_embeddings:
        why = "tie_word_embeddings says that the head is the embedding"
        ignored.append(Ignored(head.replace(".", r"\."), why, same_as=f"{prefix}embed_tokens.weight"))
    return ignored
