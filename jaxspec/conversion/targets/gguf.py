"""GGUF metadata → `ModelConfig`, GGUF tensor names → rules. One entry in `FAMILIES` for each ``general.architecture``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config import ConfigError, ModelConfig, MoEConfig, RopeConfig
from jaxspec.conversion.mapping import COPY, TRANSPOSE, Ignored, Rule, Transform, concatenate, shifted
from jaxspec.conversion.targets import gguf_tokenizer
from jaxspec.conversion.targets.hf import fuse_qkv, regroup_qkv
from jaxspec.conversion.targets.hf_config import scaled_context, yarn_mscale
from jaxspec.files.errors import ConversionError
from jaxspec.files.gguf_reader import GGUFReader
from jaxspec.files.values import check_config
from jaxspec.models.layers import rope_frequencies

FREQUENCIES = "rope_freqs.weight"


class Metadata:
    """Keys below ``{architecture}.``; a missing one without default is an error that names it."""

    def __init__(self, reader: GGUFReader):
        self.all, self.file = reader.metadata, reader.file
        self.architecture = str(self.all.get("general.architecture"))

    def need(self, key: str) -> Any:
        """A key that must be there."""
        name = f"{self.architecture}.{key}"
        if name not in self.all:
            raise ConversionError(f"{self.file}: metadata key {name} is missing")
        return self.all[name]

    def get(self, key: str, default: Any = None) -> Any:
        """A key with a default."""
        return self.all.get(f"{self.architecture}.{key}", default)

    def uniform(self, key: str, default: Any = None) -> int:
        """A number that may be stored per layer, but must be the same in all."""
        value = self.need(key) if default is None else self.get(key, default)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) != 1:
            raise ConversionError(f"{self.file}: {self.architecture}.{key} differs between layers, which is not supported")
        return int(values.pop())


def rope(meta: Metadata, reader: GGUFReader, head_dim: int) -> RopeConfig:
    """Rope from metadata; Llama 3's scaling is stored as a tensor of divisors and recognised from it."""
    if meta.get("rope.dimension_count", head_dim) != head_dim:
        raise ConversionError(f"{meta.file}: rope over {meta.get('rope.dimension_count')} of {head_dim} channels")
    if any(name.startswith("rope_factors_") for name in reader.info):
        raise ConversionError(f"{meta.file}: longrope scaling is not supported")
    plain = RopeConfig(theta=float(meta.get("rope.freq_base", 10000.0)))
    if FREQUENCIES in reader.info:
        return llama3_rope(reader.read(FREQUENCIES), plain, head_dim, meta.file)
    kind = meta.get("rope.scaling.type", "none")
    factor = float(meta.get("rope.scaling.factor", meta.get("rope.scale_linear", 1.0)))
    if kind == "none" or factor in (0.0, 1.0):
        return plain
    if kind == "linear":
        return dataclasses.replace(plain, kind="linear", factor=factor)
    if kind == "yarn":
        original = int(meta.need("rope.scaling.original_context_length"))
        return dataclasses.replace(
            plain, kind="yarn", factor=factor, original_max_positions=original, attention_factor=yarn_mscale(factor, 1.0)
        )
    raise ConversionError(f"{meta.file}: rope scaling {kind!r} is not supported; supported: none, linear, yarn")


def llama3_rope(divisors: np.ndarray, plain: RopeConfig, head_dim: int, file: Path) -> RopeConfig:
    """The llama3 rescaling whose divisors these are (Llama 3.1: low 1, high 4, original context 8192)."""
    base = np.asarray(rope_frequencies(plain, head_dim))
    candidate = dataclasses.replace(plain, kind="llama3", factor=float(divisors.max()), original_max_positions=8192)
    if not np.allclose(base / np.asarray(rope_frequencies(candidate, head_dim)), divisors, rtol=1e-3):
        raise ConversionError(f"{file}: {FREQUENCIES} is not a llama3 rope scaling with an original context of 8192")
    return candidate


