"""EAGLE draft heads in every published layout → `EagleConfig`, rules, and back.

The variant is chosen from the tensors; the configuration file must agree, and so must the target when it is known.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.conversion.mapping import COPY, TRANSPOSE, Ignored, Rule, Transform
from jaxspec.conversion.targets import hf
from jaxspec.conversion.targets.hf_config import get, is_named, main_rope, need, published, read_json, windows_of
from jaxspec.drafters.eagle.config import EagleConfig, check_target, default_taps
from jaxspec.files.errors import ConversionError, MissingFileError
from jaxspec.files.folders import open_tensors
from jaxspec.files.readers import TensorSource
from jaxspec.models.decoder import FINAL_NORM

ARCHITECTURES = ("Eagle", "PEagle")
"""Parts of the class names under which heads are published; EAGLE's own repository says just LlamaForCausalLM."""

LEGACY_TAP_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")


def tensor_names(folder: Path) -> set[str]:
    """Names of the tensors in a folder; empty when there are none that can be read."""
    try:
        return set(open_tensors(folder).info)
    except (ConversionError, MissingFileError):
        return set()


def matches(folder: Path) -> bool:
    """Whether a folder holds an EAGLE head: by its class name, or by tensors that only such heads have."""
    raw = published(folder)
    if raw is None:
        return False
    if is_named(raw, ARCHITECTURES):
        return True
    names = tensor_names(folder)
    first = {n.split(".", 2)[2] for n in names if n.startswith("layers.0.")}
    unnormed = "post_attention_layernorm.weight" in first and not first & {"input_layernorm.weight"}
    return unnormed or "hidden_norm.weight" in first or any(n.startswith("midlayer.") for n in names)


