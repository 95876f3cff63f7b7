"""Parameters of speculation by name, wherever they belong."""

from __future__ import annotations

import dataclasses

from jaxspec import SpecConfig

SHARED = {field.name for field in dataclasses.fields(SpecConfig)}


def spec_of(**given) -> SpecConfig:
    """A `SpecConfig` in which everything that it has no field for is an option of the algorithm's."""
    options = {name: value for name, value in given.items() if name not in SHARED}
    return SpecConfig(**{name: value for name, value in given.items() if name in SHARED}, options=options or None)
