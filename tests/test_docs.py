"""The documentation says what the code does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from jaxspec import cli
from jaxspec.config import SpecConfig
from jaxspec.drafters.kinds import KINDS
from jaxspec.drafters.options import field_help
from jaxspec.engine.config import EngineConfig

ROOT = Path(__file__).parents[1]
HEAD = ["| parameter | SGLang's flag | default | meaning |", "|---|---|---|---|"]


def row(cls: type, field: dataclasses.Field, flag: str) -> str:
    """A line of a table."""
    flag = f"`--speculative-{cli.SGLANG_SPELLING.get(flag, flag.replace('_', '-'))}`" if flag != "options" else "see below"
    return f"| `{field.name}` | {flag} | `{field.default}` | {field_help(cls)[field.name]} |"


def parameter_table() -> str:
    """docs/parameters.md's first table, from the dataclass and its docstring."""
    return "\n".join(HEAD + [row(SpecConfig, f, f.name) for f in dataclasses.fields(SpecConfig)])


def option_tables() -> str:
    """docs/parameters.md's tables of options, from the kinds of draft."""
    by_class: dict[type, list[str]] = {}
    for kind in KINDS.values():
        if kind.options.flags():
            by_class.setdefault(kind.options, []).append(kind.name)
    tables = []
    for cls, names in by_class.items():
        rows = [row(cls, field, flag) for flag, field in cls.flags().items()]
        tables.append("\n".join([f"### {', '.join(names)}: `jaxspec.{cls.__name__}`", "", *HEAD, *rows]))
    return "\n\n".join(tables)


def test_the_parameter_tables_are_the_dataclasses():
    text = (ROOT / "docs" / "parameters.md").read_text()
    for table in (parameter_table(), option_tables()):
        assert table in text, "docs/parameters.md is out of date; it must hold:\n" + table


def test_the_settings_of_the_engine_are_the_dataclass():
    helps = field_help(EngineConfig)
    rows = [f"| `{f.name}` | `{f.default}` | {helps[f.name]} |" for f in dataclasses.fields(EngineConfig)]
    assert "\n".join(rows) in (ROOT / "docs" / "engine.md").read_text(), "\n".join(rows)


def test_options_are_public_names():
    import jaxspec

    assert all(getattr(jaxspec, kind.options.__name__) is kind.options for kind in KINDS.values())


def test_every_algorithm_is_in_the_readme():
    text = (ROOT / "README.md").read_text()
    for name in KINDS:
        assert re.search(rf"\|\s*`{name.lower()}`", text), f"README's table of algorithms lacks {name}"


@pytest.mark.parametrize("path", ["README.md", "docs/parameters.md", "docs/drafters.md", "docs/engine.md"])
def test_python_examples_compile(path):
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), flags=re.DOTALL)):
        compile(code, f"{path}, example {i}", "exec")
