"""The documentation says what the code does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from jaxspec import cli
from jaxspec.config import SpecConfig
from jaxspec.drafters.registry import ALGORITHMS

ROOT = Path(__file__).parents[1]


def parameter_table() -> str:
    """docs/parameters.md's table, from the dataclass and its docstring."""
    helps = cli.field_help(SpecConfig)
    rows = ["| parameter | SGLang's flag | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(SpecConfig):
        flag = cli.SGLANG_SPELLING.get(field.name, field.name.replace("_", "-"))
        rows.append(f"| `{field.name}` | `--speculative-{flag}` | `{field.default}` | {helps[field.name]} |")
    return "\n".join(rows)


def test_the_parameter_table_is_the_dataclass():
    text = (ROOT / "docs" / "parameters.md").read_text()
    assert parameter_table() in text, "docs/parameters.md is out of date; the table must read:\n" + parameter_table()


def test_every_algorithm_is_in_the_readme():
    text = (ROOT / "README.md").read_text()
    for name in ALGORITHMS:
        assert re.search(rf"\|\s*`{name.lower()}`", text), f"README's table of algorithms lacks {name}"


@pytest.mark.parametrize("path", ["README.md", "docs/parameters.md"])
def test_python_examples_compile(path):
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), flags=re.DOTALL)):
        compile(code, f"{path}, example {i}", "exec")
