"""Which algorithm there is, which parameters it takes, and how its drafter is built. One entry per algorithm."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from jaxspec.config import ConfigError, ModelConfig, SpecConfig
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.measured import preference, with_measured_tree


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """An algorithm's entry.

    Attributes:
      resolve: (spec as asked for, target's configuration, draft) -> spec: fills in and checks the tree's parameters.
      build: (target, draft, resolved spec) -> (drafter, its parameter tree or None).
      needs_draft: whether a draft must be given.
      draft_help: what to pass as ``draft``, for error messages.
    """

    resolve: Callable[[SpecConfig, ModelConfig, Any], SpecConfig]
    build: Callable[[Any, Any, SpecConfig], tuple[Drafter, Any]]
    needs_draft: bool
    draft_help: str


def _entry(module: str, needs_draft: bool, draft_help: str) -> Algorithm:
    """An entry whose module is imported when it is first used."""

    def resolve(spec: SpecConfig, config: ModelConfig, draft: Any = None) -> SpecConfig:
        spec = with_measured_tree(spec, draft)
        own = getattr(importlib.import_module(module), "resolve_for", None)  # block drafts: the tree follows from the draft
        return importlib.import_module(module).resolve(spec, config) if own is None else own(spec, config, draft)

    def build(target, draft, spec: SpecConfig) -> tuple[Drafter, Any]:
        return importlib.import_module(module).build(target, draft, spec)

    return Algorithm(resolve, build, needs_draft, draft_help)


ALGORITHMS: dict[str, Algorithm] = {
    "NONE": _entry("jaxspec.drafters.plain", False, "nothing"),
    "NGRAM": _entry("jaxspec.drafters.ngram", False, "nothing, or a jaxspec.NgramHistory"),
    "EAGLE": _entry("jaxspec.drafters.eagle", True, "an EAGLE-1/2 head (jaxspec.load_draft)"),
    "EAGLE3": _entry("jaxspec.drafters.eagle", True, "an EAGLE-3 head (jaxspec.load_draft)"),
    "PEAGLE": _entry("jaxspec.drafters.peagle", True, "a parallel EAGLE head (jaxspec.load_draft)"),
    "NEXTN": _entry("jaxspec.drafters.mtp", False, "MTP layers (jaxspec.load_draft), unless the target came with some"),
    "DFLASH": _entry("jaxspec.drafters.dflash", True, "a DFlash draft (jaxspec.load_draft)"),
    "DSPARK": _entry("jaxspec.drafters.dflash", True, "a DSpark draft (jaxspec.load_draft)"),
    "UNO": _entry("jaxspec.drafters.uno", True, "a UNO adapter, a PEFT LoRA (jaxspec.load_draft)"),
    "STANDALONE": _entry("jaxspec.drafters.standalone", True, "a smaller model with the same vocabulary (jaxspec.load)"),
}


def find(name: str) -> tuple[str, Algorithm]:
    """Looks an algorithm up under SGLang's name, in any case. Raises ConfigError with the known names."""
    key = str(name).upper()
    if key not in ALGORITHMS:
        known = ", ".join(n.lower() for n in ALGORITHMS)
        raise ConfigError(f"algorithm={name!r} is not known; known: auto, {known}")
    return key, ALGORITHMS[key]


def choose(algorithm: str, target, draft) -> tuple[str, Any]:
    """Settles the algorithm and the draft.

    "auto" takes what the given draft is for, else of the drafts that came with the target the one that was measured to be
    fastest on this platform (the first one where nothing was measured), else NGRAM.

    Args:
      algorithm: a name or "auto".
      target: the target's `ModelParams`.
      draft: what the user gave: a loaded draft or model, an `NgramHistory`, or None.

    Returns:
      The algorithm's name and the draft to use.

    Raises:
      ConfigError: the draft is for another algorithm, or one is missing.
    """
    own = draft_algorithm(draft) if draft is not None else None
    if str(algorithm).lower() == "auto":
        if own is not None:
            return own, draft
        if not target.drafts:
            return "NGRAM", None
        candidate = max(target.drafts.values(), key=preference)
        return draft_algorithm(candidate), candidate
    name, entry = find(algorithm)
    there = {draft_algorithm(d) for d in target.drafts.values()} if own is None else {own}
    if name == "EAGLE" and "NEXTN" in there and "EAGLE" not in there:
        name, entry = find("NEXTN")  # SGLang says EAGLE for a target that drafts with its own MTP layers, too
    if own is not None and own != name:
        raise ConfigError(f"algorithm={algorithm!r} was asked for, but the given draft is for {own}: {draft!r}")
    if draft is None:
        draft = next((d for d in target.drafts.values() if draft_algorithm(d) == name), None)
    if draft is None and entry.needs_draft:
        raise ConfigError(f"algorithm={algorithm!r} needs draft=…: {entry.draft_help}")
    return name, draft


def draft_algorithm(draft) -> str:
    """The algorithm that an object passed as ``draft`` is for. Raises ConfigError for anything else."""
    config = getattr(draft, "config", None)
    algorithm = "STANDALONE" if isinstance(config, ModelConfig) else getattr(config, "algorithm", None)
    algorithm = getattr(draft, "algorithm", algorithm)
    if algorithm is None:
        raise ConfigError(
            f"draft={type(draft).__name__} is not a draft: pass what jaxspec.load or jaxspec.load_draft returned, or a "
            "jaxspec.NgramHistory"
        )
    return algorithm
