"""DeepSeek-V2 and V3: configuration, tensor names, and the float8 blocks that V3 is published in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np

from jaxspec.config import MLAConfig, ModelConfig, MoEConfig
from jaxspec.conversion.mapping import COPY, TRANSPOSE, Rule
from jaxspec.conversion.targets import hf, hf_config
from jaxspec.conversion.targets.hf_config import base, get, main_rope, need, yarn_mscale
from jaxspec.files.errors import ConversionError
from jaxspec.files.readers import TensorInfo, TensorSource


def deepseek_v2(raw: dict) -> ModelConfig:
    """DeepSeek-V2 and V2-Lite: softmax routing, a group counts as its best expert."""
    methods = {"greedy": 1, "group_limited_greedy": int(get(raw, "n_group", 1))}
    method = get(raw, "topk_method", "greedy")
    if method not in methods:
        raise ConversionError(f"topk_method={method!r} is not supported for deepseek_v2; supported: {', '.join(methods)}")
    groups = methods[method]
    return _deepseek(raw, "deepseek_v2", "DeepseekV2ForCausalLM", scoring="softmax", num_groups=groups, group_score="max")


def deepseek_v3(raw: dict) -> ModelConfig:
    """DeepSeek-V3 and R1: sigmoid routing with a correction bias, a group counts as its two best experts."""
    method, scoring = get(raw, "topk_method", "noaux_tc"), get(raw, "scoring_func", "sigmoid")
    if (method, scoring) != ("noaux_tc", "sigmoid"):
        raise ConversionError(
            f"topk_method={method!r} with scoring_func={scoring!r} is not supported for model_type deepseek_v3; supported: "
            "'noaux_tc' with 'sigmoid'"
        )
    groups = int(get(raw, "n_group", 8))
    return _deepseek(raw, "deepseek_v3", "DeepseekV3ForCausalLM", scoring="sigmoid", num_groups=groups, group_score="top2")


def _deepseek(raw: dict, family: str, architecture: str, *, scoring: str, num_groups: int, group_score: str) -> ModelConfig:
    if get(raw, "attention_bias", False):
        raise ConversionError(f"attention_bias=true is not supported for model_type {family}")
    if int(get(raw, "moe_layer_freq", 1)) != 1:
        raise ConversionError(f"moe_layer_freq={raw['moe_layer_freq']} is not supported; supported: 1")
    mla = MLAConfig(
        kv_rank=int(need(raw, "kv_lora_rank")),
        nope_head_dim=int(need(raw, "qk_nope_head_dim")),
        rope_head_dim=int(need(raw, "qk_rope_head_dim")),
        value_head_dim=int(need(raw, "v_head_dim")),
        query_rank=None if raw.get("q_lora_rank") is None else int(raw["q_lora_rank"]),
    )
    expert_size, layers = int(need(raw, "moe_intermediate_size")), int(need(raw, "num_hidden_layers"))
    moe = MoEConfig(
        num_experts=int(need(raw, "n_routed_experts")),
        num_experts_per_token=int(need(raw, "num_experts_per_tok")),
        ffn_size=expert_size,
        dense_layers=tuple(range(min(layers, int(get(raw, "first_k_dense_replace", 0))))),
        normalize_weights=bool(get(raw, "norm_topk_prob", scoring == "sigmoid")),
        scoring=scoring,
        num_groups=num_groups,
        num_groups_per_token=int(get(raw, "topk_group", 1)) if num_groups > 1 else 1,
        shared_ffn_size=expert_size * int(get(raw, "n_shared_experts", 0)),
        routed_scale=float(get(raw, "routed_scaling_factor", 1.0)),
        group_score=group_score,
    )
    rope = dataclasses.replace(main_rope(raw, 10000.0), interleaved=bool(get(raw, "rope_interleave", True)))
    width = mla.nope_head_dim + mla.rope_head_dim
    return base(
        raw | {"num_key_value_heads": need(raw, "num_attention_heads")},
        family,
        architecture,
        rope=rope,
        head_dim=width,
        attention_scale=width**-0.5 * _softmax_mscale(raw) ** 2,
        mla=mla,
        moe=moe,
    )


def _softmax_mscale(raw: dict) -> float:
    """YaRN's temperature on the scores themselves, which DeepSeek applies beside the one on cos and sin."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    all_dim = rope.get("mscale_all_dim") or 0
    return yarn_mscale(float(need(rope, "factor")), float(all_dim)) if all_dim else 1.0


def config_keys(config: ModelConfig) -> dict:
    """The way back: keys of ``config.json`` beside those that all families share."""
    mla, moe, dense = config.mla, config.moe, len(config.moe.dense_layers)
    if moe.dense_layers != tuple(range(dense)):
        raise ConversionError(f"dense layers {moe.dense_layers}: DeepSeek's format has the first ones only")
    sigmoid = moe.scoring == "sigmoid"
    keys = {
        "head_dim": mla.rope_head_dim,  # what transformers 5 means by it for this family
        "attention_bias": False,
        "q_lora_rank": mla.query_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_head_dim,
        "qk_rope_head_dim": mla.rope_head_dim,
        "v_head_dim": mla.value_head_dim,
        "rope_interleave": config.rope.interleaved,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_ffn_size // moe.ffn_size,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.ffn_size,
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1,
        "n_group": moe.num_groups,
        "topk_group": moe.num_groups_per_token,
        "norm_topk_prob": moe.normalize_weights,
        "routed_scaling_factor": moe.routed_scale,
        "scoring_func": moe.scoring,
        "topk_method": "noaux_tc" if sigmoid else "group_limited_greedy" if moe.num_groups > 1 else "greedy",
    }
    if config.rope.kind != "yarn":
        return keys
    rope, softmax = config.rope, (config.attention_scale * config.key_head_dim**0.5) ** 0.5
    scaling = {
        "type": "yarn",
        "factor": rope.factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "original_max_position_embeddings": rope.original_max_positions,
    }
    if math.isclose(softmax, 1):
        scaling["attention_factor"] = rope.attention_factor
    else:
        unit = 0.1 * math.log(rope.factor)
        scaling["mscale"] = round((rope.attention_factor * softmax - 1) / unit, 6)
        scaling["mscale_all_dim"] = round((softmax - 1) / unit, 6)
    return keys | {"rope_scaling": scaling}


