"""Files of results: rows, and what measured them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

from jaxspec.config import ConfigError

PROVENANCE = ("command", "commit", "date", "device", "versions")
"""What a file of results says beside its rows."""


def command_line() -> str:
    """The command that runs, without this machine's folders."""
    program, *arguments = sys.argv
    folder, name = Path(program).resolve().parts[-2:] if program else ("", "")
    shown = f"-m jaxspec.{Path(name).stem}" if folder == "jaxspec" else f"{folder}/{name}"
    words = [Path(word).name if Path(word).is_absolute() else f"'{word}'" if " " in word else word for word in arguments]
    return " ".join(["python", shown, *words])


def commit() -> str:
    """The commit that runs: JAXSPEC_COMMIT, for a checkout that came without its history; else the checkout's; or "unknown"."""
    if "JAXSPEC_COMMIT" in os.environ:
        return os.environ["JAXSPEC_COMMIT"]
    git, root = shutil.which("git"), Path(__file__).parents[2]
    if git is None or not (root / ".git").exists():
        return "unknown"
    asked = [git, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def provenance() -> dict[str, Any]:
    """What measures now: `PROVENANCE`."""
    device = jax.devices()[0]
    name = f"{platform.machine()}, {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "python": platform.python_version()}
    found = (command_line(), commit(), datetime.date.today().isoformat(), name, versions)
    return dict(zip(PROVENANCE, found, strict=True))


def replace_text(path: str | Path, text: str) -> None:
    """Replaces a file in one step, so that a run that is cut off leaves a whole one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text)
    os.replace(fresh, path)


def write_rows(path: str | Path, rows: Sequence[dict] | Mapping[str, dict], **more: Any) -> None:
    """Replaces a file of rows; `more` stands beside them, before what the process says of itself where it says it, too."""
    rows = dict(rows) if isinstance(rows, Mapping) else list(rows)
    replace_text(path, json.dumps({**provenance(), **more, "rows": rows}, indent=1) + "\n")


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file; none of one that is not there. Raises ConfigError for another kind of file."""
    path = Path(path)
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text())["rows"]
        if not all(isinstance(row, dict) for row in rows):
            raise TypeError("rows are no objects")
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is not a file of results with rows ({type(error).__name__}: {error})") from None
    return rows
