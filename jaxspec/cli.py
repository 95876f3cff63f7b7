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


def add_spec_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every field of `SpecConfig` as ``--x`` and ``--speculative-x``, with its type, default and help."""
    group = parser.add_argument_group("speculation (each also as --speculative-…, SGLang's names)")
    helps, types = field_help(SpecConfig), typing.get_type_hints(SpecConfig)
    for field in dataclasses.fields(SpecConfig):
        name = field.name.replace("_", "-")
        flags = [f"--{name}", f"--speculative-{name}"]
        if field.name in SGLANG_SPELLING:
            flags.append(f"--speculative-{SGLANG_SPELLING[field.name]}")
        kind = next((t for t in typing.get_args(types[field.name]) if t is not type(None)), types[field.name])
        text = f"{helps.get(field.name, '')} (default: {field.default})".replace("%", "%%")
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
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
