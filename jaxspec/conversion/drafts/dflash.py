"""Block drafts (DFlash, DFlash2, DSpark, causal heads) in every published layout → `DFlashConfig`, rules.

The variant is chosen from the tensors; the configuration file must agree, and so must the target when it is known.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.conversion.drafts.eagle import agree, check_draft_ids, offsets, tensor_names
from jaxspec.conversion.mapping import COPY, TRANSPOSE, Ignored, Rule
from jaxspec.conversion.targets import hf
from jaxspec.conversion.targets.hf_config import get, is_named, main_rope, need, published, read_json, windows_of
from jaxspec.drafters.dflash.config import DFlashConfig, check_target, default_taps
from jaxspec.files.errors import ConversionError
from jaxspec.files.folders import open_tensors
from jaxspec.files.readers import TensorInfo, TensorSource

ARCHITECTURES = ("DFlash", "DSpark", "MuseGlimmerAssistant")
"""Parts of the class names under which block drafts are published."""

SECTIONS = ("eagle_config", "dflash_config", "dspark_config")
"""Nested objects of ``config.json`` whose keys win over the top level's, the last one most."""

MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")

DEFAULT_BLOCK = {True: 7, False: 16}
"""Block size where a file names none: of drafts whose anchor predicts, and of all others."""


def matches(folder: Path) -> bool:
    """Whether a folder holds a block draft: by its class name, its configuration, or tensors that only such drafts have."""
    raw = published(folder)
    if raw is None:
        return False
    if is_named(raw, ARCHITECTURES) or "dflash_config" in raw or "dspark_config" in raw:
        return True
    if str(raw.get("speculators_model_type")) in ("dflash", "dspark"):
        return True
    names = {n.removeprefix("model.") for n in tensor_names(folder)}
    return {"fc.weight", "hidden_norm.weight"} <= names or "encoder.fc.weight" in names


def open_dflash(
    folder: Path, target: ModelConfig | None = None
) -> tuple[DFlashConfig, TensorSource, list[Rule], tuple[Ignored, ...]]:
    """Opens a draft: its configuration, tensors, rules and the tensors that may stay unused.

    Args:
      folder: ``config.json`` and safetensors or ``pytorch_model.bin``.
      target: the configuration of the model that it drafts for; needed where the file leaves the taps to a default that
        depends on the target's depth.

    Raises:
      ConversionError: tensors, ``config.json`` and target contradict each other; the message says what was found and
        what was expected.
    """
    raw, tensors = read_json(folder / "config.json"), open_tensors(folder)
    try:
        names = Names.of(tensors.info)
        config = read_variant(raw, tensors.info, names, target)
        if target is not None:
            check_target(config, target)
        if config.reduced_vocab:
            check_draft_ids(tensors, config)
    except (ConfigError, ConversionError) as error:
        raise ConversionError(f"{folder}: {error}") from None
    return config, tensors, rules_of(config, names), ignored_of(config)


@dataclasses.dataclass(frozen=True)
class Names:
    """How a file names the things that layouts name differently.

    Attributes:
      prefix: in front of all names.
      fc, context_norm: the projection of the taps and its norm.
      heads: in front of DSpark's heads (early SpecForge files nest them).
      has_mask: whether ``t2d`` is stored beside ``d2t``.
    """

    prefix: str = ""
    fc: str = "fc"
    context_norm: str = "hidden_norm"
    heads: str = ""
    has_mask: bool = True

    @classmethod
    def of(cls, info: Mapping[str, TensorInfo]) -> Names:
        """Looks at the tensors."""
        prefix = "model." if any(n.startswith("model.layers.0.") for n in info) else ""
        encoder = f"{prefix}encoder.fc.weight" in info
        nested = any(n.startswith("logit_head.") for n in info)
        return cls(
            prefix=prefix,
            fc="encoder.fc" if encoder else "fc",
            context_norm="encoder.output_norm_enc" if encoder else "hidden_norm",
            heads="logit_head." if nested else "",
            has_mask="t2d" in info,
        )


def count_layers(info: Mapping[str, TensorInfo], prefix: str) -> int:
    """How many layers a file holds."""
    pattern = re.compile(re.escape(prefix) + r"layers\.(\d+)\.")
    return len({m.group(1) for n in info if (m := pattern.match(n))})


