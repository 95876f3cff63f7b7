"""What the values of a configuration may be: the one place that says so for every file and format.

`checked` looks at the JSON of others before anything is computed from it (a number of layers of 10^9 costs as much as a
wrong one); `check_config` looks at the configuration that came out, whatever it was read from.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.config import MAX_LAYERS, ConfigError
from jaxspec.files.errors import ConversionError, shown

MAX_SIZE = (1 << 31) - 1
"""Of any axis: arrays are indexed with 32 bits."""
MAX_EXPERTS = 1 << 17
"""Over all layers; each is a tensor or three."""
MAX_LIST = 1 << 16


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole number from `low` to `high`; 4.0 is one in JSON, 4.7, "4" and true are not."""

    low: int
    high: int = MAX_SIZE

    def of(self, value: Any) -> Any:
        """The number. Raises ValueError with what would be right."""
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not self.low <= value <= self.high:
            raise ValueError(f"a whole number from {self.low} to {self.high}")
        return value


@dataclasses.dataclass(frozen=True)
class Real:
    """A finite number, above zero where `positive`; with `zero` zero itself, too."""

    positive: bool = True
    zero: bool = False

    def of(self, value: Any) -> Any:
        """The number. Raises ValueError with what would be right."""
        finite = type(value) in (int, float) and abs(value) < 1e30  # nothing is of that size: no overflow in float32
        if not finite or (self.positive and (value < 0 or (value == 0 and not self.zero))):
            raise ValueError("a finite number" + (" of at least 0" if self.zero else " above 0" if self.positive else ""))
        return value


@dataclasses.dataclass(frozen=True)
class Of:
    """A value of one of some JSON types."""

    kinds: tuple[type, ...]
    words: str

    def of(self, value: Any) -> Any:
        """The value. Raises ValueError with what would be right."""
        if type(value) not in self.kinds:
            raise ValueError(self.words)
        return value


@dataclasses.dataclass(frozen=True)
class Many:
    """A list of values of one kind; `alone` lets one stand for itself."""

    inner: Any
    alone: bool = False
    longest: int = MAX_LIST

    def of(self, value: Any) -> Any:
        """The list. Raises ValueError with what would be right."""
        try:
            if self.alone and type(value) is not list:
                return self.inner.of(value)
            if type(value) is not list or len(value) > self.longest:
                raise ValueError(f"one of at most {self.longest}")
            return [self.inner.of(entry) for entry in value]
        except ValueError as error:
            raise ValueError(f"a list of which each entry is {error}") from None


SIZE, COUNT, LAYERS = Whole(1), Whole(0), Whole(1, MAX_LAYERS)
POSITIVE, AT_LEAST_0, NUMBER = Real(), Real(zero=True), Real(positive=False)
FLAG, TEXT, SECTION = Of((bool,), "true or false"), Of((str,), "a text"), Of((dict,), "an object")
ID = Whole(-1)
NAMES, LAYER_IDS = Many(TEXT), Many(Whole(-MAX_LAYERS, MAX_LAYERS))


