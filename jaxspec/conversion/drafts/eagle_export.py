"""`EagleConfig` → the files that SGLang, vLLM and Speculators load: rules and ``config.json``."""

from __future__ import annotations

from typing import Any

from jaxspec.conversion.drafts.eagle import Names, rules_of
from jaxspec.conversion.mapping import Rule
from jaxspec.drafters.eagle.config import EagleConfig
from jaxspec.files.errors import ConversionError


def layout_of(config: EagleConfig) -> str:
    """The layout to write: the one it came from, but Speculators' where SGLang's cannot say what the head needs."""
    copied = config.own_embedding and config.hidden_size == config.target_hidden_size
    if config.layout == "sglang" and (config.norm_before_residual or copied or 0 in config.taps):
        return "speculators"
    return config.layout


def names_of(config: EagleConfig, layout: str) -> Names:
    """Tensor names of a layout."""
    count = config.layers.num_layers
    first = "midlayer" if layout == "sglang" else "layers.0"
    layers = (first, *(f"layers.{i}" for i in range(1, count)))
    norms = tuple(f"fc_norm.{i}" for i in range(len(config.taps))) if config.fc_norm else ()
    return Names(layers, "hidden_norm" if layout == "sglang" else "input_layernorm", norms, True)


def export_eagle(config: EagleConfig, shape_keys: dict[str, Any]) -> tuple[list[Rule], dict[str, Any]]:
    """Rules and ``config.json`` of a head.

    Args:
      config: the head.
      shape_keys: the keys that describe its layers, as `jaxspec.conversion.targets.hf_export.common_keys` gives them.

    Raises:
      ConversionError: a head that was cut by a token map, which no published format has.
    """
    if not config.fused and config.own_head:
        raise ConversionError("an EAGLE-1/2 head cut by a token map has no published format: export the uncut head")
    layout, c = layout_of(config), config.layers
    keys = shape_keys | {"model_type": "qwen3" if c.qk_norm else "llama", "attention_bias": c.out_bias, "mlp_bias": c.mlp_bias}
    if any(w is not None for w in c.windows):
        sizes = {w for w in c.windows if w is not None}
        kinds = ["full_attention" if w is None else "sliding_attention" for w in c.windows]
        keys |= {"sliding_window": max(sizes), "layer_types": kinds}
    flags = {name: getattr(config, name) for name in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")}
    if layout == "eagle":
        keys |= {"architectures": ["LlamaForCausalLMEagle"], "bias": config.fc_bias, "qkv_bias": c.qkv_bias}
        if config.target_hidden_size != c.hidden_size:
            keys["target_hidden_size"] = config.target_hidden_size
    elif layout == "speculators":
        keys = {"architectures": ["Eagle3DraftModel"], "transformer_layer_config": keys, **flags}
        keys |= {
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
                "verifier": {"name_or_path": None, "architectures": []},
            },
            "eagle_aux_hidden_state_layer_ids": list(config.taps),
            "draft_vocab_size": config.draft_vocab_size,
            "embed_requires_grad": config.own_embedding,
            "target_hidden_size": config.target_hidden_size,
            "tie_word_embeddings": False,
        }
    elif layout == "deepspec":
        keys |= {
            "architectures": ["Qwen3Eagle3Model"],
            "draft_num_hidden_layers": c.num_layers,
            "target_layer_ids": [tap - 1 for tap in config.taps],
            "target_hidden_size": config.target_hidden_size,
        } | flags
    else:
        parallel = config.mask_token_id is not None
        keys |= {
            "architectures": ["PEagleDraftModel" if parallel else "LlamaForCausalLMEagle3"],
            "draft_vocab_size": config.draft_vocab_size if config.own_head else None,
            "target_hidden_size": config.target_hidden_size,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps],
                "use_aux_hidden_state": True,
            },
            "tie_word_embeddings": False,
        } | flags
        if parallel:
            keys["mask_token_id"] = config.mask_token_id
    return rules_of(config, names_of(config, layout)), keys
