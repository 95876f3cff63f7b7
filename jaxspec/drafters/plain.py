"""Plain decoding as an algorithm: the tree of one node."""

from __future__ import annotations

from jaxspec.config import SpecConfig
from jaxspec.drafters.base import Drafter


def build(target, draft, spec: SpecConfig) -> tuple[Drafter, None]:
    """The base drafter, without parameters."""
    del target, draft, spec
    return Drafter(), None
