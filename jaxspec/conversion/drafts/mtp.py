"""MTP layers: MiMo's target, the layers that travel inside a target's files, and those of targets that cannot run yet.

What a checkpoint holds is read off its tensor names: Qwen3-Next's configuration does not mention its MTP layer, MiMo's names
one where files may hold three.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxspec.config import ModelConfig, MoEConfig
from jaxspec.conversion.mapping import COPY, TRANSPOSE, Ignored, Rule, Transform
from jaxspec.conversion.targets import deepseek, hf, hf_config
from jaxspec.conversion.targets.hf_config import get, need
from jaxspec.drafters.mtp.config import MtpConfig, mtp_config
from jaxspec.files.errors import ConversionError
from jaxspec.files.folders import open_tensors
from jaxspec.files.readers import TensorSource


@dataclasses.dataclass(frozen=True)
class Names:
    """How a family names its MTP layers.

    Attributes:
      own: prefix of layer i's norms and projection: (text model's prefix, the target's layers, i) → str.
      block: the same for its decoder layer.
      parts: our name → theirs, of norms and projection.
      rules: rules of the decoder layer: (config, target, source) → rules.
    """

    own: Callable[[str, int, int], str]
    block: Callable[[str, int, int], str]
    parts: dict[str, str]
    rules: Callable[[ModelConfig, str, str], list[Rule]]


def _deepseek_prefix(prefix: str, num_layers: int, i: int) -> str:
    return f"{prefix}layers.{num_layers + i}"


def _mimo_prefix(prefix: str, num_layers: int, i: int) -> str:
    del num_layers
    return f"{prefix}mtp_layers.{i}"


def _deepseek_block(config: ModelConfig, target: str, source: str) -> list[Rule]:
    return deepseek.layer_rules(config, target, source, moe=config.moe is not None)


def _mimo_block(config: ModelConfig, target: str, source: str) -> list[Rule]:
    return hf.layer_rules(config, target, source, moe=False)


def gated_qkv(config: ModelConfig) -> Transform:
    """Qwen3-Next's q_proj (query and gate of each head in turn), k_proj, v_proj → the fused projection with gates.

    Per kv head it holds [its G query heads, key, value, G gates] (`jaxspec.models.layers.split_gate`).
    """
    K, D = config.num_kv_heads, config.head_dim
    G = config.num_heads // K

    def join(tensors):
        q, k, v = (t.T for t in tensors)
        lead = q.shape[:-1]
        q = q.reshape(*lead, K, G, 2, D)
        k, v = (x.reshape(*lead, K, 1, D) for x in (k, v))
        return np.concatenate([q[..., 0, :], k, v, q[..., 1, :]], axis=-2).reshape(*lead, -1)

    def split(p):
        lead = p.shape[:-1]
        p = p.reshape(*lead, K, 2 * G + 2, D)
        q = np.stack([p[..., :G, :], p[..., G + 2 :, :]], axis=-2)
        parts = (q, p[..., G, :], p[..., G + 1, :])
        return [x.reshape(*lead, -1).T for x in parts]

    return Transform("fuse q with gates, k, v", join, split)


def _qwen3_next_block(config: ModelConfig, target: str, source: str) -> list[Rule]:
    attention, names = f"{source}.self_attn", {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    rules = [Rule(f"{target}/{ours}/scale", (f"{source}.{theirs}.weight",), COPY) for ours, theirs in names.items()]
    qkv = tuple(f"{attention}.{x}_proj.weight" for x in "qkv")
    rules += [
        Rule(f"{target}/attention/qkv/kernel", qkv, gated_qkv(config)),
        Rule(f"{target}/attention/out/kernel", (f"{attention}.o_proj.weight",), TRANSPOSE),
        *(Rule(f"{target}/attention/{n}/scale", (f"{attention}.{n}.weight",), COPY) for n in ("q_norm", "k_norm")),
    ]
    if config.moe is None:
        return rules + hf.mlp_rules(config, f"{target}/mlp", f"{source}.mlp")
    return rules + deepseek.expert_rules(config, f"{target}/moe", f"{source}.mlp", shared="shared_expert")


NAMES: dict[str, Names] = {
    "deepseek": Names(
        own=_deepseek_prefix,
        block=_deepseek_prefix,
        parts={"embedding_norm": "enorm", "hidden_norm": "hnorm", "proj": "eh_proj", "final_norm": "shared_head.norm"},
        rules=_deepseek_block,
    ),
    "mimo": Names(
        own=_mimo_prefix,
        block=_mimo_prefix,
        parts={
            "embedding_norm": "token_layernorm",
            "hidden_norm": "hidden_layernorm",
            "proj": "input_proj",
            "final_norm": "final_layernorm",
        },
        rules=_mimo_block,
    ),
    "qwen3_next": Names(
        own=lambda prefix, num_layers, i: "mtp",
        block=lambda prefix, num_layers, i: f"mtp.layers.{i}",
        parts={
            "embedding_norm": "pre_fc_norm_embedding",
            "hidden_norm": "pre_fc_norm_hidden",
            "proj": "fc",
            "final_norm": "norm",
        },
        rules=_qwen3_next_block,
    ),
}
"""MTP family → names (`jaxspec.drafters.mtp.config.FAMILIES`)."""

MTP_FAMILY = {"deepseek_v3": "deepseek", "deepseek_v2": "deepseek", "mimo": "mimo", "qwen3_next": "qwen3_next"}
"""Family of the target → family of its MTP layers."""


def mtp_rules(config: MtpConfig, target_layers: int, prefix: str = "model.") -> list[Rule]:
    """The table of all MTP layers of a target with `target_layers` layers, whose tensors begin with `prefix`."""
    names, rules = NAMES[config.family], []
    for i in range(config.num_layers):
        own = names.own(prefix, target_layers, i)
        for ours, theirs in names.parts.items():
            leaf, transform = ("kernel", TRANSPOSE) if ours == "proj" else ("scale", COPY)
            rules.append(Rule(f"layers/{i}/{ours}/{leaf}", (f"{own}.{theirs}.weight",), transform))
        rules += names.rules(config.layers, f"layers/{i}/block", names.block(prefix, target_layers, i))
    return rules


def count_layers(target: ModelConfig, tensors: TensorSource, prefix: str = "model.") -> int:
    """How many MTP layers the files hold, told by their decoder layers' norms."""
    names = NAMES.get(MTP_FAMILY.get(target.family, ""))
    count = 0
    while names and f"{names.block(prefix, target.num_layers, count)}.input_layernorm.weight" in tensors.info:
        count += 1
    return count


