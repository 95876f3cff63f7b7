"""A sweep over (num_steps, topk, num_draft_tokens) on the user's own model and prompts, into a CSV that can be resumed."""

from __future__ import annotations

import csv
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.config import ConfigError
from jaxspec.optional import optional

STEPS, TOPK, NODES, BATCHES = (0, 1, 3, 5, 7), (0, 1, 2, 4, 8), (0, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16)
"""SGLang's grid; 0/0/0 stands for plain decoding."""

COLUMNS = (
    "setup",
    "batch_size",
    "steps",
    "topk",
    "num_draft_tokens",
    "acc_length",
    "step_time",
    "speed",
    "tokens_per_second",
    "completion_tokens",
)
"""`step_time` in seconds; `speed` = acc_length / step_time: tokens a sequence gains per second."""


class Setting(NamedTuple):
    """One point of the grid."""

    batch_size: int
    steps: int
    topk: int
    num_draft_tokens: int

    @property
    def is_plain(self) -> bool:
        """Whether this is plain decoding."""
        return self.num_draft_tokens == 0


def settings(
    batches: Iterable[int] = BATCHES, steps: Iterable[int] = STEPS, topk: Iterable[int] = TOPK, nodes: Iterable[int] = NODES
) -> list[Setting]:
    """The grid without what makes no sense: trees with more nodes than steps · topk + 1, and zeros that do not go together.

    A chain has num_steps + 1 nodes whatever is asked for, so that topk = 1 appears once for each number of steps.
    """
    found = []
    for batch, s, k, n in itertools.product(batches, steps, topk, nodes):
        zeros = (s == 0) + (k == 0) + (n == 0)
        if k == 1 and s and n:
            n = s + 1
        if zeros not in (0, 3) or (not zeros and s * k + 1 < n) or n == 1:
            continue
        if Setting(batch, s, k, n) not in found:
            found.append(Setting(batch, s, k, n))
    return found


def finished(path: Path, setup: str) -> set[Setting]:
    """The settings that a CSV already holds for a setup.

    Raises ConfigError when the file is something else.
    """
    if not path.exists() or path.stat().st_size == 0:
        return set()
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ConfigError(f"{path} exists and is no table of this sweep (its columns differ): give another file")
        names = Setting._fields
        # A row cut off by a crash has empty columns and is measured again.
        return {Setting(*(int(row[n]) for n in names)) for row in reader if row["setup"] == setup and row[COLUMNS[-1]]}


def run_sweep(
    path: str | Path,
    setup: str,
    grid: Sequence[Setting],
    measure: Callable[[Setting], dict[str, Any]],
    log: Callable[[str], None] = print,
) -> int:
    """Measures what is not yet in the file, appending a row for each setting as soon as it is through.

    Args:
      path: the CSV.
      setup: what else decides about the figures (model, draft, prompts); rows of other setups are left alone.
      grid: the settings.
      measure: gives acc_length, step_time, tokens_per_second and completion_tokens of one.
      log: receives the reasons of settings that cannot be run.

    Returns:
      How many settings were measured.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = finished(path, setup)
    fresh = not path.exists() or path.stat().st_size == 0
    count = 0
    with path.open("a", newline="", encoding="utf-8") as file:
        if not fresh and not path.read_bytes().endswith(b"\n"):
            file.write("\n")
        writer = csv.DictWriter(file, COLUMNS)
        if fresh:
            writer.writeheader()
        for setting in grid:
            if setting in done:
                continue
            try:
                figures = measure(setting)
            except ConfigError as error:
                log(f"{'/'.join(map(str, setting[1:]))} at batch {setting.batch_size} is left out: {error}")
                continue
            speed = figures["acc_length"] / figures["step_time"]
            writer.writerow({"setup": setup, **setting._asdict(), **figures, "speed": speed})
            file.flush()
            count += 1
    return count


def read_rows(path: str | Path, setup: str | None = None) -> list[dict[str, Any]]:
    """The rows of a CSV with numbers as numbers; of one setup, or all."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row[COLUMNS[-1]] and setup in (None, row["setup"])]
    whole = (*Setting._fields, "completion_tokens")
    return [{k: v if k == "setup" else int(v) if k in whole else float(v) for k, v in row.items()} for row in rows]


def best(rows: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The fastest setting for each batch size."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row["speed"] > found.get(row["batch_size"], {"speed": -1.0})["speed"]:
            found[row["batch_size"]] = row
    return found


def plot(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Speed against the number of nodes, a line for each (steps, topk), a panel for each batch size.

    Raises MissingPackageError when matplotlib is missing.
    """
    optional("matplotlib", "a plot", "jaxspec-decoding[bench]")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches = sorted({row["batch_size"] for row in rows})
    figure = Figure(figsize=(5 * len(batches), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for i, batch in enumerate(batches):
        axes = figure.add_subplot(1, len(batches), i + 1)
        lines = defaultdict(list)
        for row in rows:
            if row["batch_size"] == batch and row["num_draft_tokens"]:
                lines[row["steps"], row["topk"]].append((row["num_draft_tokens"], row["speed"]))
            elif row["batch_size"] == batch:
                axes.axhline(row["speed"], color="black", linestyle="--", label="plain")
        for (steps, topk), points in sorted(lines.items()):
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"{steps} steps, top-{topk}")
        axes.set(title=f"batch {batch}", xlabel="num_draft_tokens", ylabel="tokens/s per sequence", xscale="log")
        axes.set_xscale("log", base=2)
        axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=150)
