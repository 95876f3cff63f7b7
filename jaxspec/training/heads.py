"""The kinds of heads that can be trained, by name; a kind's module is imported when it is asked for."""

from __future__ import annotations

import importlib
from types import ModuleType

from jaxspec.config import ConfigError

MODULES = {
    "eagle3": "jaxspec.training.eagle3",
    "eagle": "jaxspec.training.eagle",
    "mtp": "jaxspec.training.mtp",
    "dflash": "jaxspec.training.dflash",
    "dspark": "jaxspec.training.dspark",
    "uno": "jaxspec.training.uno",
    "standalone": "jaxspec.training.standalone",
}


def head_module(name: str) -> ModuleType:
    """The module of a kind of head.

    It has ``build(target: ModelConfig, **options) -> Objective``, ``OPTIONS: dict[str, Option]``, ``LEARNING_RATE: float``
    (AdamW's peak) and, where it differs from 0, ``WEIGHT_DECAY: float``.

    Raises:
      ConfigError: no such kind.
    """
    if name not in MODULES:
        raise ConfigError(f"there is no head {name!r} to train; known: {', '.join(MODULES)}")
    return importlib.import_module(MODULES[name])
