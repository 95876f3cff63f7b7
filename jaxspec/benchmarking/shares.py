"""A suite's rows shared out among several GPUs, a process each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.benchmarking.records import read_rows
from jaxspec.config import ConfigError


def without(arguments: Sequence[str], *options: str) -> list[str]:
    """A command line without some options, which take a value each (`--x 1` or `--x=1`)."""
    kept, skip = [], False
    for word in arguments:
        if not skip and not word.startswith(tuple(f"{option}=" for option in options)) and word not in options:
            kept.append(word)
        skip = not skip and word in options
    return kept


def visible(gpus: int) -> list[str]:
    """The first GPUs of those that this process may use; any number where it runs on the CPU (JAX_PLATFORMS=cpu).

    Raises ConfigError where it may use fewer: JAX would go on on the CPU.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen:
        found = chosen.split(",")
    elif os.environ.get("JAX_PLATFORMS") == "cpu":
        found = [str(i) for i in range(gpus)]
    else:
        smi = shutil.which("nvidia-smi")
        command = [smi, "--query-gpu=index", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() if smi else []
    if len(found) < gpus:
        raise ConfigError(f"--gpus {gpus}: this process may use {len(found)}: {', '.join(found) or 'none'}")
    return found[:gpus]


def run_shares(arguments: Sequence[str], gpus: int, path: Path) -> tuple[list[dict[str, Any]], int]:
    """Runs ``python -m jaxspec.bench`` with these arguments once for each GPU, each with its share of the rows.

    Args:
      arguments: of the whole run; what belongs to it alone (`--gpus`, `--json`) is left out.
      gpus: processes.
      path: where the rows will go; each process writes beside it, beginning with what it holds under `--resume`.

    Returns:
      All rows, each once, and the worst exit status.
    """
    command = [sys.executable, "-m", "jaxspec.bench", *without(arguments, "--gpus", "--json")]
    files = [path.with_name(f".{path.stem}.gpu{i}{path.suffix}") for i in range(gpus)]
    processes: list[subprocess.Popen] = []
    try:
        for i, (file, gpu) in enumerate(zip(files, visible(gpus), strict=True)):
            if path.exists() and "--resume" in arguments:
                shutil.copy(path, file)
            own = ["--json", str(file), "--share", str(i), str(gpus)]
            processes.append(subprocess.Popen([*command, *own], env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu}))
        worst = max(abs(process.wait()) for process in processes)
    except KeyboardInterrupt:  # what is measured is kept
        worst = 130
    finally:
        for process in processes:
            process.kill()
    found = [row for file in files for row in read_rows(file)]
    for file in files:
        file.unlink(missing_ok=True)
    return list({(row["name"], row["batch"], row["context"]): row for row in found}.values()), worst
