"""Draft formats: each registers how it is recognised, its shapes and the name under which its configuration is stored."""

from __future__ import annotations

from jaxspec.conversion import eagle, sources, store
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.drafters.eagle_model import param_shapes as eagle_shapes

store.CONFIG_TYPES["eagle"] = EagleConfig
sources.SHAPES[EagleConfig] = eagle_shapes
sources.RECOGNISERS.insert(1, sources.Recogniser("EAGLE draft head", eagle.matches, eagle.open_eagle))
