"""Static description of a UNO adapter: which products of which target it changes, its rank and its scale."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.options import DraftOptions

PRODUCTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("attention", "qkv"): ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    ("attention", "out"): ("o_proj",),
    ("mlp", "gate_up"): ("gate_proj", "up_proj", "gate_up_proj"),
    ("mlp", "down"): ("down_proj",),
}
"""Our fused products → the modules, under Hugging Face names, that an adapter can change in them (Phi-3 fuses its own)."""

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What published UNO adapters change."""

NOISE_KINDS = ("uniform", "hash", "mask")


@dataclass(frozen=True)
class UnoOptions(DraftOptions):
    """What can be set for UNO.

    Attributes:
      noise: what stands in the rows that draft: "uniform" random ids, "hash" (ids that follow from the text alone) or "mask"
        (the adapter's mask token).
      mask_token_id: the mask token, where the adapter's file does not name it; random ids stay below it.
    """

    flag_prefix: ClassVar[str] = "uno_"

    noise: str = "uniform"
    mask_token_id: int | None = None

    def __post_init__(self):
        if self.noise not in NOISE_KINDS:
            raise ConfigError(f"uno_noise={self.noise!r} must be one of {', '.join(NOISE_KINDS)}")


@dataclass(frozen=True)
class UnoConfig:
    """A low-rank adapter (Hu et al. 2021) with which a target drafts for itself (UNO, arXiv 2609.04010).

    Attributes:
      target: the model that it belongs to; only its shapes matter.
      rank: r of every pair of matrices.
      alpha: numerator of the scale.
      rslora: the scale is alpha / sqrt(r) instead of alpha / r.
      modules: which linear layers it changes, in the order of `PRODUCTS`.
      mask_token_id: the token that training put into the rows that draft; random noise stays below it. None if unknown.
      base_model: the name of the target that its file gives.
    """

    target: ModelConfig
    rank: int
    alpha: float
    rslora: bool = False
    modules: tuple[str, ...] = MODULES
    mask_token_id: int | None = None
    base_model: str | None = None

    def __post_init__(self):
        if self.rank < 1:
            raise ConfigError(f"an adapter's rank r={self.rank} must be at least 1")
        known = [m for modules in PRODUCTS.values() for m in modules]
        unknown = [m for m in self.modules if m not in known]
        if unknown or not self.modules:
            raise ConfigError(f"an adapter can change {', '.join(known)}; this one changes {', '.join(unknown) or 'nothing'}")
        object.__setattr__(self, "modules", tuple(m for m in known if m in self.modules))
        if self.target.mla is not None or self.target.attention_gate:
            raise ConfigError(f"adapters for the attention of {self.target.family} models are not supported")
        mlp = [m for product, modules in PRODUCTS.items() if product[0] == "mlp" for m in modules if m in self.modules]
        if mlp and self.target.moe is not None:
            raise ConfigError(f"the adapter changes {', '.join(mlp)}, but adapters for experts are not supported")

    @property
    def algorithm(self) -> str:
        """The drafter that uses it."""
        return "UNO"

    @property
    def scale(self) -> float:
        """What the product of both matrices is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def changed(self, product: tuple[str, str]) -> tuple[str, ...]:
        """The modules of one of our products that the adapter changes."""
        return tuple(m for m in PRODUCTS[product] if m in self.modules)

    def to_json(self) -> dict:
        """Plain JSON types; `from_json` gives the same config back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> UnoConfig:
        """The inverse of `to_json`. Raises ConfigError for unknown keys."""
        unknown = set(data) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"unknown keys in a UNO config: {sorted(unknown)}")
        return cls(**data | {"target": ModelConfig.from_json(data["target"]), "modules": tuple(data["modules"])})


def check_target(config: UnoConfig, target: ModelConfig) -> None:
    """Raises ConfigError unless the adapter was made for a target of these shapes."""
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size"):
        own, theirs = getattr(config.target, name), getattr(target, name)
        if own != theirs:
            raise ConfigError(f"the adapter was made for a target with {name}={own}, this one has {theirs}")