def open_eagle(
    folder: Path, target: ModelConfig | None = None
) -> tuple[EagleConfig, TensorSource, list[Rule], tuple[Ignored, ...]]:
    """Opens a head: its configuration, tensors, rules and the tensors that may stay unused.

    Args:
      folder: ``config.json`` and safetensors or ``pytorch_model.bin``.
      target: the configuration of the model that it drafts for; needed where the file leaves the taps to a default.

    Raises:
      ConversionError: tensors, ``config.json`` and target contradict each other; the message says what was found and
        what was expected.
    """
    raw, tensors = read_json(folder / "config.json"), open_tensors(folder)
    try:
        config, names = read_variant(raw, tensors, target)
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
      layers: prefix of every layer.
      further_norm: the norm before attention in layers 1 and up.
      tap_norms: the norms of the taps, if any.
      has_mask: whether ``t2d`` is stored beside ``d2t``.
    """

    layers: tuple[str, ...]
    further_norm: str = "input_layernorm"
    tap_norms: tuple[str, ...] = ()
    has_mask: bool = True


def find_layers(names: Mapping) -> tuple[str, ...]:
    """Prefixes of the layers that a file holds, in order."""
    first = "midlayer" if any(n.startswith("midlayer.") for n in names) else "layers.0"
    found = [first] if any(n.startswith(f"{first}.") for n in names) else []
    further = {m.group(1): int(m.group(2)) for n in names if (m := re.match(r"(layers\.([1-9]\d*))\.", n))}
    further |= {m.group(1): int(m.group(2)) + 1 for n in names if (m := re.match(r"(additional_layers\.(\d+))\.", n))}
    return (*found, *sorted(further, key=further.get))


def read_variant(raw: dict, tensors: TensorSource, target: ModelConfig | None) -> tuple[EagleConfig, Names]:
    """The configuration of a head and the names of its tensors."""
    info = tensors.info
    inner = raw.get("transformer_layer_config") or raw
    options = {**raw, **(raw.get("eagle_config") or {})}
    layers = find_layers(info)
    if "fc.weight" not in info:
        found = ", ".join(sorted(info)[:6])
        raise ConversionError(
            "missing tensor fc.weight: every EAGLE head has one, [hidden, 2 · hidden] for EAGLE-1/2 and [hidden, taps · target "
            f"hidden] for EAGLE-3; found {found}, …"
        )
    if not layers:
        raise ConversionError("found no layer: expected tensors midlayer.* or layers.0.*")
    said = int(get(inner, "num_hidden_layers", 1))
    said = int(get(raw, "draft_num_hidden_layers", said))
    if said != len(layers):
        raise ConversionError(
            f"config.json says num_hidden_layers={said}, the file holds {len(layers)} ({', '.join(layers[:4])}): is this "
            "config.json the target's? A head needs its own"
        )
    fused = f"{layers[0]}.hidden_norm.weight" in info
    hidden = int(need(inner, "hidden_size"))
    rows, columns = info["fc.weight"].shape
    if rows != hidden:
        raise ConversionError(f"config.json says hidden_size={hidden}, but fc.weight has shape {rows, columns}")
    vocab = int(need(inner, "vocab_size"))
    q = info.get(f"{layers[0]}.self_attn.q_proj.weight")
    width = (2 if fused else 1) * hidden
    if q is not None and q.shape[1] != width:
        raise ConversionError(
            f"{layers[0]}.self_attn.q_proj.weight reads {q.shape[1]} channels, expected {width}: an "
            f"{'EAGLE-3 head (it has hidden_norm) reads [embedding ; hidden]' if fused else 'EAGLE-1/2 head reads fc only'}"
        )
    taps, target_hidden, layout = read_taps(raw, options, fused, columns, hidden, target)
    heads = int(need(inner, "num_attention_heads"))
    shape = ModelConfig(
        family="eagle",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=len(layers),
        num_heads=heads,
        num_kv_heads=int(get(inner, "num_key_value_heads", heads)),
        head_dim=int(get(inner, "head_dim", hidden // heads)),
        ffn_size=int(need(inner, "intermediate_size")),
        max_positions=target.max_positions if target else int(get(inner, "max_position_embeddings", 2048)),
        norm_eps=float(get(inner, "rms_norm_eps", 1e-6)),
        rope=main_rope(inner, 10000.0),
        windows=windows_of({**inner, "num_hidden_layers": len(layers)}, inner.get("sliding_window"), lambda i: False),
        activation=str(get(inner, "hidden_act", "silu")),
        qkv_bias=f"{layers[0]}.self_attn.q_proj.bias" in info,
        out_bias=f"{layers[0]}.self_attn.o_proj.bias" in info,
        qk_norm=f"{layers[0]}.self_attn.q_norm.weight" in info,
    )
    tap_norms = tuple(f"fc_norm.{i}" for i in range(len(taps)))
    if LEGACY_TAP_NORMS[0] + ".weight" in info:
        tap_norms = LEGACY_TAP_NORMS
    fc_norm = f"{tap_norms[0]}.weight" in info
    agree("bias", raw.get("bias"), "fc.bias" in info)
    agree("fc_norm", options.get("fc_norm", options.get("use_aux_norm")), fc_norm)
    agree("norm_before_fc", options.get("norm_before_fc"), "input_norm.weight" in info)
    agree("qkv_bias", raw.get("qkv_bias"), shape.qkv_bias)
    head = info.get("lm_head.weight") if fused else None
    if fused and head is None and get(raw, "tie_word_embeddings", False) and target is not None and not target.tie_embeddings:
        raise ConversionError("config.json ties the head to the embedding and the file has no lm_head.weight: not supported")
    draft_vocab = get(raw, "draft_vocab_size", vocab if head is None else head.shape[0])
    if head is not None and head.shape[0] != draft_vocab:
        raise ConversionError(f"config.json says draft_vocab_size={draft_vocab}, lm_head.weight has {head.shape[0]} rows")
    if fused and draft_vocab != vocab and "d2t" not in info:
        raise ConversionError(f"missing tensor d2t: draft_vocab_size={draft_vocab} differs from vocab_size={vocab}")
    config = EagleConfig(
        layers=shape,
        fused=fused,
        taps=taps,
        target_hidden_size=target_hidden,
        draft_vocab_size=int(draft_vocab),
        reduced_vocab=fused and "d2t" in info,
        fc_bias="fc.bias" in info,
        own_embedding=keeps_embedding(raw, layout, info, hidden, target_hidden),
        own_head=head is not None,
        fc_norm=fc_norm,
        norm_before_fc="input_norm.weight" in info,
        norm_before_residual=bool(get(options, "norm_before_residual", False)),
        norm_output=bool(get(options, "norm_output", False)),
        mask_token_id=read_mask_token(raw, options) if "mask_hidden" in info else None,
        layout="peagle" if "mask_hidden" in info and layout == "sglang" else layout,
    )
    if config.norm_output and layout == "sglang" and not fc_norm:
        warnings.warn(
            "config.json says norm_output=true. SpecForge up to 0.2.0 wrote that for plain EAGLE-3 heads, whose state is fed "
            "back without the norm; it is read in its later meaning (EAGLE-3.1). If accepted lengths are poor, load the head "
            "with norm_output=False",
            stacklevel=2,
        )
    normed = len(layers) > 1 and f"{layers[1]}.hidden_norm.weight" in info
    names = Names(layers, "hidden_norm" if normed else "input_layernorm", tap_norms if fc_norm else (), "t2d" in info)
    return config, names


def agree(key: str, said: Any, found: bool) -> None:
    """Raises ConversionError when ``config.json`` says something else than the tensors."""
    if said is not None and bool(said) != found:
        raise ConversionError(f"config.json says {key}={said!r}, but the file {'has' if found else 'lacks'} its tensors")


def read_taps(
    raw: dict, options: dict, fused: bool, columns: int, hidden: int, target: ModelConfig | None
) -> tuple[tuple[int, ...], int, str]:
    """Hidden-state indices of the taps, the width of one, and the layout; each code base counts layers its own way.

    Speculators and vLLM name the layer *before* which the state is taken, which is the index; SGLang, SpecForge and
    DeepSpec name the layer whose *output* is taken, which is the index minus one.
    """
    own = raw.get("target_hidden_size")
    width = int(own if own is not None else hidden)
    if not fused:
        if own is None and columns != 2 * hidden:
            raise ConversionError(
                f"fc.weight reads {columns} channels, expected {2 * hidden}: [embedding ; feature] of an EAGLE-1/2 head (an "
                "EAGLE-3 head would have hidden_norm)"
            )
        return (FINAL_NORM,), columns - hidden, "eagle"
    if options.get("use_aux_hidden_state") is False:
        raise ConversionError("eagle_config.use_aux_hidden_state=false (one feature instead of taps) is not supported")
    if "transformer_layer_config" in raw or raw.get("speculators_model_type"):
        ids, shift, layout = options.get("eagle_aux_hidden_state_layer_ids"), 0, "speculators"
    elif raw.get("target_layer_ids") is not None:
        ids, shift, layout = raw["target_layer_ids"], 1, "deepspec"
    else:
        ids, shift, layout = options.get("eagle_aux_hidden_state_layer_ids"), 1, "sglang"
    if ids is None:
        count = target.num_layers if target is not None else raw.get("num_target_layers")
        if count is None:
            raise ConversionError(
                "config.json names no tapped layers, so they follow from the target's number of layers: give the target"
            )
        taps = default_taps(int(count))
    else:
        taps = tuple(int(i) + shift for i in ids)
    if own is None and target is not None and columns == len(taps) * target.hidden_size:
        width = target.hidden_size
    if columns != len(taps) * width:
        wanted = f"{len(taps)} taps × {width}"
        if target is not None and target.hidden_size != width:
            wanted += f" (the target's hidden size is {target.hidden_size})"
        raise ConversionError(f"fc.weight reads {columns} channels, expected {wanted}: a draft for another hidden size or taps")
    return taps, width, layout


def read_mask_token(raw: dict, options: dict) -> int:
    """P-EAGLE's mask token, under any of its names."""
    for key in ("mask_token_id", "ptd_token_id", "pard_token"):
        if options.get(key) is not None:
            return int(options[key])
    raise ConversionError("a parallel EAGLE head (it has mask_hidden) needs mask_token_id in its config.json")