def find_mtp(target: ModelConfig, tensors: TensorSource, prefix: str = "model.") -> MtpConfig | None:
    """The MTP layers in a target's files, or None.

    Raises:
      ConversionError: tensors under an MTP prefix that are no classic MTP layer, or several layers where a family has one.
    """
    count = count_layers(target, tensors, prefix)
    if not count:
        strange = next((name for name in tensors.info if re.match(r"(model\.)?mtp(_layers)?\.", name)), None)
        if strange:
            raise ConversionError(f"tensor {strange} looks like an MTP layer of a kind that is not known for {target.family}")
        return None
    family = MTP_FAMILY[target.family]
    if family == "qwen3_next" and count > 1:
        raise ConversionError(f"{count} layers under mtp.layers share one projection; only one layer is supported")
    return mtp_config(target, family, count)


def ignored_copies(config: MtpConfig, target: ModelConfig, prefix: str, head: str) -> list[Ignored]:
    """DeepSeek's MTP layers store the target's embedding and head again; they must be equal to them."""
    if config.family != "deepseek":
        return []
    why = "an MTP layer uses the target's embedding and head"
    ignored = []
    for i in range(config.num_layers):
        own = re.escape(_deepseek_prefix(prefix, target.num_layers, i))
        embedding = f"{prefix}embed_tokens.weight"
        ignored.append(Ignored(rf"{own}\.embed_tokens\.weight", why, same_as=embedding))
        same_as = embedding if target.tie_embeddings else head
        ignored.append(Ignored(rf"{own}\.shared_head\.head\.weight", why, same_as=same_as))
    return ignored


def export_with_target(
    config: MtpConfig, target: ModelConfig, rules: list[Rule], lead: str
) -> tuple[list[Rule], dict[str, int]]:
    """The way back: rules of the target and of its MTP layers, as they are published in one folder.

    Args:
      config: the MTP layers.
      target: the model that they came with.
      rules: the target's rules; for DeepSeek, its embedding and head also fill the copies that other loaders expect.
      lead: path in front of the MTP layers' parameters.
    """
    copies: dict[str, list[str]] = {}
    if config.family == "deepseek":
        own = [_deepseek_prefix("model.", target.num_layers, i) for i in range(config.num_layers)]
        copies["embedder/embedding"] = [f"{p}.embed_tokens.weight" for p in own]
        head = "embedder/embedding" if target.tie_embeddings else "head/kernel"
        copies.setdefault(head, []).extend(f"{p}.shared_head.head.weight" for p in own)
    found = []
    for rule in rules:
        names = tuple(copies.get(rule.target, ()))
        found.append(Rule(rule.target, rule.sources + names, repeated(rule.transform, 1 + len(names))) if names else rule)
    found += [Rule(lead + r.target, r.sources, r.transform) for r in mtp_rules(config, target.num_layers)]
    return found, {"num_nextn_predict_layers": config.num_layers}


