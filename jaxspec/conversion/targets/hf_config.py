"""``config.json`` of Hugging Face folders → `ModelConfig`: one small function per family, listed in `FAMILIES`.

Both spellings are read: ``rope_theta`` / ``rope_scaling`` of transformers 4 and ``rope_parameters`` of transformers 5.
A value that a file leaves out has the default of the family's configuration class in transformers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxspec.config import ConfigError, ModelConfig, MoEConfig, RopeConfig
from jaxspec.files.errors import ConversionError, MissingFileError, shown
from jaxspec.files.values import check_config, checked, parse_json
from jaxspec.tokenizer.tokenizer import TokenizerFiles


def read_json(file: Path) -> dict:
    """A JSON object whose known keys have values that they can have (`jaxspec.files.values`); errors name the file."""
    if not file.exists():
        raise MissingFileError(f"{file} does not exist")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConversionError(f"{file} cannot be read ({shown(error)})") from None
    return checked(parse_json(data, file), file)


def published(folder: Path) -> dict | None:
    """``config.json`` of a folder in a published format; None where there is none, and for a folder that jaxspec converted."""
    try:
        raw = read_json(folder / "config.json")
    except (ConversionError, MissingFileError):
        return None
    return None if "jaxspec_format" in raw else raw


def is_named(raw: dict, parts: Sequence[str]) -> bool:
    """Whether one of the class names in ``architectures`` has one of these parts."""
    return any(part in str(name) for name in raw.get("architectures") or () for part in parts)


def need(raw: dict, key: str) -> Any:
    """A key that has no default."""
    if raw.get(key) is None:
        raise ConversionError(f"config.json lacks {key!r} (model_type {raw.get('model_type')!r})")
    return raw[key]


def get(raw: dict, key: str, default: Any) -> Any:
    """A key that may be absent or null."""
    value = raw.get(key)
    return default if value is None else value


def rope_config(parameters: dict, theta: float, max_positions: int) -> RopeConfig:
    """One rope description under either spelling (``type`` or ``rope_type``).

    Raises ConversionError for kinds whose angles depend on the length of the text (dynamic, longrope).
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if get(parameters, "partial_rotary_factor", 1.0) != 1.0:
        raise ConversionError(f"rope with partial_rotary_factor={parameters['partial_rotary_factor']} is not supported")
    rope = RopeConfig(theta=float(get(parameters, "rope_theta", theta)))
    if kind == "default":
        return rope
    if kind not in ("linear", "llama3", "yarn"):
        raise ConversionError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn")
    factor = float(need(parameters, "factor"))
    rope = dataclasses.replace(rope, kind=kind, factor=factor)
    if kind == "linear":
        return rope
    rope = dataclasses.replace(
        rope, original_max_positions=int(get(parameters, "original_max_position_embeddings", max_positions))
    )
    if kind == "llama3":
        low, high = float(need(parameters, "low_freq_factor")), float(need(parameters, "high_freq_factor"))
        return dataclasses.replace(rope, low_freq_factor=low, high_freq_factor=high)
    if not get(parameters, "truncate", True):
        raise ConversionError("yarn rope with truncate=false is not supported")
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
        else:
            attention_factor = yarn_mscale(factor, 1.0)
    return dataclasses.replace(
        rope,
        beta_fast=float(get(parameters, "beta_fast", 32.0)),
        beta_slow=float(get(parameters, "beta_slow", 1.0)),
        attention_factor=float(attention_factor),
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature (Peng et al. 2023, section 3.4), as DeepSeek parametrises it."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def scaled_context(rope: RopeConfig, positions: int, original: int | None) -> int:
    """Positions that a model with a rescaled rope is made for.

    Linear and YaRN scaling stretch what the model was first trained on by their factor. Files name either length as that of
    the context; it is the stretched one where they name another as the original one. llama3 always names the stretched one.

    Args:
      rope: of the full-attention layers.
      positions: what the file gives as the model's context.
      original: what it gives as the context before scaling, if it does.
    """
    stretched = rope.kind not in ("linear", "yarn") or original not in (None, positions)
    return positions if stretched else int(positions * rope.factor)


def rope_parameters(raw: dict, layer_type: str) -> dict:
    """What a file says about the rope of one kind of layers, in either spelling."""
    parameters = raw.get("rope_parameters") or {}
    return parameters.get(layer_type, parameters) or dict(raw.get("rope_scaling") or {})


def main_rope(raw: dict, default_theta: float, layer_type: str = "full_attention") -> RopeConfig:
    """The rope of (full-attention) layers, from ``rope_parameters`` or from ``rope_theta`` and ``rope_scaling``."""
    parameters = rope_parameters(raw, layer_type)
    theta = float(get(raw, "rope_theta", default_theta))
    return rope_config(parameters, theta, int(get(raw, "max_position_embeddings", 2048)))


def stop_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """``eos_token_id`` in any of its spellings."""
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


def windows_of(raw: dict, window: int | None, is_sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Window of every layer: ``layer_types`` where the file has them, otherwise `is_sliding`."""
    layers = int(need(raw, "num_hidden_layers"))
    kinds = raw.get("layer_types")
    if kinds is not None:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) != layers:
            raise ConversionError(f"layer_types: {len(kinds)} entries for {layers} layers, unknown: {sorted(unknown)}")
        if window is None and "sliding_attention" in kinds:
            raise ConversionError("layer_types names sliding_attention layers but sliding_window is not set")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return tuple(window if window is not None and is_sliding(i) else None for i in range(layers))


def base(raw: dict, family: str, architecture: str, *, theta: float = 10000.0, **over: Any) -> ModelConfig:
    """What all families share; `over` sets what is special."""
    heads, hidden = int(need(raw, "num_attention_heads")), int(need(raw, "hidden_size"))
    values = dict(
        family=family,
        vocab_size=int(need(raw, "vocab_size")),
        hidden_size=hidden,
        num_layers=int(need(raw, "num_hidden_layers")),
        num_heads=heads,
        num_kv_heads=int(get(raw, "num_key_value_heads", heads)),
        head_dim=int(get(raw, "head_dim", hidden // heads)),
        ffn_size=int(need(raw, "intermediate_size")),
        max_positions=int(get(raw, "max_position_embeddings", 2048)),
        norm_eps=float(get(raw, "rms_norm_eps", 1e-6)),
        activation=str(get(raw, "hidden_act", "silu")),
        tie_embeddings=bool(get(raw, "tie_word_embeddings", False)),
        bos_token_id=raw.get("bos_token_id"),
        stop_token_ids=stop_ids(raw.get("eos_token_id")),
        architecture=architecture,
    )
    if "rope" not in over:
        values["rope"] = main_rope(raw, theta)
    values |= over
    if values.get("rope_local") is None:  # Gemma 3 scales some layers alone and names its whole context
        original = rope_parameters(raw, "full_attention").get("original_max_position_embeddings")
        values["max_positions"] = scaled_context(values["rope"], values["max_positions"], original)
    try:
        return ModelConfig(**values)
    except ConfigError as error:
        raise ConversionError(f"config.json: {error}") from None


def llama(raw: dict) -> ModelConfig:
    """Llama 1–3.x, SmolLM2, TinyLlama."""
    bias = bool(get(raw, "attention_bias", False))
    return base(raw, "llama", "LlamaForCausalLM", qkv_bias=bias, out_bias=bias, mlp_bias=bool(get(raw, "mlp_bias", False)))


def mistral(raw: dict) -> ModelConfig:
    """Mistral: every layer has the window, if there is one (absent: 4096, null: none)."""
    window = raw.get("sliding_window", 4096)
    return base(raw, "mistral", "MistralForCausalLM", windows=windows_of(raw, window, lambda i: True))


def qwen_window(raw: dict) -> int | None:
    """Qwen's window counts only with ``use_sliding_window``."""
    return get(raw, "sliding_window", 4096) if get(raw, "use_sliding_window", False) else None


def qwen2(raw: dict) -> ModelConfig:
    """Qwen2 and Qwen2.5: biases on q, k, v; windows from layer ``max_window_layers`` on, if used at all."""
    first = int(get(raw, "max_window_layers", 28))
    windows = windows_of(raw, qwen_window(raw), lambda i: i >= first)
    return base(raw, "qwen2", "Qwen2ForCausalLM", windows=windows, qkv_bias=True)


def qwen3(raw: dict) -> ModelConfig:
    """Qwen3: q/k norms, a head size of its own."""
    first, bias = int(get(raw, "max_window_layers", 28)), bool(get(raw, "attention_bias", False))
    windows = windows_of(raw, qwen_window(raw), lambda i: i >= first)
    raw = {"head_dim": 128} | raw
    return base(raw, "qwen3", "Qwen3ForCausalLM", windows=windows, qk_norm=True, qkv_bias=bias, out_bias=bias)


def qwen3_moe(raw: dict) -> ModelConfig:
    """Qwen3-MoE: softmax routing; ``mlp_only_layers`` and ``decoder_sparse_step`` say which layers are dense."""
    step, dense = int(get(raw, "decoder_sparse_step", 1)), set(get(raw, "mlp_only_layers", []))
    layers, bias = int(need(raw, "num_hidden_layers")), bool(get(raw, "attention_bias", False))
    experts = raw.get("num_experts") or need(raw, "num_local_experts")
    moe = MoEConfig(
        num_experts=int(experts),
        num_experts_per_token=int(get(raw, "num_experts_per_tok", 8)),
        ffn_size=int(need(raw, "moe_intermediate_size")),
        dense_layers=tuple(i for i in range(layers) if i in dense or (i + 1) % step),
        normalize_weights=bool(get(raw, "norm_topk_prob", False)),
    )
    windows = windows_of(raw, qwen_window(raw), lambda i: True)
    return base(raw, "qwen3_moe", "Qwen3MoeForCausalLM", windows=windows, qk_norm=True, qkv_bias=bias, out_bias=bias, moe=moe)


def phi3(raw: dict) -> ModelConfig:
    """Phi-3 (the 4k variants: longrope is refused); fused projections are split by the mapping."""
    windows = windows_of(raw, raw.get("sliding_window"), lambda i: True)
    if get(raw, "partial_rotary_factor", 1.0) != 1.0:
        raise ConversionError(f"partial_rotary_factor={raw['partial_rotary_factor']} is not supported")
    return base(raw, "phi3", "Phi3ForCausalLM", windows=windows)


GEMMA2_DEFAULTS = dict(
    vocab_size=256000,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=8192,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    eos_token_id=1,
    bos_token_id=2,
)
GEMMA3_DEFAULTS = GEMMA2_DEFAULTS | dict(vocab_size=262208, max_position_embeddings=131072)


def gemma(raw: dict, family: str, architecture: str, pattern: int, **over: Any) -> ModelConfig:
    """What Gemma 2 and 3 share: sandwich norms, 1 + w, scaled embeddings, every `pattern`-th layer full."""
    if raw.get("use_bidirectional_attention"):
        raise ConversionError("use_bidirectional_attention: only causal models can be decoded")
    return base(
        raw,
        family,
        architecture,
        windows=windows_of(raw, raw["sliding_window"], lambda i: (i + 1) % pattern != 0),
        activation=str(raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"),
        tie_embeddings=bool(get(raw, "tie_word_embeddings", True)),
        qkv_bias=bool(get(raw, "attention_bias", False)),
        out_bias=bool(get(raw, "attention_bias", False)),
        norm_plus_one=True,
        sandwich_norms=True,
        embedding_scale=float(raw["hidden_size"]) ** 0.5,
        attention_scale=float(raw["query_pre_attn_scalar"]) ** -0.5,
        **over,
    )


def gemma2(raw: dict) -> ModelConfig:
    """Gemma 2: soft-capped scores and logits, every other layer slides."""
    raw = GEMMA2_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} | raw
    caps = dict(attention_softcap=raw["attn_logit_softcapping"], logit_softcap=raw["final_logit_softcapping"])
    return gemma(raw, "gemma2", "Gemma2ForCausalLM", 2, **caps)


def gemma3(raw: dict) -> ModelConfig:
    """Gemma 3, text model: q/k norms; sliding layers have a rope of their own."""
    raw = GEMMA3_DEFAULTS | raw
    local = (raw.get("rope_parameters") or {}).get("sliding_attention") or {}
    local = rope_config(local, float(get(raw, "rope_local_base_freq", 10000.0)), raw["max_position_embeddings"])
    return gemma(
        raw,
        "gemma3",
        "Gemma3ForCausalLM",
        int(get(raw, "sliding_window_pattern", get(raw, "_sliding_window_pattern", 6))),
        rope=main_rope(raw, 1_000_000.0),
        rope_local=local,
        qk_norm=True,
        attention_softcap=raw.get("attn_logit_softcapping"),
        logit_softcap=raw.get("final_logit_softcapping"),
    )


def gemma3_multimodal(raw: dict) -> ModelConfig:
    """Gemma 3 with a vision tower: the text model alone."""
    outer = {k: raw[k] for k in ("eos_token_id", "bos_token_id") if raw.get(k) is not None}
    return gemma3(need(raw, "text_config") | outer)


FAMILIES: dict[str, Callable[[dict], ModelConfig]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "phi3": phi3,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma3": gemma3_multimodal,
}
"""``model_type`` → parser. A new family is one entry here, and one in `.hf.LAYOUTS` if its names differ."""


def parse_config(raw: dict, generation: dict | None = None) -> ModelConfig:
    """The configuration that a Hugging Face ``config.json`` describes.

    Args:
      raw: the parsed file.
      generation: ``generation_config.json``, whose stop ids count besides those of `raw`.

    Raises:
      ConversionError: an unknown or unsupported architecture, a missing key, an unsupported rope.
    """
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        named = raw.get("architectures") or [kind]
        raise ConversionError(
            f"architecture {', '.join(map(str, named))} (model_type {kind!r}) is not supported; supported model types: "
            + ", ".join(sorted(FAMILIES))
        )
    quantization = raw.get("quantization_config") or {}
    method = quantization.get("quant_method", "unknown")
    if quantization and not (method == "fp8" and quantization.get("weight_block_size")):
        raise ConversionError(f"the weights are quantised ({method}); convert the unquantised checkpoint or a GGUF file")
    config = check_config(FAMILIES[kind](checked(raw, "config.json")), "config.json")
    stops = stop_ids((generation or {}).get("eos_token_id"))
    return dataclasses.replace(config, stop_token_ids=union(stops, config.stop_token_ids))


def union(*sources: Sequence[int]) -> tuple[int, ...]:
    """Stop ids of several places, each once, in their order."""
    return tuple(dict.fromkeys(i for source in sources for i in source))


def read_config(folder: Path) -> ModelConfig:
    """`parse_config` on the files of a folder; the tokenizer's end token, if the model has a row for it, ends answers too."""
    generation = folder / "generation_config.json"
    config = parse_config(read_json(folder / "config.json"), read_json(generation) if generation.exists() else None)
    own = [i for i in TokenizerFiles.of_folder(folder).stop_ids() if i < config.vocab_size]
    return dataclasses.replace(config, stop_token_ids=union(config.stop_token_ids, own))