def _named(kind: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


KEYS: dict[str, Any] = {
    **_named(
        LAYERS,
        "num_hidden_layers num_target_layers draft_num_hidden_layers decoder_sparse_step moe_layer_freq "
        "sliding_window_pattern _sliding_window_pattern",
    ),
    **_named(Whole(0, MAX_LAYERS), "first_k_dense_replace num_nextn_predict_layers"),
    **_named(
        SIZE,
        "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size sliding_window "
        "max_position_embeddings original_max_position_embeddings num_experts_per_tok moe_intermediate_size "
        "num_local_experts n_routed_experts n_group topk_group kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim "
        "v_head_dim draft_vocab_size target_hidden_size block_size dspark_block_size r",
    ),
    **_named(
        COUNT,
        "max_window_layers num_experts n_shared_experts shared_expert_intermediate_size conv_group_size "
        "conv_kernel_size selector_rank selector_top_k markov_rank",
    ),
    **_named(ID, "bos_token_id mask_token_id"),
    "eos_token_id": Many(ID, alone=True),
    **_named(AT_LEAST_0, "rms_norm_eps mscale mscale_all_dim"),
    **_named(
        POSITIVE,
        "rope_theta rope_local_base_freq factor low_freq_factor high_freq_factor attention_factor beta_fast "
        "beta_slow partial_rotary_factor query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping "
        "routed_scaling_factor lora_alpha",
    ),
    **_named(NUMBER, "input_embedding_scale output_multiplier"),
    **_named(
        FLAG,
        "tie_word_embeddings attention_bias mlp_bias qkv_bias use_sliding_window norm_topk_prob rope_interleave "
        "truncate use_bidirectional_attention embed_requires_grad use_rslora causal_head dspark_bonus_anchor "
        "sample_from_anchor norm_before_residual norm_output norm_before_fc use_aux_norm enable_confidence_head "
        "confidence_head_with_markov use_aux_hidden_state",
    ),
    **_named(
        TEXT,
        "model_type hidden_act hidden_activation rope_type type topk_method scoring_func speculators_model_type "
        "peft_type base_model_name_or_path markov_head_type quant_method",
    ),
    **_named(NAMES, "architectures layer_types"),
    **_named(LAYER_IDS, "target_layer_ids dspark_target_layer_ids aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids"),
    "mlp_only_layers": Many(Whole(0, MAX_LAYERS)),
    "weight_block_size": Many(SIZE),
    **_named(
        SECTION,
        "text_config rope_scaling rope_parameters full_attention sliding_attention quantization_config "
        "transformer_layer_config eagle_config dflash_config dspark_config",
    ),
}
"""Key of a ``config.json`` → what it may be; keys that are not listed are not read, and null is "not given"."""


ANY_ID = Whole(-1, (1 << 32) - 1)
METADATA: dict[str, Any] = {
    **_named(LAYERS, "block_count attention.sliding_window_pattern"),
    **_named(
        SIZE,
        "context_length embedding_length attention.key_length expert_used_count expert_feed_forward_length "
        "rope.dimension_count rope.scaling.original_context_length",
    ),
    **_named(Many(SIZE, alone=True), "attention.head_count attention.head_count_kv feed_forward_length"),
    **_named(COUNT, "expert_count attention.sliding_window"),
    **_named(AT_LEAST_0, "attention.layer_norm_rms_epsilon rope.scaling.factor rope.scale_linear"),
    **_named(POSITIVE, "rope.freq_base rope.freq_base_swa attn_logit_softcapping final_logit_softcapping"),
    **_named(TEXT, "rope.scaling.type"),
}
"""The same for the keys below ``{architecture}.`` of a GGUF file."""
GENERAL: dict[str, Any] = {
    **_named(TEXT, "general.architecture tokenizer.ggml.model tokenizer.ggml.pre tokenizer.chat_template"),
    **_named(FLAG, "tokenizer.ggml.add_bos_token tokenizer.ggml.add_eos_token tokenizer.ggml.add_space_prefix"),
    **_named(ANY_ID, " ".join(f"tokenizer.ggml.{x}_token_id" for x in ["bos", "eos", "eot", "eom", "unknown", "padding"])),
    **_named(Many(TEXT, longest=MAX_SIZE), "tokenizer.ggml.tokens tokenizer.ggml.merges"),
    **_named(Many(NUMBER, longest=MAX_SIZE), "tokenizer.ggml.scores"),
    **_named(Many(COUNT, longest=MAX_SIZE), "tokenizer.ggml.token_type"),
    "general.alignment": Whole(1, 1 << 20),
    "split.count": COUNT,
}
"""The same for its other keys."""


def check_metadata(metadata: Mapping[str, Any], file: Path) -> None:
    """The metadata of a GGUF file, every known key. Raises ConversionError like `checked`."""
    lead = f"{metadata.get('general.architecture')}." if isinstance(metadata.get("general.architecture"), str) else ""
    for key, value in metadata.items():
        kind = GENERAL.get(key) or (METADATA.get(key[len(lead) :]) if key.startswith(lead) else None)
        if kind is not None:
            try:
                kind.of(value)
            except ValueError as error:
                raise ConversionError(f"{file}: {shown(key)} is {said(value)}, expected {error}") from None


def checked(raw: Mapping[str, Any], where: str | Path, lead: str = "", depth: int = 4) -> dict[str, Any]:
    """A JSON object with every known key in the type that it must have, its sections included.

    Raises ConversionError that names file, key, value and what would be right.
    """
    found = dict(raw)
    for key, value in raw.items():
        kind = KEYS.get(key)
        if kind is None or value is None:
            continue
        try:
            found[key] = kind.of(value)
        except ValueError as error:
            raise ConversionError(f"{where}: {shown(lead + key)} is {said(value)}, expected {error}") from None
        if kind is SECTION and depth:
            found[key] = checked(value, where, f"{lead}{key}.", depth - 1)
    return found


def said(value: Any) -> str:
    """A value of a file in an error message."""
    return f"{shown(value)!r}" if isinstance(value, str) else shown(value)


def parse_json(text: str | bytes, where: str | Path, *, kind: type | None = dict) -> Any:
    """JSON whose objects have every key once.

    Args:
      text: the file's content; bytes are UTF-8.
      where: the file, for errors.
      kind: the type that the whole must have; None for any.

    Raises ConversionError for anything else.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in names if names.count(key) > 1)
            raise ConversionError(f"{where} has the key {said(twice)} twice")
        return found

    try:
        data = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, object_pairs_hook=once)
    except ConversionError:
        raise
    except RecursionError:
        raise ConversionError(f"{where} is nested too deeply to be read") from None
    except ValueError as error:
        raise ConversionError(f"{where} is not valid JSON ({shown(error)})") from None
    if kind is not None and not isinstance(data, kind):
        raise ConversionError(f"{where} holds a {type(data).__name__}, expected a JSON object")
    return data


def _fields(names: str) -> frozenset[str]:
    return frozenset(names.split())


POSITIVE_FIELDS = _fields(
    "vocab_size hidden_size num_layers num_heads num_kv_heads head_dim ffn_size max_positions num_experts "
    "num_experts_per_token num_groups num_groups_per_token kv_rank nope_head_dim rope_head_dim value_head_dim query_rank "
    "target_hidden_size draft_vocab_size block_size rank windows theta factor low_freq_factor high_freq_factor beta_fast "
    "beta_slow attention_factor fraction routed_scale attention_scale attention_softcap logit_softcap embedding_scale alpha"
)
"""Fields of configurations that must be above zero; the other numbers must be finite, and whole ones at least −1 or a tap."""
LEAST_ZERO_FIELDS = _fields("norm_eps num_mtp_layers shared_ffn_size original_max_positions dense_layers")


def check_config(config: Any, where: str | Path) -> Any:
    """The configuration itself, when each of its fields is of its type and in its range; sections included.

    Raises ConversionError that names file, field, value and what would be right.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        _check_field(field.name, getattr(config, field.name), hints[field.name], where)
    moe = getattr(config, "moe", None)
    if moe is not None:
        routed = moe.num_experts * (config.num_layers - len(moe.dense_layers))
        if routed > MAX_EXPERTS:
            raise ConversionError(f"{where}: {routed} experts over all layers, at most {MAX_EXPERTS} are read")
        if moe.num_experts_per_token > moe.num_experts:
            raise ConversionError(
                f"{where}: num_experts_per_token={moe.num_experts_per_token} of num_experts={moe.num_experts}"
            )
    return config


def _check_field(name: str, value: Any, hint: Any, where: str | Path) -> None:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return
    kind = next(option for option in options if option is not type(None))
    inner = typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, kind):
            raise ConversionError(f"{where}: {name} is {said(value)}, expected an object")
        check_config(value, where)
    elif inner:
        if not isinstance(value, tuple) or len(value) > MAX_LIST:
            raise ConversionError(f"{where}: {name} is {said(value)}, expected a list of at most {MAX_LIST} values")
        for entry in value:
            _check_field(name, entry, inner[0], where)
    else:
        rule = {bool: FLAG, str: TEXT}.get(kind)
        if kind is int:
            rule = Whole(1 if name in POSITIVE_FIELDS else 0 if name in LEAST_ZERO_FIELDS else -MAX_LAYERS)
        elif kind is float:
            rule = Real(positive=name in POSITIVE_FIELDS | LEAST_ZERO_FIELDS, zero=name in LEAST_ZERO_FIELDS)
        try:
            same = rule.of(value)
            if kind is int and type(value) is not int:
                raise ValueError(f"a whole number, {same}")
        except ValueError as error:
            raise ConversionError(f"{where}: {name} is {said(value)}, expected {error}") from None


def build_config(cls: Any, data: Any, where: str | Path) -> Any:
    """A configuration from its stored JSON (``cls.from_json``), checked.

    Raises ConversionError, also for JSON of another shape.
    """
    try:
        return check_config(cls.from_json(data), where)
    except ConversionError:
        raise
    except (ConfigError, TypeError, KeyError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConversionError(f"{where}: {shown(error)}") from None
