"""A trained head's card: what it is, how it was made and what was measured, all of it from the files beside it."""

from __future__ import annotations

import ast
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.config import ModelConfig
from jaxspec.conversion import store
from jaxspec.conversion.mapping import flatten
from jaxspec.drafters.kinds import shapes_of
from jaxspec.files.errors import ConversionError

CURVE_POINTS = 12
CARD = "README.md"


def digest(folder: Path) -> str:
    """Twelve hexadecimal digits that stand for a head: of its configuration and weights, not of its card."""
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted((folder / "params").rglob("*")):
        if file.is_file():
            found.update(file.read_bytes())
    return found.hexdigest()[:12]


def size(folder: Path) -> int:
    """Bytes of a head's files, its card left out."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and file.name != CARD)


def bullets(values: Mapping[str, Any]) -> list[str]:
    """A line for each value; nested ones under their names."""
    return [f"- {name.replace('_', ' ')}: {shown(value)}" for name, value in flatten(values).items() if value is not None]


def shown(value: Any) -> str:
    """A value as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(shown, value)) if isinstance(value, list | tuple) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def objective_line(name: str, options: Mapping[str, Any]) -> str:
    """An objective and its own options. Older files hold one text in place of both: its ``repr`` with whole configurations."""
    if not options and "(" in name:
        try:
            call = ast.parse(name, mode="eval").body
            options = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg not in ("target", "config")}
        except (SyntaxError, ValueError, AttributeError):
            options = {}  # the whole text stands in config.json
        name = name.partition("(")[0]
    return "; ".join([name, *(f"{key.replace('_', ' ')} {shown(value)}" for key, value in options.items())])


def usage(name: str, target: str, algorithm: str) -> list[str]:
    """Code that drafts with a head: by its algorithm where its folder is called after the target, as heads that ship are."""
    if name.startswith(f"{target}-"):
        return [f'print(jaxspec.generate(params, "Why is the sky blue?", algorithm="{algorithm}"))']
    return [
        f'draft = jaxspec.load_draft("{name}", params)',
        'print(jaxspec.generate(params, "Why is the sky blue?", draft=draft))',
    ]


def curve_table(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Accept length on held-out rows against training tokens, at most `CURVE_POINTS` lines, the first and last among them."""
    if not points:
        return []
    step = max(1, -(-(len(points) - 1) // (CURVE_POINTS - 1)))
    kept = [*points[:-1][::step], points[-1]]
    lines = ["| training tokens | loss | accept length (held-out rows, a chain) | seconds |", "|---|---|---|---|"]
    for point in kept:
        loss = f"{point['loss']:.4f}" if "loss" in point else "–"
        lines.append(f"| {point['tokens']:,} | {loss} | {point['accept_length']:.2f} | {point['seconds']:.0f} |")
    return lines


def card(folder: Path, measured: Sequence[str] = (), command: str | None = None) -> str:
    """The Markdown text.

    Args:
      folder: a converted folder that `jaxspec.training.output.write_head` wrote.
      measured: lines about accept lengths and speed.
      command: the command that trained it, if its files do not say.

    Raises:
      ConversionError: the folder is no converted one, or not of a trained head.
    """
    config, data = store.read_config(folder)
    provenance = data.get("provenance", {})
    training = dict(provenance.get("training") or {})
    if not training:
        raise ConversionError(f"{folder}: its config.json does not say how it was trained, so there is no card to write")
    whole = isinstance(config, ModelConfig)
    algorithm = "STANDALONE" if whole else config.algorithm
    count = sum(math.prod(shape) for shape in flatten(shapes_of(config)).values())
    stored = f"stored as {provenance['quantized']} per channel, " if provenance.get("quantized") else ""
    made_from = training.pop("data", {})
    target = made_from.get("target") or "TARGET"
    if "objective" in training:
        training["objective"] = objective_line(training["objective"], training.pop("objective_options", {}))
    command = training.pop("command", command)
    lines = [
        f"# {folder.name}",
        "",
        f"A draft for {target}: algorithm `{algorithm.lower()}`, {count:,} parameters, {stored}{size(folder) / 1e6:.2f} MB.",
        "",
        "```python",
        "import jaxspec",
        f'params = jaxspec.load("{target}")',
        *usage(folder.name, target, algorithm.lower()),
        "```",
        "",
        "## Recipe",
        "",
        *bullets(training),
        "",
        "## Data",
        "",
        *bullets(made_from),
    ]
    if command:
        lines += ["", "## Command", "", "```bash", command, "```"]
    file = folder / "training.jsonl"
    points = [json.loads(line) for line in file.read_text().splitlines() if line] if file.exists() else []
    if points:
        lines += ["", "## Training", "", *curve_table(points)]
    if measured:
        lines += ["", "## Measured", "", "Tokens a round, and speed over plain decoding where it was timed.", "", *measured]
    return "\n".join([*lines, "", f"Digest of configuration and weights: `{digest(folder)}`.", ""])