def repeated(inner: Transform, count: int) -> Transform:
    """A parameter that is stored `count` times over, each time as the one tensor of `inner`."""
    return Transform(f"{inner.name}, {count} times", lambda t: inner.join(t[:1]), lambda p: [*inner.split(p)] * count)


def mimo(raw: dict) -> ModelConfig:
    """MiMo-7B: Qwen2 with MTP layers."""
    return dataclasses.replace(hf_config.qwen2(raw), family="mimo", architecture="MiMoForCausalLM")


def qwen3_next(raw: dict) -> ModelConfig:
    """What Qwen3-Next's MTP layer is made of: gated full attention and experts. Not the target (`refuse_hybrid`)."""
    experts = int(get(raw, "num_experts", 0))
    moe = MoEConfig(
        num_experts=experts,
        num_experts_per_token=int(get(raw, "num_experts_per_tok", 10)),
        ffn_size=int(need(raw, "moe_intermediate_size")),
        normalize_weights=bool(get(raw, "norm_topk_prob", True)),
        shared_ffn_size=int(get(raw, "shared_expert_intermediate_size", 0)),
        shared_gate=bool(get(raw, "shared_expert_intermediate_size", 0)),
    )
    rope = raw.get("rope_parameters") or {}
    fraction = float(get(rope, "partial_rotary_factor", get(raw, "partial_rotary_factor", 0.25)))
    plain = {k: v for k, v in raw.items() if k != "partial_rotary_factor"}
    if rope:
        plain["rope_parameters"] = {k: v for k, v in rope.items() if k != "partial_rotary_factor"}
    return hf_config.base(
        plain,
        "qwen3_next",
        "Qwen3NextForCausalLM",
        rope=dataclasses.replace(hf_config.main_rope(plain, 10_000_000.0), fraction=fraction),
        qk_norm=True,
        attention_gate=True,
        norm_plus_one=True,
        moe=moe if experts else None,
    )


def refuse_hybrid(raw: dict) -> ModelConfig:
    """Qwen3-Next as a target: refused."""
    raise ConversionError(
        f"model_type {raw.get('model_type')!r} mixes linear-attention (gated delta net) layers with full attention and is not "
        "supported as a target; its MTP layer alone can be loaded as a draft, with the configuration of a target"
    )


def has_hybrid_mtp(folder: Path) -> bool:
    """Whether a folder is a Qwen3-Next checkpoint."""
    file = folder / "config.json"
    return file.exists() and hf_config.read_json(file).get("model_type") == "qwen3_next"


def check_sizes(folder: Path, layers: ModelConfig, target: ModelConfig) -> None:
    """Raises ConversionError unless MTP layers have a target's width and vocabulary."""
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(layers, name), getattr(target, name)
        if ours != theirs:
            raise ConversionError(f"{folder}: its MTP layer belongs to another model: {name} is {ours}, the target's {theirs}")


def open_hybrid_mtp(folder: Path, target: ModelConfig) -> tuple[MtpConfig, TensorSource, list[Rule], list[Ignored]]:
    """The MTP layer of a Qwen3-Next checkpoint as a draft for `target`.

    Raises:
      ConversionError: there is none, or it belongs to another model.
    """
    layers, tensors = qwen3_next(hf_config.read_json(folder / "config.json")), open_tensors(folder)
    check_sizes(folder, layers, target)
    config = find_mtp(layers, tensors)
    if config is None:
        raise ConversionError(f"{folder} holds no MTP layer: expected tensors that begin with mtp.")
    why = "the target's own weights: only the MTP layer is converted"
    return config, tensors, mtp_rules(config, layers.num_layers), [Ignored(r"model\..*", why), Ignored(r"lm_head\.weight", why)]


hf_config.FAMILIES |= {"mimo": mimo, "qwen3_next": refuse_hybrid}
