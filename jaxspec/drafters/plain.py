"""Plain decoding as an algorithm: the tree of one node."""

from __future__ import annotations

import dataclasses

from jaxspec.config import ConfigError, ModelConfig, SpecConfig
from jaxspec.drafters.base import Drafter


def resolve(spec: SpecConfig, config: ModelConfig) -> SpecConfig:
    """Plain decoding has no tree. Raises ConfigError when one is asked for."""
    del config
    given = [n for n in ("num_steps", "topk", "num_draft_tokens") if getattr(spec, n) is not None]
    if given:
        raise ConfigError(f"algorithm='none' drafts nothing: leave {', '.join(given)} unset")
    return dataclasses.replace(spec, num_steps=None, topk=None, num_draft_tokens=None)


def build(target, draft, spec: SpecConfig) -> tuple[Drafter, None]:
    """The base drafter, without parameters."""
    del target, draft, spec
    return Drafter(), None
