"""MTP layers in a folder of their own, without their target: reading and writing.

The names are those of the layers inside a target's files, and ``config.json`` is such a target's with as many layers as there
are MTP layers. That is what SGLang reads as a draft model for MiMo and Qwen3-Next, and how one-layer folders for DeepSeek
(``DeepseekV3ForCausalLMNextN``, where the layer is number 0) are published.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from jaxspec.config import ModelConfig
from jaxspec.conversion.drafts.mtp import MTP_FAMILY, NAMES, check_sizes, find_mtp, mtp_rules, qwen3_next
from jaxspec.conversion.mapping import Ignored, Rule
from jaxspec.conversion.targets import deepseek, hf_config
from jaxspec.drafters.mtp.config import MtpConfig
from jaxspec.files.errors import ConversionError
from jaxspec.files.folders import open_tensors
from jaxspec.files.readers import TensorSource


def is_alone(folder: Path) -> bool:
    """Whether a folder holds MTP layers and nothing else."""
    file = folder / "config.json"
    if not file.exists():
        return False
    names = NAMES.get(MTP_FAMILY.get(hf_config.read_json(file).get("model_type"), ""))
    if names is None:
        return False
    try:
        found = open_tensors(folder).info
    except ConversionError:  # whoever opens it says what is wrong
        return False
    own = names.own("model.", 0, 0)
    lead = re.sub(r"\d+$", "", own)
    return f"{own}.{names.parts['proj']}.weight" in found and all(name.startswith(lead) for name in found)


def open_alone(folder: Path, target: ModelConfig | None = None) -> tuple[MtpConfig, TensorSource, list[Rule], list[Ignored]]:
    """The MTP layers of a folder that `is_alone`.

    Raises:
      ConversionError: they do not fit `target`, or their configuration.
    """
    raw = hf_config.read_json(folder / "config.json")
    layers = qwen3_next(raw) if raw.get("model_type") == "qwen3_next" else hf_config.read_config(folder)
    if target is not None:
        check_sizes(folder, layers, target)
    tensors = deepseek.dequantized(open_tensors(folder), raw)
    config = find_mtp(dataclasses.replace(layers, num_layers=0, windows=()), tensors)
    if config is None:
        raise ConversionError(f"{folder}: its MTP layers lack their decoder layers' norms")
    why = "an MTP layer uses the target's embedding and head"
    copies = [Ignored(r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight", why)]
    return config, tensors, mtp_rules(config, 0), copies if config.family == "deepseek" else []


def export_alone(config: MtpConfig, shape_keys: dict[str, Any]) -> tuple[list[Rule], dict[str, Any]]:
    """Rules and ``config.json`` of MTP layers in a folder of their own.

    Files do not say which state the layers read (`MtpConfig.feature_tap`, `recycle_normed`, `chain_states`): loaders decide.

    Args:
      config: the layers.
      shape_keys: the keys that describe them, as `jaxspec.conversion.targets.hf_export.common_keys` gives them.

    Raises:
      ConversionError: layers that their family's format cannot hold.
    """
    keys = shape_keys | KEYS[config.family](config.layers) | {"num_nextn_predict_layers": config.num_layers}
    return mtp_rules(config, 0), keys


def _mimo(c: ModelConfig) -> dict[str, Any]:
    if not c.qkv_bias or c.out_bias or c.mlp_bias or c.qk_norm:
        raise ConversionError("MiMo's MTP layers have biases on q, k and v only and no q/k norms; these differ")
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": c.num_layers,
    }


def _deepseek(c: ModelConfig) -> dict[str, Any]:
    if c.num_layers > 1:
        raise ConversionError(f"a folder of DeepSeek's MTP layers holds one of them, here are {c.num_layers}")
    version = "V3" if c.moe is not None and c.moe.scoring == "sigmoid" else "V2"
    names = {"architectures": [f"Deepseek{version}ForCausalLMNextN"], "model_type": f"deepseek_{version.lower()}"}
    return deepseek.config_keys(c) | names


def _qwen3_next(c: ModelConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "partial_rotary_factor": c.rope.fraction,
        "full_attention_interval": 1,
        "layer_types": ["full_attention"] * c.num_layers,
        "attention_bias": False,
        "num_experts": 0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if c.moe is not None:
        keys |= {
            "num_experts": c.moe.num_experts,
            "num_experts_per_tok": c.moe.num_experts_per_token,
            "moe_intermediate_size": c.moe.ffn_size,
            "shared_expert_intermediate_size": c.moe.shared_ffn_size,
            "norm_topk_prob": c.moe.normalize_weights,
        }
    return keys


KEYS = {"mimo": _mimo, "deepseek": _deepseek, "qwen3_next": _qwen3_next}
"""MTP family → the keys of ``config.json`` beside those that all families share."""
