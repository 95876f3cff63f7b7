"""Static description of multi-token-prediction layers: what the published families do differently, as settings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.options import WindowOptions
from jaxspec.models.decoder import FINAL_NORM


@dataclass(frozen=True)
class MtpOptions(WindowOptions):
    """What can be set for MTP layers: the window."""


@dataclass(frozen=True)
class MtpConfig:
    """MTP layers that were trained with a target ("NEXTN"; DeepSeek-V3, arXiv 2412.19437, section 2.2).

    RMS norms hide a wrong choice of `feature_tap` or `recycle_normed`: tokens stay right, only accept lengths fall. The
    defaults of `FAMILIES` are what SGLang and transformers do; measure before changing them.

    Attributes:
      layers: the MTP layers as decoder layers: kind of attention and MLP, width, rotary embedding; `num_layers` of them.
      family: naming of the checkpoint, a key of `FAMILIES`.
      hidden_first: the projection reads [hidden ; embedding], not [embedding ; hidden].
      zero_first_embedding: the pair at position 0 has a zero embedding (SGLang and vLLM for MiMo).
      feature_tap: the target feature that is the hidden half of a pair: `FINAL_NORM`, or the target's number of layers for
        the state before that norm (llama.cpp's choice for DeepSeek and GLM).
      recycle_normed: a further step is fed the layer's output behind its own norm; else the one before it (vLLM for
        DeepSeek).
      chain_states: of several chained layers each reads the state of the one before (DeepSeek-V3, transformers); else
        all read the target's feature (SGLang for MiMo-V2).
    """

    layers: ModelConfig
    family: str
    hidden_first: bool = False
    zero_first_embedding: bool = False
    feature_tap: int = FINAL_NORM
    recycle_normed: bool = True
    chain_states: bool = True

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ConfigError(f"unknown MTP family {self.family!r}; known: {', '.join(FAMILIES)}")

    @property
    def algorithm(self) -> str:
        """SGLang's name."""
        return "NEXTN"

    @property
    def num_layers(self) -> int:
        """MTP layers in the checkpoint."""
        return self.layers.num_layers

    def to_json(self) -> dict:
        """Plain JSON types; `from_json` gives the same config back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> MtpConfig:
        """The inverse of `to_json`. Raises ConfigError for unknown keys."""
        data = dict(data)
        unknown = set(data) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"unknown keys in an MTP config: {sorted(unknown)}")
        return cls(**data | {"layers": ModelConfig.from_json(data["layers"])})


FAMILIES: dict[str, dict] = {"deepseek": {}, "mimo": {"hidden_first": True, "zero_first_embedding": True}, "qwen3_next": {}}
"""Family → what differs from `MtpConfig`'s defaults."""


def mtp_config(target: ModelConfig, family: str, num_layers: int) -> MtpConfig:
    """The MTP layers of a family as they come with a target: its decoder layers, full attention, experts where it has some."""
    moe = target.moe and dataclasses.replace(target.moe, dense_layers=())
    layers = dataclasses.replace(
        target, num_layers=num_layers, windows=(None,) * num_layers, rope_local=None, moe=moe, num_mtp_layers=0
    )
    return MtpConfig(layers, family, **FAMILIES.get(family, {}))
