"""`DFlashConfig` → the files that SGLang, vLLM, Speculators and the authors' own code load: rules and ``config.json``."""

from __future__ import annotations

import warnings
from typing import Any

from jaxspec.conversion.drafts.dflash import Names, rules_of
from jaxspec.conversion.mapping import Rule
from jaxspec.drafters.dflash.config import DFlashConfig
from jaxspec.files.errors import ConversionError


def names_of(layout: str) -> Names:
    """Tensor names of a layout."""
    if layout == "transformers":
        return Names(fc="encoder.fc", context_norm="encoder.output_norm_enc")
    return Names()


def mask_keys(config: DFlashConfig) -> dict[str, Any]:
    """The keys that say which layers are causal; nothing where the layout's own default says it."""
    if config.causal_head:
        return {"causal_head": True}
    if all(config.causal):
        sliding = all(w is not None for w in config.layers.windows)
        return {} if sliding and config.layout != "transformers" else {"is_causal": True}
    slides = [causal for causal, w in zip(config.causal, config.layers.windows, strict=True) if w is not None]
    full = [causal for causal, w in zip(config.causal, config.layers.windows, strict=True) if w is None]
    if any(full) or len(set(slides)) > 1:
        raise ConversionError(f"no published format says which single layers are causal: {config.causal}")
    if not slides or slides[0]:
        return {}
    return {"sliding_window_non_causal": True} if config.layout == "speculators" else {"is_causal": False}


def variant_keys(config: DFlashConfig) -> dict[str, Any]:
    """Scales and heads."""
    keys: dict[str, Any] = {}
    if config.embedding_scale != 1.0:
        keys["input_embedding_scale"] = config.embedding_scale
    if config.output_multiplier != 1.0:
        keys["output_multiplier"] = config.output_multiplier
    if config.logit_softcap is not None:
        keys["final_logit_softcapping"] = config.logit_softcap
    if config.conv_kernel:
        keys |= {"conv_kernel_size": config.conv_kernel, "conv_group_size": config.conv_group}
    if config.selector_rank:
        keys |= {"selector_rank": config.selector_rank, "selector_top_k": config.selector_top_k}
    if config.layout == "deepspec" or config.markov is not None or config.confidence is not None:
        keys |= {"markov_rank": config.markov_rank, "enable_confidence_head": config.confidence is not None}
        if config.markov is not None:
            keys["markov_head_type"] = config.markov
        if config.confidence is not None:
            keys["confidence_head_with_markov"] = config.confidence == "markov"
    return keys


def target_keys(config: DFlashConfig) -> dict[str, Any]:
    """``num_target_layers``, against which SGLang checks the taps."""
    if config.num_target_layers is None:
        warnings.warn(
            "config.json will lack num_target_layers, without which SGLang refuses the draft: this draft was converted before "
            "jaxspec kept it; convert its own files again, with the target",
            stacklevel=2,
        )
        return {}
    return {"num_target_layers": config.num_target_layers}


def architecture_of(config: DFlashConfig) -> str:
    """The class that loads it."""
    if config.layout == "transformers":
        return "MuseGlimmerAssistantModel"
    if config.layout == "deepspec":
        return "Qwen3DSparkModel"
    if config.markov is not None or config.confidence is not None:
        return "DSparkDraftModel"
    return "DFlash2DraftModel" if config.conv_kernel or config.selector_rank else "DFlashDraftModel"


def export_dflash(config: DFlashConfig, shape_keys: dict[str, Any]) -> tuple[list[Rule], dict[str, Any]]:
    """Rules and ``config.json`` of a draft.

    Args:
      config: the draft.
      shape_keys: the keys that describe its layers, as `jaxspec.conversion.export.common_keys` gives them.

    Raises:
      ConversionError: masks or windows that no published format can say.
    """
    c = config.layers
    sliding = sorted({w for w in c.windows if w is not None})
    if len(sliding) > 1:
        raise ConversionError(f"sliding windows of several sizes ({sliding}) have no published format")
    kinds = ["full_attention" if w is None else "sliding_attention" for w in c.windows]
    shape = shape_keys | {
        "model_type": "qwen3",
        "attention_bias": c.qkv_bias,
        "sliding_window": sliding[0] if sliding else None,
        "use_sliding_window": bool(sliding),
        "layer_types": kinds,
        "tie_word_embeddings": False,
    }
    taps = [tap - 1 for tap in config.taps]
    own = mask_keys(config) | variant_keys(config)
    own |= {"block_size": config.block_size, "mask_token_id": config.mask_token_id}
    if config.target_hidden_size != c.hidden_size:
        own["target_hidden_size"] = config.target_hidden_size
    architecture = architecture_of(config)
    if config.anchor_predicts != ("DSpark" in architecture):
        own["sample_from_anchor"] = config.anchor_predicts
    named = {"architectures": [architecture]}
    if config.layout == "speculators":
        kind = config.algorithm.lower()
        keys = (
            named
            | own
            | {
                "transformer_layer_config": shape,
                "speculators_model_type": kind,
                "speculators_version": "0.9.0",
                "speculators_config": {
                    "algorithm": kind,
                    "default_proposal_method": "greedy",
                    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_drafts}],
                    "verifier": {"name_or_path": None, "architectures": []},
                },
                "aux_hidden_state_layer_ids": list(config.taps),
                "draft_vocab_size": config.draft_vocab_size,
                "target_hidden_size": config.target_hidden_size,
            }
        )
    elif config.layout == "zlab":
        nested = {k: v for k, v in own.items() if k not in ("block_size", "is_causal")}
        top = {k: v for k, v in own.items() if k in ("block_size", "is_causal")}
        keys = shape | named | top | target_keys(config) | {"dflash_config": nested | {"target_layer_ids": taps}}
    else:
        keys = shape | named | own | target_keys(config) | {"target_layer_ids": taps}
        if config.layout == "transformers":
            keys["model_type"] = "muse_glimmer_assistant"
    if config.layout != "speculators" and config.reduced_vocab:
        keys["draft_vocab_size"] = config.draft_vocab_size
    return rules_of(config, names_of(config.layout)), keys
