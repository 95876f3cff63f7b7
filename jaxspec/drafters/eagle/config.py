"""Static description of an EAGLE draft head: one dataclass with flags for every published variant."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from jaxspec.config import ConfigError, ModelConfig, check_ids
from jaxspec.drafters.options import WindowOptions
from jaxspec.models.decoder import FINAL_NORM
from jaxspec.trees.static_tree import StaticTree


@dataclass(frozen=True)
class EagleOptions(WindowOptions):
    """What can be set for EAGLE heads, beside the window.

    Attributes:
      token_map: FR-Spec: target ids that an EAGLE-1/2 draft may propose, or a .pt, .npy or .json file of them.
      static_tree: EAGLE-1's fixed tree: words of ranks, rank paths, or a `jaxspec.trees.static_tree.StaticTree`.
    """

    token_map: str | tuple[int, ...] | None = None
    static_tree: str | StaticTree | tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.token_map is not None and not isinstance(self.token_map, tuple):
            is_file = isinstance(self.token_map, (str, os.PathLike))
            object.__setattr__(self, "token_map", os.fspath(self.token_map) if is_file else tuple(self.token_map))
        if self.static_tree is not None:
            object.__setattr__(self, "static_tree", StaticTree.of(self.static_tree))

    @property
    def settles_tree(self) -> bool:
        """A static tree is one."""
        return self.static_tree is not None


@dataclass(frozen=True)
class PEagleOptions(WindowOptions):
    """What can be set for parallel EAGLE heads, which draft a chain over their own vocabulary: the window."""


@dataclass(frozen=True)
class EagleConfig:
    """An EAGLE-1/2 head (Li et al. 2024a, b), an EAGLE-3 head (Li et al. 2025) or one of their descendants.

    Attributes:
      layers: shapes of the head's transformer layers: width, heads, rotary base, biases, q/k norms, number of layers.
        Layer 0 of an EAGLE-3 head reads twice the width: embedding and hidden vector side by side.
      fused: EAGLE-3's form. ``fc`` projects the target's taps once, the first layer reads [embedding ; hidden], and a
        final norm stands before the head. False: EAGLE-1/2's, where ``fc`` mixes embedding and feature at every step and
        neither input norm nor final norm exists.
      taps: which target features the head reads (`models.decoder.decode`): hidden-state indices, or `FINAL_NORM`.
      target_hidden_size: width of one tap.
      draft_vocab_size: rows of the head; smaller than the target's vocabulary when `reduced_vocab`.
      reduced_vocab: draft ids differ from target ids; the parameter ``target_ids`` translates.
      fc_bias: whether ``fc`` has a bias.
      own_embedding: the head has its own embedding table; else it reads the target's, without the target's scale
        (Gemma's), because the published heads were trained on the plain table.
      own_head: the head has its own output matrix; else it uses the target's.
      fc_norm: one RMS norm per tap before ``fc`` (EAGLE-3.1).
      norm_before_fc: one RMS norm over all taps before ``fc`` (Speculators).
      norm_before_residual: layer 0 adds to the normed hidden vector instead of the plain one (Speculators).
      norm_output: the *normed* output is what the next step is fed (EAGLE-3.1).
      mask_token_id: P-EAGLE: the token of the slots that are drafted in parallel; None for all others.
      layout: naming of the checkpoint that it came from, for the way back: "eagle", "sglang", "speculators", "deepspec".
    """

    layers: ModelConfig
    fused: bool
    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    reduced_vocab: bool = False
    fc_bias: bool = False
    own_embedding: bool = False
    own_head: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None
    layout: str = "eagle"

    def __post_init__(self):
        if not self.own_embedding and self.layers.hidden_size != self.target_hidden_size:
            raise ConfigError(
                f"a draft of width {self.layers.hidden_size} cannot read the embedding of a target of width "
                f"{self.target_hidden_size}: it needs an embedding of its own"
            )
        if not self.own_head and self.layers.hidden_size != self.target_hidden_size:
            raise ConfigError(
                f"a draft of width {self.layers.hidden_size} cannot use the head of a target of width "
                f"{self.target_hidden_size}: it needs a head of its own"
            )
        if not self.fused and self.taps != (FINAL_NORM,):
            raise ConfigError(f"an EAGLE-1/2 head reads the final norm's output, not taps {self.taps}")
        if self.mask_token_id is not None:
            check_ids([self.mask_token_id], self.layers.vocab_size, "mask_token_id, a row of the embedding,")

    @property
    def algorithm(self) -> str:
        """SGLang's name; "PEAGLE" for heads that draft in parallel, which SGLang does not have."""
        if self.mask_token_id is not None:
            return "PEAGLE"
        return "EAGLE3" if self.fused else "EAGLE"

    @property
    def hidden_size(self) -> int:
        """Width of the head and of its recurrent state."""
        return self.layers.hidden_size

    @property
    def feature_size(self) -> int:
        """Width of what the target hands over: all taps side by side."""
        return len(self.taps) * self.target_hidden_size

    def to_json(self) -> dict:
        """Plain JSON types; `from_json` gives the same config back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> EagleConfig:
        """The inverse of `to_json`. Raises ConfigError for unknown keys."""
        data = dict(data)
        unknown = set(data) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"unknown keys in an EAGLE config: {sorted(unknown)}")
        return cls(**data | {"layers": ModelConfig.from_json(data["layers"]), "taps": tuple(data["taps"])})


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The residual stream entering layers 2, L // 2 and L - 3 of the target (EAGLE-3's own code; SGLang's default)."""
    return (2, num_layers // 2, num_layers - 3)


def check_target(config: EagleConfig, target: ModelConfig) -> None:
    """Raises ConfigError unless the head reads what this target gives."""
    if config.target_hidden_size != target.hidden_size:
        raise ConfigError(
            f"the draft was made for a target of hidden size {config.target_hidden_size}, this one has {target.hidden_size}"
        )
    if config.layers.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft was made for a vocabulary of {config.layers.vocab_size} tokens, the target has {target.vocab_size}"
        )
    beyond = [t for t in config.taps if not FINAL_NORM <= t <= target.num_layers]
    if beyond:
        raise ConfigError(
            f"the draft reads hidden states {config.taps}, but the target has {target.num_layers} layers: {beyond} do not exist"
        )
