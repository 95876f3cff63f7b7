"""What drafts: algorithm, draft and parameters of a call or an engine, settled once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxspec.config import SpecConfig
from jaxspec.drafters import registry
from jaxspec.drafters.base import Drafter
from jaxspec.loading import load_draft
from jaxspec.round import Program
from jaxspec.runtime import own_settings
from jaxspec.verify import Verifier


@dataclasses.dataclass(frozen=True)
class Speculation:
    """What a call drafts with: the algorithm's name, the resolved parameters, the drafter and its parameter tree, the draft
    as it was given."""

    name: str
    spec: SpecConfig
    program: Program
    draft_tree: Any
    draft: Any

    @classmethod
    @own_settings()
    def choose(cls, params, draft, algorithm: str | Drafter, spec: SpecConfig | None, **tree: int | None) -> Speculation:
        """Settles all of it. Raises ConfigError where draft, algorithm and parameters do not fit each other."""
        if isinstance(draft, str | Path):
            draft = load_draft(draft, params)
        spec = dataclasses.replace(spec or SpecConfig(), **{name: n for name, n in tree.items() if n is not None})
        name, spec, drafter, draft_tree = registry.prepare(algorithm, params, draft, spec)
        verifier = Verifier(spec.verification, spec.accept_threshold_single, spec.accept_threshold_acc)
        return cls(name, spec, Program(params.config, drafter, verifier), draft_tree, draft)
