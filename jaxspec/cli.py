"""What the command lines share: speculative options from the kinds of draft, and errors as one line instead of a trace."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import typing
from collections.abc import Callable

from jaxspec.config import ConfigError, SpecConfig
from jaxspec.drafters.kinds import KINDS
from jaxspec.drafters.options import field_help

SGLANG_SPELLING = {"topk": "eagle-topk"}


def with_default(text: str, default: object) -> str:
    """A field's help for a command line: names of fields as options, and the default as it is typed; None goes unnamed."""
    text = re.sub(r" \(`[\w.]+`\)", "", text)  # where the code has it
    text = re.sub(r"`([a-z]\w*)`", lambda name: f"--{name[1].replace('_', '-')}", text)
    shown = "" if default is None else f" (default: {typed(default)})"
    return (text.rstrip(".") + shown).replace("%", "%%")


def typed(value: object) -> str:
    """A value as one types it: a tuple's members side by side."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def add_spec_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the fields of `SpecConfig` and every kind of draft's options as ``--x`` and ``--speculative-x``."""
    group = parser.add_argument_group(
        "speculation (each also as --speculative-…, SGLang's names)",
        "Without --num-steps, --topk and --num-draft-tokens the tree is the one measured as fastest with the draft on this "
        "platform, else SGLang's choice.",
    )
    helps = field_help(SpecConfig)
    for field in dataclasses.fields(SpecConfig):
        if field.name != "options":
            _add_field(group, SpecConfig, field, field.name, helps[field.name])
    group = parser.add_argument_group("speculation, options of single algorithms (each also as --speculative-…)")
    for flag, (cls, field, names) in draft_options().items():
        _add_field(group, cls, field, flag, f"{', '.join(names)}: {field_help(cls)[field.name]}")


def draft_options() -> dict[str, tuple[type, dataclasses.Field, list[str]]]:
    """The options of all kinds of draft by their name on the command line: their class, field, and the kinds that have it."""
    found: dict[str, tuple[type, dataclasses.Field, list[str]]] = {}
    for kind in KINDS.values():
        for flag, field in kind.options.flags().items():
            found.setdefault(flag, (kind.options, field, []))[2].append(kind.name.lower())
    return found


def _add_field(group, cls: type, field: dataclasses.Field, flag: str, text: str) -> None:
    """One field of a dataclass as an option, with its type and default."""
    name = flag.replace("_", "-")
    flags = [f"--{name}", f"--speculative-{name}"]
    if flag in SGLANG_SPELLING:
        flags.append(f"--speculative-{SGLANG_SPELLING[flag]}")
    hint = typing.get_type_hints(cls)[field.name]
    kind = next((t for t in typing.get_args(hint) if t is not type(None)), hint)
    if kind is bool:
        group.add_argument(*flags, action="store_true", help=with_default(text, field.default or None))
    else:
        shown = with_default(text, field.default)
        group.add_argument(*flags, type=kind, default=None, metavar=kind.__name__.upper(), help=shown)


def spec_from(args: argparse.Namespace) -> SpecConfig:
    """The `SpecConfig` that a command line asks for; which options the algorithm has is settled when it is known."""

    def given(names) -> dict:
        values = {name: getattr(args, name) for name in names}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    shared = given(f.name for f in dataclasses.fields(SpecConfig) if f.name != "options")
    return SpecConfig(**shared, options=given(draft_options()) or None)


def run(main: Callable[[], int | None]) -> None:
    """Runs a command's `main`; what a user can put right is printed as one line, with exit status 2."""
    try:
        sys.exit(main())
    except (ConfigError, FileNotFoundError, FileExistsError, NotADirectoryError) as error:
        absent = isinstance(error, FileNotFoundError) and error.filename  # what the system says names an error number first
        print(f"error: {error.filename} does not exist" if absent else f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