def latent_attention_rules(config: ModelConfig, target: str, source: str) -> list[Rule]:
    """Rules of one multi-head latent attention."""
    names = {"kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj", "out": "o_proj"}
    if config.mla.query_rank is None:
        names["q"] = "q_proj"
    else:
        names |= {"q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj"}
    return [
        Rule(f"{target}/{ours}/scale", (f"{source}.{theirs}.weight",), COPY)
        if ours.endswith("norm")
        else Rule(f"{target}/{ours}/kernel", (f"{source}.{theirs}.weight",), TRANSPOSE)
        for ours, theirs in names.items()
    ]


def expert_rules(config: ModelConfig, target: str, source: str, shared: str = "shared_experts") -> list[Rule]:
    """Rules of routed and shared experts."""
    rules = hf.moe_rules(config, target, source)
    if config.moe.scoring == "sigmoid":
        rules.append(Rule(f"{target}/router/correction_bias", (f"{source}.gate.e_score_correction_bias",), COPY))
    if config.moe.shared_ffn_size:
        rules += hf.mlp_rules(config, f"{target}/shared", f"{source}.{shared}", ffn=config.moe.shared_ffn_size)
    if config.moe.shared_gate:
        rules.append(Rule(f"{target}/shared_gate/kernel", (f"{source}.{shared}_gate.weight",), TRANSPOSE))
    return rules


def layer_rules(config: ModelConfig, target: str, source: str, *, moe: bool) -> list[Rule]:
    """Rules of one decoder layer."""
    rules = [Rule(f"{target}/{ours}/scale", (f"{source}.{theirs}.weight",), COPY) for ours, theirs in hf.LLAMA.norms]
    rules += latent_attention_rules(config, f"{target}/attention", f"{source}.self_attn")
    if moe:
        return rules + expert_rules(config, f"{target}/moe", f"{source}.mlp")
    return rules + hf.mlp_rules(config, f"{target}/mlp", f"{source}.mlp")


def model_rules(config: ModelConfig, prefix: str = "model.", head: str = "lm_head.weight") -> list[Rule]:
    """Rules of a whole decoder, its MTP layers excepted (`jaxspec.conversion.drafts.mtp`)."""
    rules = [Rule("embedder/embedding", (f"{prefix}embed_tokens.weight",), COPY)]
    for i in range(config.num_layers):
        rules += layer_rules(config, f"layers/{i}", f"{prefix}layers.{i}", moe=config.is_moe_layer(i))
    rules.append(Rule("final_norm/scale", (f"{prefix}norm.weight",), COPY))
    if not config.tie_embeddings:
        rules.append(Rule("head/kernel", (head,), TRANSPOSE))
    return rules


SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class DequantizedTensors:
    """A source whose float8 weights come out as bfloat16: each block of a weight times its entry of ``weight_scale_inv``."""

    stored: TensorSource
    block: tuple[int, int]

    @cached_property
    def info(self) -> Mapping[str, TensorInfo]:
        """The weights without their scales."""
        found = {}
        for name, info in self.stored.info.items():
            if name.endswith(SCALE_SUFFIX) and name[: -len(SCALE_SUFFIX)] in self.stored.info:
                continue
            quantised = f"{name}{SCALE_SUFFIX}" in self.stored.info
            found[name] = info._replace(dtype=np.dtype(ml_dtypes.bfloat16)) if quantised else info
        return found

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised where it has scales.

        Raises ConversionError when weight and scales do not fit together.
        """
        weight, scale_name = self.stored.read(name), f"{name}{SCALE_SUFFIX}"
        if scale_name not in self.stored.info:
            return weight
        scale = self.stored.read(scale_name).astype(np.float32)
        wanted = tuple(-(-n // b) for n, b in zip(weight.shape, self.block, strict=True))
        if scale.shape != wanted:
            raise ConversionError(
                f"tensor {scale_name} has shape {scale.shape}, expected {wanted}: one scale for each block of "
                f"{self.block} of {name} {weight.shape}"
            )
        for axis, size in enumerate(self.block):
            scale = np.repeat(scale, size, axis=axis)
        scale = scale[: weight.shape[0], : weight.shape[1]]
        return (weight.astype(np.float32) * scale).astype(ml_dtypes.bfloat16)


def dequantized(tensors: TensorSource, raw: dict) -> TensorSource:
    """`tensors` as they are, or dequantised when ``config.json`` names DeepSeek's float8 blocks."""
    quantization = raw.get("quantization_config") or {}
    if quantization.get("quant_method") != "fp8" or not quantization.get("weight_block_size"):
        return tensors
    rows, columns = quantization["weight_block_size"]
    return DequantizedTensors(tensors, (int(rows), int(columns)))


hf_config.FAMILIES |= {"deepseek_v2": deepseek_v2, "deepseek_v3": deepseek_v3}
hf.FAMILY_RULES |= {"deepseek_v2": model_rules, "deepseek_v3": model_rules}