def keeps_embedding(raw: dict, layout: str, info: Mapping, hidden: int, target_hidden: int) -> bool:
    """Whether a stored ``embed_tokens`` is the head's own, or a frozen copy of the target's that is left out.

    EAGLE's and SGLang's code use the target's table wherever widths allow; Speculators says whether it was trained.
    """
    if "embed_tokens.weight" not in info:
        return False
    if hidden != target_hidden:
        return True
    if layout == "speculators":
        return bool(get(raw, "embed_requires_grad", True))
    return layout == "deepspec" or "mask_hidden" in info


def check_draft_ids(tensors: TensorSource, config: EagleConfig) -> None:
    """``d2t`` must hold offsets (target id = draft id + d2t[draft id]) that give distinct ids of the vocabulary.

    Raises ConversionError, naming absolute ids where that is what it holds.
    """
    stored = np.asarray(tensors.read("d2t")).astype(np.int64)
    if stored.shape != (config.draft_vocab_size,):
        raise ConversionError(f"d2t has shape {stored.shape}, expected ({config.draft_vocab_size},) for draft_vocab_size")
    ids, vocab = stored + np.arange(stored.size), config.layers.vocab_size
    sound = len(np.unique(ids)) == ids.size and ids.min() >= 0 and ids.max() < vocab
    mask = np.asarray(tensors.read("t2d")).astype(bool) if "t2d" in tensors.info else None
    if mask is not None and sound:
        sound = mask.shape == (vocab,) and mask[ids].all() and mask.sum() == ids.size
    absolute = stored.min() >= 0 and stored.max() < vocab and len(np.unique(stored)) == stored.size > 1
    if mask is not None:
        absolute = absolute and mask.shape == (vocab,) and mask[stored].all()
    elif sound:
        # Offsets of a vocabulary in ascending order stay equal wherever it holds two neighbouring ids.
        sound = not absolute or bool((np.diff(stored) <= 0).any())
    if sound:
        return
    if absolute:
        raise ConversionError(
            f"d2t holds absolute target ids ({stored[:4].tolist()} …), expected offsets: target id = draft id + d2t[draft id]; "
            "subtract 0, 1, 2, … from it"
        )
    twice = ids.size - len(np.unique(ids))
    raise ConversionError(
        f"d2t does not fit: draft ids map to target ids {ids.min()} … {ids.max()} ({twice} twice) of a vocabulary of {vocab}"
        + ("" if mask is None else ", and t2d marks other ones")
    )