def read_variant(raw: dict, info: Mapping[str, TensorInfo], names: Names, target: ModelConfig | None) -> DFlashConfig:
    """The configuration of a draft."""
    inner = raw.get("transformer_layer_config") or raw
    options = {**inner, **raw}
    for section in SECTIONS:
        options |= {k: v for k, v in (raw.get(section) or {}).items() if v is not None}
    for key in ("projector_type", "lilicorr_candidate_topk"):
        if options.get(key) not in (None, "none", "linear"):
            raise ConversionError(f"config.json says {key}={options[key]!r}: Domino and LiLiCorr drafts are not supported")
    if get(options, "dspark_bonus_anchor", False):
        raise ConversionError("config.json says dspark_bonus_anchor=true, which is not supported")

    fc = info.get(f"{names.prefix}{names.fc}.weight")
    count = count_layers(info, names.prefix)
    if fc is None or not count:
        found = ", ".join(sorted(info)[:6])
        raise ConversionError(f"missing tensor fc.weight or layers.0.*: every block draft has them; found {found}, …")
    said = int(get(inner, "num_hidden_layers", count))
    if said != count:
        raise ConversionError(
            f"config.json says num_hidden_layers={said}, the file holds {count}: is this config.json the target's? A draft "
            "needs its own"
        )
    hidden = int(need(inner, "hidden_size"))
    rows, columns = fc.shape
    if rows != hidden:
        raise ConversionError(f"config.json says hidden_size={hidden}, but fc.weight has shape {rows, columns}")
    vocab = inner.get("vocab_size", raw.get("vocab_size"))
    if vocab is None and target is None:
        raise ConversionError("config.json names no vocab_size: give the target")
    vocab = int(target.vocab_size if vocab is None else vocab)

    heads, first = int(need(inner, "num_attention_heads")), f"{names.prefix}layers.0.self_attn"
    shape = ModelConfig(
        family="dflash",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=count,
        num_heads=heads,
        num_kv_heads=int(get(inner, "num_key_value_heads", heads)),
        head_dim=int(get(inner, "head_dim", hidden // heads)),
        ffn_size=int(need(inner, "intermediate_size")),
        max_positions=target.max_positions if target else int(get(inner, "max_position_embeddings", 2048)),
        norm_eps=float(get(inner, "rms_norm_eps", 1e-6)),
        rope=main_rope(inner, 10000.0),
        windows=windows_of({**inner, "num_hidden_layers": count}, options.get("sliding_window"), lambda i: False),
        activation=str(get(inner, "hidden_act", "silu")),
        qkv_bias=f"{first}.q_proj.bias" in info,
        out_bias=f"{first}.o_proj.bias" in info,
        qk_norm=f"{first}.q_norm.weight" in info,
    )
    layout = layout_of(raw, info, names)
    heads_found = read_heads(options, info, names, hidden)
    dspark = heads_found["markov"] is not None or any("DSpark" in str(a) for a in raw.get("architectures") or ())
    anchor = bool(get(options, "sample_from_anchor", dspark or raw.get("speculators_model_type") == "dspark"))
    taps, width = read_taps(raw, options, layout, columns, hidden, count, target)
    made_for = raw.get("num_target_layers") if target is None else target.num_layers
    head = info.get("lm_head.weight")
    draft_vocab = int(get(raw, "draft_vocab_size", vocab if head is None else head.shape[0]))
    if head is not None and head.shape[0] != draft_vocab:
        raise ConversionError(f"config.json says draft_vocab_size={draft_vocab}, lm_head.weight has {head.shape[0]} rows")
    if draft_vocab != vocab and "d2t" not in info:
        raise ConversionError(f"missing tensor d2t: draft_vocab_size={draft_vocab} differs from vocab_size={vocab}")
    block = get(options, "block_size", options.get("dspark_block_size"))
    causal, causal_head = read_masks(options, layout, shape.windows)
    return DFlashConfig(
        layers=shape,
        taps=taps,
        target_hidden_size=width,
        draft_vocab_size=draft_vocab,
        block_size=DEFAULT_BLOCK[anchor] if block is None else int(block),
        mask_token_id=read_mask_token(options),
        anchor_predicts=anchor,
        causal=causal,
        causal_head=causal_head,
        own_embedding=f"{names.prefix}embed_tokens.weight" in info,
        own_head=head is not None,
        reduced_vocab="d2t" in info,
        embedding_scale=float(get(options, "input_embedding_scale", 1.0)),
        output_multiplier=float(get(options, "output_multiplier", 1.0)),
        logit_softcap=options.get("final_logit_softcapping"),
        num_target_layers=None if made_for is None else int(made_for),
        layout=layout,
        **heads_found,
    )


def layout_of(raw: dict, info: Mapping[str, TensorInfo], names: Names) -> str:
    """Which code base's format it is."""
    if "transformer_layer_config" in raw or raw.get("speculators_model_type"):
        return "speculators"
    if names.fc.startswith("encoder."):
        return "transformers"
    return "deepspec" if "embed_tokens.weight" in info and "dflash_config" not in raw else "zlab"


def read_heads(options: dict, info: Mapping[str, TensorInfo], names: Names, hidden: int) -> dict[str, Any]:
    """Convolutions, selector, Markov and confidence head, as far as the tensors are there; the options must agree."""
    kernel = info.get(f"{names.prefix}layers.0.attention_conv.base_kernel")
    dynamic = info.get(f"{names.prefix}layers.0.attention_conv.kernel_projection.weight")
    selector = info.get("candidate_selector.hidden_projection.weight")
    markov = info.get(f"{names.heads}markov_head.markov_w1.weight")
    estimate = info.get(f"{names.heads}confidence_head.proj.weight")
    for key, tensor in (("conv_kernel_size", kernel), ("selector_rank", selector), ("markov_rank", markov)):
        agree(key, options.get(key), tensor is not None)
    agree("enable_confidence_head", options.get("enable_confidence_head"), estimate is not None)
    found: dict[str, Any] = {}
    if kernel is not None and dynamic is not None:
        groups = dynamic.shape[0] // (2 * kernel.shape[1])
        if not groups or hidden % groups:
            raise ConversionError(f"attention_conv.kernel_projection.weight has shape {dynamic.shape}: no group size fits")
        found |= {"conv_kernel": kernel.shape[1], "conv_group": hidden // groups}
        said = options.get("conv_group_size")
        if said is not None and said != found["conv_group"]:
            raise ConversionError(f"config.json says conv_group_size={said}, the tensors say {found['conv_group']}")
    if selector is not None:
        found |= {"selector_rank": selector.shape[0], "selector_top_k": int(get(options, "selector_top_k", 16))}
    kind = None
    if markov is not None:
        gated = f"{names.heads}markov_head.gate_proj.weight" in info
        joint = f"{names.heads}markov_head.joint_proj.weight" in info
        kind = "gated" if gated else "rnn" if joint else "vanilla"
        said = options.get("markov_head_type")
        if said is not None and said != kind:
            raise ConversionError(f"config.json says markov_head_type={said!r}, the tensors are those of a {kind} head")
        found["markov_rank"] = markov.shape[1]
    found["markov"] = kind
    if estimate is not None:
        extra = estimate.shape[1] - hidden
        if extra not in (0, found.get("markov_rank", 0)):
            raise ConversionError(
                f"confidence_head.proj.weight reads {estimate.shape[1]} channels, expected {hidden} (hidden), or those and the "
                "Markov rank"
            )
        found["confidence"] = "markov" if extra else "hidden"
        agree("confidence_head_with_markov", options.get("confidence_head_with_markov"), bool(extra))
    return found


def read_masks(options: dict, layout: str, windows: tuple[int | None, ...]) -> tuple[tuple[bool, ...], bool]:
    """For every layer whether a block is causal in it, and whether the draft is a causal head for trees.

    Where nothing is said, full layers see the block both ways. Sliding layers are causal then in z-lab's and Speculators'
    code, and symmetric in transformers'.
    """
    head, said = bool(get(options, "causal_head", False)), options.get("is_causal")
    if head or said:
        return (True,) * len(windows), head
    symmetric = said is False or layout == "transformers" or bool(get(options, "sliding_window_non_causal", False))
    return tuple(window is not None and not symmetric for window in windows), False


def read_taps(
    raw: dict, options: dict, layout: str, columns: int, hidden: int, count: int, target: ModelConfig | None
) -> tuple[tuple[int, ...], int]:
    """Hidden-state indices of the taps and the width of one; each code base counts layers its own way.

    Speculators names the layer *before* which the state is taken, which is the index; all others the layer whose *output* is
    taken, which is the index minus one.
    """
    made_for = raw.get("num_target_layers")
    if made_for is not None and target is not None and int(made_for) != target.num_layers:
        raise ConversionError(f"the draft was made for a target of {made_for} layers, this one has {target.num_layers}")
    ids, shift = options.get("target_layer_ids", options.get("dspark_target_layer_ids")), 1
    if layout == "speculators" and options.get("aux_hidden_state_layer_ids") is not None:
        ids, shift = options["aux_hidden_state_layer_ids"], 0
    if ids is None:
        depth = made_for if target is None else target.num_layers
        if depth is None:
            raise ConversionError(
                "config.json names no tapped layers, so they follow from the target's number of layers: give the target"
            )
        taps = default_taps(int(depth), count)
    else:
        taps = tuple(int(i) + shift for i in ids)
    own = options.get("target_hidden_size")
    width = int(own) if own is not None else hidden if target is None else target.hidden_size
    if columns != len(taps) * width:
        raise ConversionError(
            f"fc.weight reads {columns} channels, expected {len(taps)} taps × {width}: a draft for another hidden size or taps"
        )
    return taps, width


def read_mask_token(options: dict) -> int:
    """The mask token, under any of its names."""
    for key in MASK_KEYS:
        if options.get(key) is not None:
            return int(options[key])
    raise ConversionError(f"config.json names no mask token: expected one of {', '.join(MASK_KEYS)}")


def rules_of(config: DFlashConfig, names: Names) -> list[Rule]:
    """The table of a draft."""
    c, prefix = config.layers, names.prefix
    rules = [
        Rule("fc/kernel", (f"{prefix}{names.fc}.weight",), TRANSPOSE),
        Rule("context_norm/scale", (f"{prefix}{names.context_norm}.weight",), COPY),
    ]
    for i in range(c.num_layers):
        target, source = f"layers/{i}", f"{prefix}layers.{i}"
        rules += hf.layer_rules(c, target, source, moe=False)
        for conv in ("attention_conv", "mlp_conv") if config.conv_kernel else ():
            rules.append(Rule(f"{target}/{conv}/base", (f"{source}.{conv}.base_kernel",), COPY))
            rules.append(Rule(f"{target}/{conv}/dynamic/kernel", (f"{source}.{conv}.kernel_projection.weight",), TRANSPOSE))
    rules.append(Rule("final_norm/scale", (f"{prefix}norm.weight",), COPY))
    if config.own_embedding:
        rules.append(Rule("embedder/embedding", (f"{prefix}embed_tokens.weight",), COPY))
    if config.own_head:
        rules.append(Rule("head/kernel", ("lm_head.weight",), TRANSPOSE))
    if config.reduced_vocab:
        sources = ("d2t", "t2d") if names.has_mask else ("d2t",)
        rules.append(Rule("target_ids", sources, offsets(c.vocab_size, names.has_mask)))
    if config.selector_rank:
        selector = "candidate_selector"
        rules += [Rule(f"selector/{n}/embedding", (f"{selector}.{n}_codebook",), COPY) for n in ("predecessor", "successor")]
        rules.append(Rule("selector/hidden/kernel", (f"{selector}.hidden_projection.weight",), TRANSPOSE))
    if config.markov is not None:
        markov = f"{names.heads}markov_head"
        rules.append(Rule("markov/predecessor/embedding", (f"{markov}.markov_w1.weight",), COPY))
        rules.append(Rule("markov/out/kernel", (f"{markov}.markov_w2.weight",), TRANSPOSE))
        extra = {"gated": ("gate", "gate_proj"), "rnn": ("joint", "joint_proj")}.get(config.markov)
        if extra is not None:
            rules.append(Rule(f"markov/{extra[0]}/kernel", (f"{markov}.{extra[1]}.weight",), TRANSPOSE))
            rules.append(Rule(f"markov/{extra[0]}/bias", (f"{markov}.{extra[1]}.bias",), COPY))
    if config.confidence is not None:
        rules.append(Rule("confidence/kernel", (f"{names.heads}confidence_head.proj.weight",), TRANSPOSE))
        rules.append(Rule("confidence/bias", (f"{names.heads}confidence_head.proj.bias",), COPY))
    return rules


def ignored_of(config: DFlashConfig) -> tuple[Ignored, ...]:
    """What published drafts store beside their parameters."""
    ignored = [
        hf.ROTARY_BUFFERS,
        Ignored(r"(model\.)?rotary_emb\..*", "a buffer computed from the configuration"),
        Ignored(r"verifier_(norm|lm_head)\..*", "the target's own norm and head, used in training only"),
    ]
    if not config.reduced_vocab:
        ignored.append(Ignored(r"t2d", "the draft's vocabulary is the target's"))
    return tuple(ignored)
