"""`ModelConfig` → ``config.json`` of Hugging Face folders: one function per family, the inverse of `.hf_config.FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxspec.config import ModelConfig, RopeConfig
from jaxspec.conversion.targets import deepseek
from jaxspec.files.errors import ConversionError


def rope_keys(rope: RopeConfig) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` in transformers 4's spelling, which 5 reads as well."""
    keys: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.kind == "default":
        return keys
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "attention_factor": rope.attention_factor}
    return keys | {"rope_scaling": scaling}


def common_keys(config: ModelConfig) -> dict[str, Any]:
    """Keys that all families share."""
    stops = list(config.stop_token_ids)
    keys = {
        **({"architectures": [config.architecture]} if config.architecture else {}),
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": config.activation,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
        "pad_token_id": None,
    }
    keys |= rope_keys(config.rope)
    if config.rope.kind == "linear" and config.rope_local is None:  # whose context would be taken for the one before scaling
        keys["rope_scaling"]["original_max_position_embeddings"] = int(config.max_positions / config.rope.factor)
    return keys


def layer_types(config: ModelConfig) -> dict[str, Any]:
    """``sliding_window`` and ``layer_types``, the general way to say which layers slide."""
    sliding = sorted({w for w in config.windows if w is not None})
    if len(sliding) > 1:
        raise ConversionError(f"sliding windows of several sizes ({sliding}) have no Hugging Face configuration")
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    return {"sliding_window": sliding[0] if sliding else None, "layer_types": kinds}


def one_window(config: ModelConfig) -> dict[str, Any]:
    """``sliding_window`` of families in which all layers slide or none."""
    if len(set(config.windows)) > 1:
        raise ConversionError(f"layers of a {config.family} model all slide or none does; here they differ")
    return {"sliding_window": config.windows[0]}


def llama(config: ModelConfig) -> dict[str, Any]:
    """Llama: one switch for the biases of q, k, v and the output, unlike Qwen2 files."""
    if any(w is not None for w in config.windows) or config.qkv_bias != config.out_bias:
        raise ConversionError("a llama model has no sliding window, and biases on all four projections or on none")
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def mistral(config: ModelConfig) -> dict[str, Any]:
    """Mistral."""
    return one_window(config)


def qwen2(config: ModelConfig) -> dict[str, Any]:
    """Qwen2."""
    keys = layer_types(config)
    return keys | {"use_sliding_window": keys["sliding_window"] is not None, "max_window_layers": config.num_layers}


def qwen3(config: ModelConfig) -> dict[str, Any]:
    """Qwen3."""
    return qwen2(config) | {"attention_bias": config.qkv_bias}


def qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    """Qwen3-MoE."""
    window = one_window(config)
    return window | {
        "use_sliding_window": window["sliding_window"] is not None,
        "attention_bias": config.qkv_bias,
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.num_experts_per_token,
        "moe_intermediate_size": config.moe.ffn_size,
        "mlp_only_layers": list(config.moe.dense_layers),
        "decoder_sparse_step": 1,
        "norm_topk_prob": config.moe.normalize_weights,
    }


def phi3(config: ModelConfig) -> dict[str, Any]:
    """Phi-3; its class wants the padding id inside the vocabulary."""
    return one_window(config) | {"pad_token_id": 0, "original_max_position_embeddings": config.max_positions}


def gemma(config: ModelConfig) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    return layer_types(config) | {
        "hidden_activation": config.activation,
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "attention_bias": config.qkv_bias,
        "pad_token_id": 0,
    }


def gemma3(config: ModelConfig) -> dict[str, Any]:
    """Gemma 3, text model."""
    return gemma(config) | {"model_type": "gemma3_text", "rope_local_base_freq": config.rope_local.theta}


CONFIGS: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "phi3": phi3,
    "mimo": qwen2,
    "deepseek_v2": deepseek.config_keys,
    "deepseek_v3": deepseek.config_keys,
    "gemma2": gemma,
    "gemma3": gemma3,
}
"""Family → the keys that `common_keys` does not have."""


def model_keys(config: ModelConfig) -> dict[str, Any]:
    """``config.json`` of a model. Raises ConversionError for a family that has none here."""
    if config.family not in CONFIGS:
        raise ConversionError(f"models of the family {config.family!r} cannot be exported; can: {', '.join(CONFIGS)}")
    return common_keys(config) | CONFIGS[config.family](config)