def offsets(vocab: int, has_mask: bool) -> Transform:
    """``d2t`` (and ``t2d``) ↔ absolute target ids."""

    def join(tensors):
        return (np.asarray(tensors[0]) + np.arange(len(tensors[0]))).astype(np.int32)

    def split(ids):
        mask = np.zeros(vocab, bool)
        mask[ids] = True
        return [ids.astype(np.int64) - np.arange(len(ids)), mask][: 1 + has_mask]

    return Transform("draft id + offset", join, split)


def rules_of(config: EagleConfig, names: Names) -> list[Rule]:
    """The table of a head."""
    c = config.layers
    rules = [Rule("fc/kernel", ("fc.weight",), TRANSPOSE)]
    if config.fc_bias:
        rules.append(Rule("fc/bias", ("fc.bias",), COPY))
    rules += [Rule(f"fc_norm/{i}/scale", (f"{n}.weight",), COPY) for i, n in enumerate(names.tap_norms)]
    if config.norm_before_fc:
        rules.append(Rule("input_norm/scale", ("input_norm.weight",), COPY))
    for i, source in enumerate(names.layers):
        norms = [("mlp_norm", "post_attention_layernorm")]
        if i:
            norms.append(("input_norm", names.further_norm))
        elif config.fused:
            norms += [("input_norm", "input_layernorm"), ("hidden_norm", "hidden_norm")]
        rules += [Rule(f"layers/{i}/{ours}/scale", (f"{source}.{theirs}.weight",), COPY) for ours, theirs in norms]
        rules += hf.attention_rules(c, f"layers/{i}/attention", f"{source}.self_attn")
        rules += hf.mlp_rules(c, f"layers/{i}/mlp", f"{source}.mlp")
    if config.fused:
        rules.append(Rule("final_norm/scale", ("norm.weight",), COPY))
    if config.own_embedding:
        rules.append(Rule("embedder/embedding", ("embed_tokens.weight",), COPY))
    if config.own_head:
        rules.append(Rule("head/kernel", ("lm_head.weight",), TRANSPOSE))
    if config.reduced_vocab:
        sources = ("d2t", "t2d") if names.has_mask else ("d2t",)
        rules.append(Rule("target_ids", sources, offsets(c.vocab_size, names.has_mask)))
    if config.mask_token_id is not None:
        rules.append(Rule("mask_hidden", ("mask_hidden",), MASK))
    return rules


MASK = Transform("drop axes of one", lambda t: t[0].reshape(-1), lambda p: [p[None, None]])


def ignored_of(config: EagleConfig) -> tuple[Ignored, ...]:
    """What published heads store beside their parameters."""
    ignored = [
        hf.ROTARY_BUFFERS,
        Ignored(r"verifier_(norm|lm_head)\..*", "the target's own norm and head, used in training only"),
    ]
    if not config.own_embedding:
        ignored.append(Ignored(r"embed_tokens\.weight", "a frozen copy of the target's embedding, which is used instead"))
    if not config.fused:
        ignored.append(Ignored(r"lm_head\.weight", "EAGLE-1/2 heads use the target's"))
    if config.fused and not config.reduced_vocab:
        ignored.append(Ignored(r"t2d", "the draft's vocabulary is the target's"))
    if config.layers.num_layers > 1:
        why = "layers behind the first norm with hidden_norm (SGLang)"
        ignored.append(Ignored(r"(layers|additional_layers)\.\d+\.input_layernorm\.weight", why))
    return tuple(ignored)