END_TOKENS = {
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<|endofturn|>",
    "<EOT>",
    "_<EOT>",
    "<|return|>",
    "<|call|>",
    "<｜end▁of▁sentence｜>",
}
"""Control tokens that end a text, a turn or a message under whatever key a file has them, or under none."""


def stop_ids(meta: Metadata) -> tuple[int, ...]:
    """End of text, of turn and of message: as far as the file names them, then control tokens of those names.

    The token that the file calls its unknown one does not count (SmolLM2's ``<|endoftext|>``, which ends nothing there).
    """
    ids = [meta.all.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens, kinds = (meta.all.get(f"tokenizer.ggml.{key}") or () for key in ("tokens", "token_type"))
    unknown = meta.all.get("tokenizer.ggml.unknown_token_id")
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if token in END_TOKENS and kind in (gguf_tokenizer.CONTROL, gguf_tokenizer.USER_DEFINED) and i != unknown:
            ids.append(i)
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def base(meta: Metadata, reader: GGUFReader, family: str, architecture: str, **over: Any) -> ModelConfig:
    """What all architectures share; `over` sets what is special."""
    heads, hidden = meta.uniform("attention.head_count"), int(meta.need("embedding_length"))
    head_dim = int(meta.get("attention.key_length", hidden // heads))
    embedding = reader.info.get("token_embd.weight")
    if embedding is None:
        raise ConversionError(f"{meta.file}: tensor token_embd.weight is missing")
    values = dict(
        family=family,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        num_layers=int(meta.need("block_count")),
        num_heads=heads,
        num_kv_heads=meta.uniform("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn_size=meta.uniform("feed_forward_length"),
        max_positions=int(meta.need("context_length")),
        # Stored as float32: the shortest decimal of that number is what the model's config.json said.
        norm_eps=float(str(np.float32(meta.need("attention.layer_norm_rms_epsilon")))),
        tie_embeddings="output.weight" not in reader.info,
        qkv_bias="blk.0.attn_q.bias" in reader.info,
        out_bias="blk.0.attn_output.bias" in reader.info,
        bos_token_id=meta.all.get("tokenizer.ggml.bos_token_id"),
        stop_token_ids=stop_ids(meta),
        architecture=architecture,
    )
    if "rope" not in over:
        values["rope"] = rope(meta, reader, head_dim)
    values |= over
    if values.get("rope_local") is None:  # Gemma 3 scales some layers alone and names its whole context
        original = meta.get("rope.scaling.original_context_length")
        values["max_positions"] = scaled_context(values["rope"], values["max_positions"], original)
    try:
        return ModelConfig(**values)
    except ConfigError as error:
        raise ConversionError(f"{meta.file}: {error}") from None


def llama(meta: Metadata, reader: GGUFReader) -> ModelConfig:
    """Llama, SmolLM2, TinyLlama, and Mistral's files, which call themselves llama."""
    if meta.get("expert_count", 0):
        raise ConversionError(f"{meta.file}: a mixture of experts of the llama architecture (Mixtral) is not supported")
    return base(meta, reader, "llama", "LlamaForCausalLM")


def qwen2(meta: Metadata, reader: GGUFReader) -> ModelConfig:
    """Qwen2 and 2.5."""
    return base(meta, reader, "qwen2", "Qwen2ForCausalLM")


def qwen3(meta: Metadata, reader: GGUFReader) -> ModelConfig:
    """Qwen3."""
    return base(meta, reader, "qwen3", "Qwen3ForCausalLM", qk_norm=True)


def qwen3_moe(meta: Metadata, reader: GGUFReader) -> ModelConfig:
    """Qwen3-MoE; layers with a plain MLP have ffn_gate instead of ffn_gate_inp."""
    layers = int(meta.need("block_count"))
    moe = MoEConfig(
        num_experts=int(meta.need("expert_count")),
        num_experts_per_token=int(meta.need("expert_used_count")),
        ffn_size=int(meta.need("expert_feed_forward_length")),
        dense_layers=tuple(i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" not in reader.info),
    )
    ffn = meta.get("feed_forward_length", moe.ffn_size)
    return base(meta, reader, "qwen3_moe", "Qwen3MoeForCausalLM", qk_norm=True, moe=moe, ffn_size=int(ffn))


def phi3(meta: Metadata, reader: GGUFReader) -> ModelConfig:
    """Phi-3 with plain rope."""
    window = meta.get("attention.sliding_window") or None
    layers = int(meta.need("block_count"))
    return base(meta, reader, "phi3", "Phi3ForCausalLM", windows=(window,) * layers)


def gemma(meta: Metadata, reader: GGUFReader, family: str, architecture: str, pattern: int, big: int, **over) -> ModelConfig:
    """What Gemma 2 and 3 share; `big` is the layer count of the 27B model, whose attention scale is another."""
    layers, hidden = int(meta.need("block_count")), int(meta.need("embedding_length"))
    heads = meta.uniform("attention.head_count")
    head_dim = int(meta.need("attention.key_length"))
    window = int(meta.need("attention.sliding_window"))
    return base(
        meta,
        reader,
        family,
        architecture,
        windows=tuple(window if (i + 1) % pattern else None for i in range(layers)),
        activation="gelu_pytorch_tanh",
        norm_plus_one=True,
        sandwich_norms=True,
        embedding_scale=float(hidden) ** 0.5,
        attention_scale=float(hidden // heads if layers == big else head_dim) ** -0.5,
        **over,
    )


def gemma2(meta: Metadata, reader: GGUFReader) -> ModelConfig:
    """Gemma 2."""
    caps = dict(
        attention_softcap=float(meta.get("attn_logit_softcapping", 50.0)),
        logit_softcap=float(meta.get("final_logit_softcapping", 30.0)),
    )
    return gemma(meta, reader, "gemma2", "Gemma2ForCausalLM", 2, 46, **caps)


def gemma3(meta: Metadata, reader: GGUFReader) -> ModelConfig:
    """Gemma 3, text model."""
    local = RopeConfig(theta=float(meta.get("rope.freq_base_swa", 10000.0)))
    pattern = int(meta.get("attention.sliding_window_pattern", 6))
    return gemma(meta, reader, "gemma3", "Gemma3ForCausalLM", pattern, 62, qk_norm=True, rope_local=local)


FAMILIES: dict[str, Callable[[Metadata, GGUFReader], ModelConfig]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3moe": qwen3_moe,
    "phi3": phi3,
    "gemma2": gemma2,
    "gemma3": gemma3,
}


def unpermuted_qkv(config: ModelConfig) -> Transform:
    """`fuse_qkv` for llama files: their q and k rows pair neighbouring channels, ours the two halves of a head."""
    inner = fuse_qkv(config)

    def halves(x: np.ndarray, heads: int) -> np.ndarray:
        return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    def neighbours(x: np.ndarray, heads: int) -> np.ndarray:
        return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    H, K = config.num_heads, config.num_kv_heads

    def split(p: np.ndarray) -> list[np.ndarray]:
        q, k, v = inner.split(p)
        return [neighbours(q, H), neighbours(k, K), v]

    return Transform("unpermute and fuse q, k, v", lambda t: inner.join([halves(t[0], H), halves(t[1], K), t[2]]), split)


def stacked_gate_up(config: ModelConfig) -> Transform:
    """Experts' gate and up, each [X, F, E] → [X, E, 2F]."""
    F = config.moe.ffn_size
    return Transform(
        "concatenate experts",
        lambda t: np.concatenate([x.swapaxes(1, 2) for x in t], axis=-1),
        lambda p: [x.swapaxes(1, 2) for x in np.split(p, [F], axis=-1)],
    )


SWAP = Transform("transpose experts", lambda t: t[0].swapaxes(1, 2), lambda p: [p.swapaxes(1, 2)])
NORMS = (
    ("input_norm", "attn_norm"),
    ("post_attention_norm", "post_attention_norm"),
    ("mlp_norm", "ffn_norm"),
    ("post_mlp_norm", "post_ffw_norm"),
)


def layer_rules(config: ModelConfig, i: int) -> list[Rule]:
    """Rules of layer `i`."""
    ours, theirs, F = f"layers/{i}", f"blk.{i}", config.ffn_size
    norm = shifted(COPY, 1.0) if config.norm_plus_one else COPY
    names = NORMS if config.sandwich_norms else (NORMS[0], NORMS[2])
    rules = [Rule(f"{ours}/{a}/scale", (f"{theirs}.{b}.weight",), norm) for a, b in names]
    if config.family == "phi3":
        rules.append(Rule(f"{ours}/attention/qkv/kernel", (f"{theirs}.attn_qkv.weight",), regroup_qkv(config)))
    else:
        transform = unpermuted_qkv(config) if config.family == "llama" else fuse_qkv(config)
        for part, leaf in (("weight", "kernel"), ("bias", "bias"))[: 1 + config.qkv_bias]:
            qkv = tuple(f"{theirs}.attn_{x}.{part}" for x in "qkv")
            rules.append(Rule(f"{ours}/attention/qkv/{leaf}", qkv, transform))
    rules.append(Rule(f"{ours}/attention/out/kernel", (f"{theirs}.attn_output.weight",), TRANSPOSE))
    if config.out_bias:
        rules.append(Rule(f"{ours}/attention/out/bias", (f"{theirs}.attn_output.bias",), COPY))
    if config.qk_norm:
        rules += [Rule(f"{ours}/attention/{x}_norm/scale", (f"{theirs}.attn_{x}_norm.weight",), norm) for x in "qk"]
    if config.is_moe_layer(i):
        gate_up = tuple(f"{theirs}.ffn_{x}_exps.weight" for x in ("gate", "up"))
        return [
            *rules,
            Rule(f"{ours}/moe/router/kernel", (f"{theirs}.ffn_gate_inp.weight",), TRANSPOSE),
            Rule(f"{ours}/moe/experts/gate_up/kernel", gate_up, stacked_gate_up(config)),
            Rule(f"{ours}/moe/experts/down/kernel", (f"{theirs}.ffn_down_exps.weight",), SWAP),
        ]
    if config.family == "phi3":
        rules.append(Rule(f"{ours}/mlp/gate_up/kernel", (f"{theirs}.ffn_up.weight",), TRANSPOSE))
    else:
        gate_up = tuple(f"{theirs}.ffn_{x}.weight" for x in ("gate", "up"))
        rules.append(Rule(f"{ours}/mlp/gate_up/kernel", gate_up, concatenate(F, F)))
    rules.append(Rule(f"{ours}/mlp/down/kernel", (f"{theirs}.ffn_down.weight",), TRANSPOSE))
    return rules


def model_rules(config: ModelConfig) -> list[Rule]:
    """The table of a GGUF file."""
    rules = [Rule("embedder/embedding", ("token_embd.weight",), COPY)]
    for i in range(config.num_layers):
        rules += layer_rules(config, i)
    norm = shifted(COPY, 1.0) if config.norm_plus_one else COPY
    rules.append(Rule("final_norm/scale", ("output_norm.weight",), norm))
    if not config.tie_embeddings:
        rules.append(Rule("head/kernel", ("output.weight",), TRANSPOSE))
    return rules


IGNORED = (Ignored(r"rope_freqs\.weight", "rope divisors, read into the configuration"),)


def read(file: Path) -> tuple[GGUFReader, ModelConfig]:
    """Opens a file and parses its metadata.

    Raises ConversionError for an architecture that is not supported.
    """
    reader = GGUFReader(file)
    meta = Metadata(reader)
    if int(reader.metadata.get("split.count", 1)) > 1:
        raise ConversionError(f"{file} is one part of a split GGUF; join the parts with llama-gguf-split --merge")
    if meta.architecture not in FAMILIES:
        raise ConversionError(
            f"{file}: GGUF architecture {meta.architecture!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    return reader, check_config(FAMILIES[meta.architecture](meta, reader), file)
