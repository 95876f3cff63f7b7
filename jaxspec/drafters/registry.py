"""From what a user asks for to a drafter: which kind of draft it is, its parameters in full, the drafter itself."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.config import ConfigError, SpecConfig
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.kinds import KINDS, TREE, Kind, algorithm_of, imported
from jaxspec.drafters.measured import preference, with_measured_tree
from jaxspec.drafters.options import make_options


def find(algorithm: str | Drafter) -> Kind:
    """Looks a kind of draft up: under SGLang's name in any case, or as a drafter that is given itself.

    Raises ConfigError with the known names.
    """
    if isinstance(algorithm, Drafter):
        return kind_of_drafter(algorithm)
    key = str(algorithm).upper()
    if key not in KINDS:
        known = ", ".join(n.lower() for n in KINDS)
        raise ConfigError(f"algorithm={algorithm!r} is not known; known: auto, {known}, or an instance of a Drafter")
    return KINDS[key]


def kind_of_drafter(drafter: Drafter) -> Kind:
    """The record of a drafter that somebody made: it has settled its tree, and its parameters are what is given as draft."""

    def build(target, draft, spec: SpecConfig) -> tuple[Drafter, Any]:
        del target, spec
        return drafter, getattr(draft, "tree", draft)

    return Kind(
        drafter.name,
        build,
        tree=(),
        tree_help="the drafter itself says what it drafts",
        verifications=drafter.verifications,
        needs_draft=False,
    )


def choose(algorithm: str | Drafter, target, draft) -> tuple[str | Drafter, Any]:
    """Settles the algorithm and the draft.

    "auto" takes what the given draft is for, else of the drafts that came with the target the one that was measured to be
    fastest on this platform (the first one where nothing was measured), else NGRAM.

    Args:
      algorithm: a name, "auto", or a drafter, which is kept, and so is its draft.
      target: the target's `ModelParams`.
      draft: what the user gave: a loaded draft or model, an `NgramHistory`, or None; for a drafter its parameter tree.

    Returns:
      The algorithm's name (or the drafter), which `find` takes, and the draft to use.

    Raises:
      ConfigError: the draft is for another algorithm, or one is missing.
    """
    if isinstance(algorithm, Drafter):
        return algorithm, draft
    own = draft_algorithm(draft) if draft is not None else None
    if str(algorithm).lower() == "auto":
        if own is not None:
            return own, draft
        if not target.drafts:
            return "NGRAM", None
        candidate = max(target.drafts.values(), key=preference)
        return draft_algorithm(candidate), candidate
    kind = find(algorithm)
    there = {draft_algorithm(d) for d in target.drafts.values()} if own is None else {own}
    if kind.name not in there:
        kind = next((k for k in KINDS.values() if kind.name in k.also_called and k.name in there), kind)
    if own is not None and own != kind.name:
        raise ConfigError(f"algorithm={algorithm!r} was asked for, but the given draft is for {own}: {draft!r}")
    if draft is None:
        draft = next((d for d in target.drafts.values() if draft_algorithm(d) == kind.name), None)
    if draft is None and kind.needs_draft:
        raise ConfigError(f"algorithm={algorithm!r} needs draft=…: {kind.draft_help}")
    return kind.name, draft


def draft_algorithm(draft) -> str:
    """The algorithm that an object passed as ``draft`` is for. Raises ConfigError for anything else."""
    algorithm = getattr(draft, "algorithm", None) or algorithm_of(getattr(draft, "config", None))
    if algorithm is None:
        raise ConfigError(
            f"draft={type(draft).__name__} is not a draft: pass what jaxspec.load or jaxspec.load_draft returned, or a "
            "jaxspec.NgramHistory"
        )
    return algorithm


def resolve(algorithm: str | Drafter, spec: SpecConfig, config, draft=None) -> SpecConfig:
    """The parameters in full: options as an instance of the algorithm's, the tree filled in, all of it checked.

    Resolving twice changes nothing more.

    Args:
      algorithm: what `choose` returned.
      spec: as asked for.
      config: the target's `ModelConfig`.
      draft: what `choose` returned.

    Raises:
      ConfigError: a parameter or an option that the algorithm does not have, or a value that cannot work.
    """
    kind = find(algorithm)
    check_fields(kind, spec)
    spec = dataclasses.replace(spec, options=make_options(kind.options, spec.options, kind.name))
    spec = with_measured_tree(spec, draft)
    if kind.resolve is not None:
        spec = imported(kind.resolve)(spec, config, draft)
    if spec.verification != "target_only" and (spec.options.settles_tree or spec.topk not in (None, 1)):
        static = ", without a static tree" if spec.options.settles_tree else ""
        raise ConfigError(f"{verification_field(spec)} checks chains only: topk={spec.topk} must be 1{static}")
    return spec


def verification_field(spec: SpecConfig) -> str:
    """The field that asks for a verifier other than the usual one."""
    return "use_block_verification" if spec.use_block_verification else "use_rejection_sampling"


def check_fields(kind: Kind, spec: SpecConfig) -> None:
    """Raises ConfigError for shared parameters that a kind of draft cannot honour."""
    name, hint = kind.name.lower(), f" ({kind.tree_help})" if kind.tree_help else ""
    given = [field for field in TREE if getattr(spec, field) is not None and field not in kind.tree]
    if given:
        takes = f"{' and '.join(kind.tree)} alone" if kind.tree else f"none of {', '.join(TREE)}"
        raise ConfigError(f"algorithm={name!r} takes {takes}: leave {' and '.join(given)} unset{hint}")
    if spec.verification != "target_only" and spec.verification not in kind.verifications:
        raise ConfigError(
            f"{verification_field(spec)} needs a chain with draft probabilities, which algorithm={name!r} does not have: "
            "leave it unset"
        )
    lossy = [field for field in ("accept_threshold_single", "accept_threshold_acc") if getattr(spec, field) < 1]
    if lossy and "target_only" not in kind.verifications:
        raise ConfigError(f"{lossy[0]}={getattr(spec, lossy[0])} has no effect with algorithm={name!r}: leave it unset{hint}")


def build(algorithm: str | Drafter, target, draft, spec: SpecConfig) -> tuple[Drafter, Any]:
    """The drafter and its parameter tree.

    Args:
      algorithm, draft: what `choose` returned.
      target: the target's `ModelParams`.
      spec: what `resolve` returned.

    Raises:
      ConfigError: the draft was made for another target.
    """
    return imported(find(algorithm).build)(target, draft, spec)


def prepare(algorithm: str | Drafter, params, draft, spec: SpecConfig) -> tuple[str, SpecConfig, Drafter, Any]:
    """All that an engine asks for: from the user's choice to a drafter.

    Args:
      algorithm: a name, "auto", or a drafter.
      params: the target's `ModelParams`.
      draft: as for `choose`.
      spec: as asked for.

    Returns:
      (the algorithm's name, the parameters in full, the drafter, its parameter tree).

    Raises:
      ConfigError: as `choose`, `resolve` and `build` do.
    """
    algorithm, draft = choose(algorithm, params, draft)
    spec = resolve(algorithm, spec, params.config, draft)
    drafter, tree = build(algorithm, params, draft, spec)
    return find(algorithm).name, spec, drafter, tree
