"""What the command lines share: speculative options generated from `SpecConfig`, and errors as one line instead of a trace."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Callable

from jaxspec.config import ConfigError, SpecConfig

SGLANG_SPELLING = {"topk": "eagle-topk"}


def field_help(cls: type) -> dict[str, str]:
    """The "Attributes:" of a dataclass's docstring, by field name: help texts are written once."""
    text = inspect.getdoc(cls).partition("Attributes:")[2]
    entries = re.findall(r"^  (\w[\w, ]*): (.*(?:\n    .*)*)", text, flags=re.MULTILINE)
    return {name.strip(): " ".join(body.split()) for names, body in entries for name in names.split(",")}


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
    """Adds every field of `SpecConfig` as ``--x`` and ``--speculative-x``, with its type, default and help."""
    group = parser.add_argument_group(
        "speculation (each also as --speculative-…, SGLang's names)",
        "Without --num-steps, --topk and --num-draft-tokens the tree is the one measured as fastest with the draft on this "
        "platform, else SGLang's choice.",
    )
    helps, types = field_help(SpecConfig), typing.get_type_hints(SpecConfig)
    for field in dataclasses.fields(SpecConfig):
        name = field.name.replace("_", "-")
        flags = [f"--{name}", f"--speculative-{name}"]
        if field.name in SGLANG_SPELLING:
            flags.append(f"--speculative-{SGLANG_SPELLING[field.name]}")
        kind = next((t for t in typing.get_args(types[field.name]) if t is not type(None)), types[field.name])
        text = with_default(helps[field.name], field.default or None if kind is bool else field.default)
        if kind is bool:
            group.add_argument(*flags, action="store_true", help=text)
        else:
            group.add_argument(*flags, type=kind, default=None, metavar=kind.__name__.upper(), help=text)


def spec_from(args: argparse.Namespace) -> SpecConfig:
    """The `SpecConfig` that a command line asks for."""
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(SpecConfig)}
    return SpecConfig(**{name: value for name, value in values.items() if value is not None and value is not False})


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
