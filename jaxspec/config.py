"""Static configuration: frozen, hashable dataclasses, so that they can be static arguments of ``jax.jit``.

`ModelConfig` describes a transformer whatever file it came from; `jaxspec.conversion` fills it. `SpecConfig` holds the
parameters of speculation under SGLang's names. What a request asks of the sampler is in `jaxspec.sampling_params`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.plain import plain

MAX_LAYERS = 1024
"""No transformer has as many: a damaged number of layers is refused before anything is made for each."""

MAX_TREE = 4096
"""Bound of num_steps, topk and num_draft_tokens: a verify pass of more tokens costs more than it can save."""
MAX_PAGE = 1 << 16
"""Positions of a page."""
MAX_PREFILL = 1 << 20
"""Prompt positions that one program takes in."""


class ConfigError(ValueError):
    """A parameter or a combination of parameters that cannot work; the message says which, its value and the bound."""


def check_ids(ids: Iterable[int], vocab_size: int, what: str) -> None:
    """Checks token ids where they are made: a device reads the embedding's last row for one beyond it, without a word.

    Args:
      ids: whole numbers, from a tokenizer or a caller.
      vocab_size: rows of the model's embedding; a tokenizer may know more tokens (added ones), or fewer.
      what: holds the ids, for the error.

    Raises:
      ConfigError: an id without a row.
    """
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise ConfigError(f"{what} holds token id {bad}; the vocabulary has ids 0 to {vocab_size - 1}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, section 3.4) and its published rescalings.

    ``kind`` is ``default``, ``linear`` (positions divided by `factor`), ``llama3`` (wavelength-dependent, Llama 3.1) or
    ``yarn`` (Peng et al. 2023). ``attention_factor`` multiplies cos and sin (YaRN's mscale; 1 otherwise).
    ``interleaved`` pairs neighbouring channels (DeepSeek checkpoints) instead of the two halves. Only the first
    ``fraction`` of a head's channels rotates (Qwen3-Next: a quarter).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    interleaved: bool = False
    fraction: float = 1.0


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts: softmax routing (Qwen3-MoE, DeepSeek-V2) or DeepSeek-V3's sigmoid routing with a correction bias.

    ``scoring`` is "softmax" or "sigmoid"; ``group_score`` ranks a group of experts by its best one ("max") or its two
    best ("top2"). Experts that every token takes are one MLP of ``shared_ffn_size`` (0 for none), weighed by a sigmoid
    with ``shared_gate`` (Qwen3-Next).
    """

    num_experts: int
    num_experts_per_token: int
    ffn_size: int
    dense_layers: tuple[int, ...] = ()
    normalize_weights: bool = True
    scoring: str = "softmax"
    num_groups: int = 1
    num_groups_per_token: int = 1
    shared_ffn_size: int = 0
    shared_gate: bool = False
    routed_scale: float = 1.0
    group_score: str = "max"


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): low-rank queries and a shared latent for keys and values."""

    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    query_rank: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer.

    ``windows[i]`` is layer i's sliding window in positions (a query at p sees keys p-window+1 … p), None for full
    attention; a layer with a window uses ``rope_local`` when that is given (Gemma 3). ``attention_gate`` multiplies the
    attention output by a sigmoid of further columns of the fused projection (Qwen3-Next). ``sandwich_norms`` adds norms
    behind attention and MLP (Gemma 2/3), ``norm_plus_one`` scales by 1 + w. ``embedding_scale`` multiplies embeddings.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    rope_local: RopeConfig | None = None
    windows: tuple[int | None, ...] = ()
    activation: str = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_gate: bool = False
    norm_plus_one: bool = False
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    num_mtp_layers: int = 0
    mtp_family: str | None = None
    bos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    architecture: str = ""

    def __post_init__(self):
        for name, least, most in (
            ("num_layers", 0, MAX_LAYERS),
            ("num_heads", 1, None),
            ("num_kv_heads", 1, None),
            ("head_dim", 1, None),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least or (most is not None and value > most):
                bound = "" if most is None else f" and at most {most}"
                raise ConfigError(f"{name}={str(value)[:80]} must be a whole number of at least {least}{bound}")
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if not self.attention_scale:
            width = self.head_dim if self.mla is None else self.mla.nope_head_dim + self.mla.rope_head_dim
            object.__setattr__(self, "attention_scale", width**-0.5)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if len(self.windows) != self.num_layers:
            raise ConfigError(f"{len(self.windows)} attention windows for num_layers={self.num_layers}")

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that the rotary embedding turns."""
        return int(self.head_dim * self.rope.fraction) if self.mla is None else self.mla.rope_head_dim

    @property
    def key_head_dim(self) -> int:
        """Channels of one cached key head."""
        return self.head_dim if self.mla is None else self.mla.nope_head_dim + self.mla.rope_head_dim

    @property
    def value_head_dim(self) -> int:
        """Channels of one cached value head."""
        return self.head_dim if self.mla is None else self.mla.value_head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer `layer` routes to experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def to_json(self) -> dict:
        """Plain JSON types; `from_json` gives the same config back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> ModelConfig:
        """The inverse of `to_json`. Raises ConfigError for unknown keys."""
        data = dict(data)
        unknown = set(data) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"unknown keys in a model config: {sorted(unknown)}")
        for key, kind in (("rope", RopeConfig), ("rope_local", RopeConfig), ("moe", MoEConfig), ("mla", MLAConfig)):
            if isinstance(data.get(key), dict):
                nested = dict(data[key])
                if "dense_layers" in nested:
                    nested["dense_layers"] = tuple(nested["dense_layers"])
                data[key] = kind(**nested)
        for key in ("windows", "stop_token_ids"):
            if key in data:
                data[key] = tuple(data[key])
        return cls(**data)


@dataclass(frozen=True)
class SpecConfig:
    """Parameters of speculation under SGLang's names (``--speculative-…`` on the command line).

    Which of them an algorithm takes is settled when it is known (`jaxspec.drafters.registry.resolve`).

    Attributes:
      num_steps: draft levels.
      topk: beams per level (SGLang's eagle-topk); 1 drafts a chain.
      num_draft_tokens: nodes that a verify pass checks, the root included.
      accept_threshold_single: accept a draft whose target probability reaches this; 1.0 is lossless.
      accept_threshold_acc: accept a draft of probability p with p / value; 1.0 is lossless.
      use_rejection_sampling: chains drafted by sampling are verified with p / q (Leviathan et al. 2023).
      use_block_verification: whole-block verification (arXiv 2403.10444); implies sampling from the draft.
      options: what only the chosen algorithm has: an instance of its options (`jaxspec.EagleOptions`, `jaxspec.NgramConfig`, …;
        `docs/parameters.md` lists them), or a mapping of option names to values; None for the defaults.
    """

    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    accept_threshold_single: float = 1.0
    accept_threshold_acc: float = 1.0
    use_rejection_sampling: bool = False
    use_block_verification: bool = False
    options: Any = None

    def __post_init__(self):
        for name in ("num_steps", "topk", "num_draft_tokens"):
            value = plain(getattr(self, name))
            object.__setattr__(self, name, value)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and (not whole or not 1 <= value <= MAX_TREE):
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1 and at most {MAX_TREE}, or None")
        for name in ("accept_threshold_single", "accept_threshold_acc"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name}={value} must lie in [0, 1]; 1.0 is lossless")
        if isinstance(self.options, Mapping):
            object.__setattr__(self, "options", dict(self.options))
        elif self.options is not None and not dataclasses.is_dataclass(self.options):
            raise ConfigError(f"options={self.options!r} must be an algorithm's options or a mapping of their names to values")
        lossy = self.accept_threshold_single < 1 or self.accept_threshold_acc < 1
        if lossy and (self.use_rejection_sampling or self.use_block_verification):
            raise ConfigError(
                "acceptance thresholds below 1.0 cannot be combined with rejection sampling or block verification"
            )

    @property
    def verification(self) -> str:
        """Which verifier sampled requests use (`jaxspec.verify.accept`)."""
        if self.use_block_verification:
            return "block"
        return "rejection" if self.use_rejection_sampling else "target_only"


def resolve_tree(spec: SpecConfig, default: tuple[int, int, int], algorithm: str) -> SpecConfig:
    """Fills in num_steps, topk and num_draft_tokens by SGLang's rules: all three given or none.

    Raises:
      ConfigError: only some are given, or the tree has more nodes than there are candidates.
    """
    given = {n: getattr(spec, n) for n in ("num_steps", "topk", "num_draft_tokens")}
    missing = [n for n, v in given.items() if v is None]
    if len(missing) == 3:
        steps, topk, nodes = default
    elif missing == ["num_draft_tokens"] and spec.topk == 1:
        steps, topk, nodes = spec.num_steps, 1, spec.num_steps + 1
    elif missing:
        have = ", ".join(f"{n}={v}" for n, v in given.items() if v is not None)
        raise ConfigError(
            f"{algorithm} takes num_steps, topk and num_draft_tokens together or none of them: {have} given, "
            f"{', '.join(missing)} missing (the default is {'/'.join(map(str, default))})"
        )
    else:
        steps, topk, nodes = given.values()
    if topk == 1 and nodes != steps + 1:
        warnings.warn(
            f"num_draft_tokens={nodes} with topk=1: a chain of num_steps={steps} drafts has {steps + 1} nodes; using that",
            stacklevel=3,
        )
        nodes = steps + 1
    capacity = topk + (steps - 1) * topk**2
    if nodes < 2 or nodes - 1 > capacity:
        raise ConfigError(
            f"num_draft_tokens={nodes} is out of range: with num_steps={steps} and topk={topk} a tree has 2 to "
            f"{capacity + 1} nodes (root + topk + (num_steps - 1) * topk^2 candidates)"
        )
    return dataclasses.replace(spec, num_steps=steps, topk=topk, num_draft_tokens=nodes)
