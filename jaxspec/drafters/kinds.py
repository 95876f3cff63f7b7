"""Every kind of draft, declared once: all that the package knows of an algorithm follows from its record here.

Which parameters it takes and how its drafter is made (`jaxspec.drafters.registry`), the options of the command line
(`jaxspec.cli`), how its drafts are recognised, stored and published (`jaxspec.conversion`), which heads can be trained
(`jaxspec.training.heads`) and measured with random weights (`jaxspec.benchmarking.shapes`).

What lies in heavy modules, or in such as stand above this one, is named as "module:name" and imported when first used.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.dflash.config import DFlashConfig, DFlashOptions, DSparkOptions
from jaxspec.drafters.eagle.config import EagleConfig, EagleOptions, PEagleOptions
from jaxspec.drafters.mtp.config import MtpConfig, MtpOptions
from jaxspec.drafters.ngram.config import NgramConfig
from jaxspec.drafters.options import DraftOptions
from jaxspec.drafters.standalone.config import StandaloneOptions
from jaxspec.drafters.uno.config import UnoConfig, UnoOptions

TREE = ("num_steps", "topk", "num_draft_tokens")
VERIFICATIONS = ("target_only", "rejection", "block")
"""The verifiers: the first takes any tree, the others a chain with draft probabilities."""

Named = str | Callable[..., Any]
"""Something, or where it is: "module:name"."""


def imported(value: Any) -> Any:
    """What a "module:name" stands for; everything else is itself."""
    if not isinstance(value, str):
        return value
    module, _, name = value.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


@dataclasses.dataclass(frozen=True)
class Source:
    """A published layout of a draft.

    Attributes:
      name: what it is, for a list of what is known.
      label: what an opened one is called; "{algorithm}" stands for the configuration's.
      matches: (path) -> whether this is one: a look at names and small JSON files only.
      open: (path, the target's `ModelConfig` or None) -> (configuration, tensors, rules, tensors that may stay unused).
      needs_target: without the target's configuration it is not taken for one.
    """

    name: str
    label: str
    matches: Named
    open: Named
    needs_target: bool = False


@dataclasses.dataclass(frozen=True)
class Format:
    """How a draft's parameters are described, stored and published; kinds of draft that differ in settings share one.

    Attributes:
      stored: the ``kind`` in ``config.json`` of a converted folder.
      config: the class of its configuration, which has ``to_json``, ``from_json`` and, where several kinds share it,
        ``algorithm``.
      shapes: (configuration) -> the shapes of its parameter tree.
      sources: the layouts that can be read.
      export: (configuration) -> `jaxspec.conversion.export.Export`; None where nothing is published.
      within_target: for drafts that are published in their target's files: (draft, target, the target's rules, path in front
        of the draft's parameters) -> all rules and further keys of ``config.json``.
      folder: for drafts that are published beside their target: the name of that folder.
    """

    stored: str
    config: type
    shapes: Named
    sources: tuple[Source, ...] = ()
    export: Named | None = None
    within_target: Named | None = None
    folder: str | None = None


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of draft: an algorithm of `jaxspec.generate`.

    Attributes:
      name: SGLang's name, in capitals.
      build: (target's `ModelParams`, draft, resolved `SpecConfig`) -> (`jaxspec.drafters.base.Drafter`, its parameter tree).
      resolve: (spec, target's configuration, draft) -> spec: fills in and checks the tree's parameters; its `options` are an
        instance of the class below. None leaves the spec as it is.
      options: the class of what can be set for this kind alone.
      tree: which of num_steps, topk and num_draft_tokens it takes.
      tree_help: a word for who gives one of the others.
      verifications: the verifiers that its trees are fit for: "target_only", and with draft probabilities "rejection" and
        "block"; none for plain decoding, which has nothing to verify.
      needs_draft: whether a draft must be given.
      draft_help: what to pass as ``draft``, for error messages.
      also_called: names of other kinds by which it goes where the target has drafts of this kind, but none of those.
      format: how its parameters are stored; None for kinds without parameters.
      head: its name for ``python -m jaxspec.train`` and ``jaxspec.bench``.
      training: the module of its objective (`jaxspec.training.heads.head_module`).
      example: (target's configuration) -> the configuration of a draft of a well-known shape, to measure with random weights.
    """

    name: str
    build: Named
    resolve: Named | None = None
    options: type[DraftOptions] = DraftOptions
    tree: tuple[str, ...] = TREE
    tree_help: str = ""
    verifications: tuple[str, ...] = ("target_only",)
    needs_draft: bool = True
    draft_help: str = "what jaxspec.load_draft returned"
    also_called: tuple[str, ...] = ()
    format: Format | None = None
    head: str | None = None
    training: str | None = None
    example: Named | None = None


MODEL = Format("model", ModelConfig, "jaxspec.models.decoder:param_shapes", export="jaxspec.conversion.export:model_export")

EAGLE_HEAD = Format(
    "eagle",
    EagleConfig,
    "jaxspec.drafters.eagle.model:param_shapes",
    sources=(
        Source(
            "EAGLE draft head",
            "{algorithm} draft head",
            "jaxspec.conversion.drafts.eagle:matches",
            "jaxspec.conversion.drafts.eagle:open_eagle",
        ),
    ),
    export="jaxspec.conversion.export:eagle_export",
)

MTP_LAYERS = Format(
    "mtp",
    MtpConfig,
    "jaxspec.drafters.mtp.model:param_shapes",
    sources=(
        Source(
            "MTP draft",
            "MTP draft",
            "jaxspec.conversion.drafts.mtp_alone:is_alone",
            "jaxspec.conversion.drafts.mtp_alone:open_alone",
        ),
        Source(
            "Qwen3-Next folder",
            "MTP layer",
            "jaxspec.conversion.drafts.mtp:has_hybrid_mtp",
            "jaxspec.conversion.drafts.mtp:open_hybrid_mtp",
            needs_target=True,
        ),
    ),
    export="jaxspec.conversion.export:mtp_export",
    within_target="jaxspec.conversion.drafts.mtp:export_with_target",
)

BLOCK_DRAFT = Format(
    "dflash",
    DFlashConfig,
    "jaxspec.drafters.dflash.model:param_shapes",
    sources=(
        Source(
            "block draft",
            "{algorithm} draft",
            "jaxspec.conversion.drafts.dflash:matches",
            "jaxspec.conversion.drafts.dflash:open_dflash",
        ),
    ),
    export="jaxspec.conversion.export:dflash_export",
)

ADAPTER = Format(
    "uno",
    UnoConfig,
    "jaxspec.drafters.uno.model:param_shapes",
    sources=(
        Source(
            "PEFT adapter", "UNO adapter", "jaxspec.conversion.drafts.peft:matches", "jaxspec.conversion.drafts.peft:open_peft"
        ),
    ),
    export="jaxspec.conversion.export:uno_export",
    folder="adapter",
)

KINDS: dict[str, Kind] = {}
"""All kinds by name; `register` adds to it."""


def register(kind: Kind) -> Kind:
    """Makes a kind of draft known under its name, to `jaxspec.generate`, `jaxspec.load_draft` and the command lines.

    Returns:
      The kind.

    Raises:
      ConfigError: the name, the stored format or an option's name on the command line is taken, or a part does not fit.
    """
    if kind.name in KINDS or kind.name == "AUTO" or kind.name != kind.name.upper():
        raise ConfigError(f"name={kind.name!r} must be in capitals and not one of AUTO, {', '.join(KINDS)}")
    if not (isinstance(kind.options, type) and issubclass(kind.options, DraftOptions)):
        raise ConfigError(f"options={kind.options!r} of {kind.name} must be a subclass of jaxspec.DraftOptions")
    for given, known, what in ((kind.tree, TREE, "tree"), (kind.verifications, VERIFICATIONS, "verifications")):
        if set(given) - set(known):
            raise ConfigError(f"{what}={given!r} of {kind.name} must be some of {', '.join(known)}")
    for other in KINDS.values():
        if kind.format is not None and other.format not in (None, kind.format) and other.format.stored == kind.format.stored:
            raise ConfigError(f"stored={kind.format.stored!r} of {kind.name} is the format of {other.name}")
        if kind.head is not None and kind.head == other.head:
            raise ConfigError(f"head={kind.head!r} of {kind.name} is that of {other.name}")
        theirs = other.options.flags()
        for flag, field in kind.options.flags().items():
            if flag in theirs and (theirs[flag].type, theirs[flag].default) != (field.type, field.default):
                raise ConfigError(f"the option {flag} of {kind.name} means something else than that of {other.name}")
    KINDS[kind.name] = kind
    return kind


register(
    Kind(
        "NONE",
        "jaxspec.drafters.plain:build",
        tree=(),
        tree_help="it drafts nothing",
        verifications=(),
        needs_draft=False,
        draft_help="nothing",
    )
)
register(
    Kind(
        "NGRAM",
        "jaxspec.drafters.ngram.drafter:build",
        "jaxspec.drafters.ngram.drafter:resolve",
        options=NgramConfig,
        tree=("num_draft_tokens",),
        tree_help="ngram_max_bfs_breadth sets how wide a tree branches",
        needs_draft=False,
        draft_help="nothing, or a jaxspec.NgramHistory",
    )
)
register(
    Kind(
        "EAGLE",
        "jaxspec.drafters.eagle.drafter:build",
        "jaxspec.drafters.eagle.drafter:resolve",
        options=EagleOptions,
        verifications=VERIFICATIONS,
        draft_help="an EAGLE-1/2 head (jaxspec.load_draft)",
        format=EAGLE_HEAD,
        head="eagle",
        training="jaxspec.training.eagle",
        example="jaxspec.benchmarking.shapes:eagle2",
    )
)
register(
    Kind(
        "EAGLE3",
        "jaxspec.drafters.eagle.drafter:build",
        "jaxspec.drafters.eagle.drafter:resolve",
        options=EagleOptions,
        verifications=VERIFICATIONS,
        draft_help="an EAGLE-3 head (jaxspec.load_draft)",
        format=EAGLE_HEAD,
        head="eagle3",
        training="jaxspec.training.eagle3",
        example="jaxspec.benchmarking.shapes:eagle3",
    )
)
register(
    Kind(
        "PEAGLE",
        "jaxspec.drafters.eagle.peagle:build",
        "jaxspec.drafters.eagle.peagle:resolve",
        options=PEagleOptions,
        verifications=VERIFICATIONS,
        draft_help="a parallel EAGLE head (jaxspec.load_draft)",
        format=EAGLE_HEAD,
    )
)
register(
    Kind(
        "NEXTN",
        "jaxspec.drafters.mtp.drafter:build",
        "jaxspec.drafters.mtp.drafter:resolve",
        options=MtpOptions,
        verifications=VERIFICATIONS,
        needs_draft=False,
        draft_help="MTP layers (jaxspec.load_draft), unless the target came with some",
        also_called=("EAGLE",),  # SGLang says so for a target that drafts with its own MTP layers
        format=MTP_LAYERS,
        head="mtp",
        training="jaxspec.training.mtp",
        example="jaxspec.benchmarking.shapes:mtp",
    )
)
register(
    Kind(
        "DFLASH",
        "jaxspec.drafters.dflash.drafter:build",
        "jaxspec.drafters.dflash.drafter:resolve",
        options=DFlashOptions,
        verifications=VERIFICATIONS,
        draft_help="a DFlash draft (jaxspec.load_draft)",
        format=BLOCK_DRAFT,
        head="dflash",
        training="jaxspec.training.dflash",
        example="jaxspec.benchmarking.shapes:dflash",
    )
)
register(
    Kind(
        "DSPARK",
        "jaxspec.drafters.dflash.drafter:build",
        "jaxspec.drafters.dflash.drafter:resolve",
        options=DSparkOptions,
        verifications=VERIFICATIONS,
        draft_help="a DSpark draft (jaxspec.load_draft)",
        format=BLOCK_DRAFT,
        head="dspark",
        training="jaxspec.training.dspark",
        example="jaxspec.benchmarking.shapes:dspark",
    )
)
register(
    Kind(
        "UNO",
        "jaxspec.drafters.uno.drafter:build",
        "jaxspec.drafters.uno.drafter:resolve",
        options=UnoOptions,
        verifications=VERIFICATIONS,
        draft_help="a UNO adapter, a PEFT LoRA (jaxspec.load_draft)",
        format=ADAPTER,
        head="uno",
        training="jaxspec.training.uno",
        example="jaxspec.benchmarking.shapes:uno",
    )
)
register(
    Kind(
        "STANDALONE",
        "jaxspec.drafters.standalone.drafter:build",
        "jaxspec.drafters.standalone.drafter:resolve",
        options=StandaloneOptions,
        draft_help="a smaller model (jaxspec.load)",
        format=MODEL,
        head="standalone",
        training="jaxspec.training.standalone",
    )
)


def formats() -> dict[str, Format]:
    """All formats by the name under which they are stored."""
    return {kind.format.stored: kind.format for kind in KINDS.values() if kind.format is not None}


def format_of(config: Any) -> Format:
    """The format of a configuration. Raises ConfigError where no kind of draft has it."""
    found = next((f for f in formats().values() if f.config is type(config)), None)
    if found is None:
        known = ", ".join(f.config.__name__ for f in formats().values())
        raise ConfigError(f"a {type(config).__name__} is the configuration of no known kind of draft; known: {known}")
    return found


def shapes_of(config: Any) -> Mapping:
    """The parameter tree of a configuration as shapes."""
    return imported(format_of(config).shapes)(config)


def algorithm_of(config: Any) -> str | None:
    """The algorithm of a draft's configuration; None where it is none's."""
    own = getattr(config, "algorithm", None)
    return own or next((k.name for k in KINDS.values() if k.format is not None and k.format.config is type(config)), None)
