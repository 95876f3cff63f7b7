"""What can be set for one algorithm alone: the base of the options that a kind of draft declares (`jaxspec.drafters.kinds`)."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, ClassVar

from jaxspec.config import ConfigError


@dataclasses.dataclass(frozen=True)
class DraftOptions:
    """Options of a kind of draft; this base has none. A subclass is a frozen dataclass that checks its values itself.

    Its fields' help stands under "Attributes:" in its docstring: the command line and the documentation take it from there.
    """

    flag_prefix: ClassVar[str] = ""
    """What SGLang puts in front of the fields' names on the command line."""

    @property
    def settles_tree(self) -> bool:
        """Whether these options fix the tree's shape, so that none is chosen for the user."""
        return False

    @property
    def chains_only(self) -> bool:
        """Whether these options ask for what only a chain can do."""
        return False

    @classmethod
    def flags(cls) -> dict[str, dataclasses.Field]:
        """The fields under the names that the command line gives them, which are unique among all kinds of draft."""
        return {cls.flag_prefix + field.name: field for field in dataclasses.fields(cls)}


@dataclasses.dataclass(frozen=True)
class WindowOptions(DraftOptions):
    """How far back a draft with a cache of its own attends.

    Attributes:
      draft_window_size: the draft attends to this many last positions only; None for all.
      draft_sink_size: leading positions that a windowed draft still sees.

    Raises:
      ConfigError: a size is out of range, or there is a sink without a window.
    """

    draft_window_size: int | None = None
    draft_sink_size: int = 0

    def __post_init__(self):
        if self.draft_window_size is not None and self.draft_window_size < 1:
            raise ConfigError(f"draft_window_size={self.draft_window_size} must be at least 1, or None for no window")
        if self.draft_sink_size < 0:
            raise ConfigError(f"draft_sink_size={self.draft_sink_size} must not be negative")
        if self.draft_sink_size and self.draft_window_size is None:
            raise ConfigError(f"draft_sink_size={self.draft_sink_size} needs draft_window_size")


def field_help(cls: type) -> dict[str, str]:
    """The "Attributes:" of a dataclass's docstring and of its bases', by field name: help texts are written once."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = re.split(r"\n\n?Raises:", inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("Attributes:")[2])[0]
        entries = re.findall(r"^  (\w[\w, ]*): (.*(?:\n    .*)*)", text, flags=re.MULTILINE)
        found |= {name.strip(): " ".join(body.split()) for names, body in entries for name in names.split(",")}
    return found


def describe(cls: type[DraftOptions]) -> str:
    """The options that there are, for error messages."""
    names = ", ".join(cls.flags())
    return f"its options are {names} (jaxspec.{cls.__name__})" if names else "it has no options"


def make_options(cls: type[DraftOptions], given: Any, algorithm: str) -> DraftOptions:
    """Options of the class `cls` from what a `SpecConfig` holds.

    Args:
      cls: the options that the algorithm has.
      given: None for the defaults, an instance of `cls`, or a mapping of names to values: the fields' own or SGLang's.
      algorithm: its name, for error messages.

    Raises:
      ConfigError: the algorithm lacks an option, one is given twice, or a value is out of range.
    """
    if given is None:
        return cls()
    if type(given) is cls:
        return given
    if isinstance(given, DraftOptions):
        raise ConfigError(f"options={given!r} are not those of algorithm={algorithm.lower()!r}: {describe(cls)}")
    known = {field.name: field.name for field in dataclasses.fields(cls)}
    known |= {flag: field.name for flag, field in cls.flags().items()}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{name}={value!r} is not an option of algorithm={algorithm.lower()!r}: {describe(cls)}")
        if known[name] in values:
            raise ConfigError(f"the option {known[name]} is given twice, once as {name}={value!r}")
        values[known[name]] = value
    return cls(**values)
