"""The kinds of heads that can be trained, by name; a kind's module is imported when it is asked for."""

from __future__ import annotations

import importlib
from types import ModuleType

from jaxspec.config import ConfigError
from jaxspec.drafters.kinds import KINDS


def modules() -> dict[str, str]:
    """The modules of all kinds of draft that can be trained, by the name that ``python -m jaxspec.train`` takes."""
    return {kind.head: kind.training for kind in KINDS.values() if kind.head is not None and kind.training is not None}


def head_module(name: str) -> ModuleType:
    """The module of a kind of head.

    It has ``build(target: ModelConfig, **options) -> Objective``, ``OPTIONS: dict[str, Option]``, ``LEARNING_RATE: float``
    (AdamW's peak) and, where it differs from 0, ``WEIGHT_DECAY: float``.

    Raises:
      ConfigError: no such kind.
    """
    found = modules()
    if name not in found:
        raise ConfigError(f"there is no head {name!r} to train; known: {', '.join(found)}")
    return importlib.import_module(found[name])
