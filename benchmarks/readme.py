"""Tables between two marks of README."""

from __future__ import annotations

import re
from pathlib import Path

from jaxspec.benchmarking.records import replace_text
from jaxspec.config import ConfigError


def replace_between(path: Path, begin: str, end: str, text: str) -> None:
    """Puts text between two marks of a file, in one step.

    Raises ConfigError when there is no such file, or when it does not have both marks once.
    """
    marked = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    if not path.is_file() or len(marked.findall(path.read_text())) != 1:
        raise ConfigError(f"{path}: the table belongs into a file that exists, between the lines {begin} and {end}, once")
    replace_text(path, marked.sub(lambda _: f"{begin}\n{text}\n{end}", path.read_text()))
