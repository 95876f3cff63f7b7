"""Files of measured accept lengths (`jaxspec.benchmarking.accept`): reading them, the README's table, the automatic choice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxspec.config import ConfigError
from jaxspec.drafters.measured import TREE

KEY = (
    "model",
    "row",
    "head_id",
    "set",
    "temperature",
    "platform",
    "device",
    "dtype",
    "new_tokens",
    "asked_prompts",
    "asked_timed",
)
"""What makes a figure another figure."""
TITLES = {"mt_bench": "MT-Bench", "gsm8k": "GSM8K", "humaneval": "HumanEval"}


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file; none of a file that is not there.

    Raises ConfigError for another kind of file.
    """
    path = Path(path)
    if not path.exists():
        return []
    rows = json.loads(path.read_text())
    if not isinstance(rows, list) or any(not isinstance(r, dict) or set(KEY) - set(r) for r in rows):
        raise ConfigError(f"{path} is not a file of accept lengths (a list of rows with {', '.join(KEY)})")
    return rows


def key(row: dict[str, Any]) -> tuple:
    """Equal for two measurements of the same thing."""
    return tuple(row[name] for name in KEY)


def replaced(rows: Iterable[dict[str, Any]], fresh: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows, later ones in the place of earlier ones with the same key."""
    found: dict[tuple, dict[str, Any]] = {}
    for row in (*rows, *fresh):
        found[key(row)] = row
    return list(found.values())


def cell(row: dict[str, Any] | None) -> str:
    """Accept length and, where it was timed, speed-up."""
    if row is None:
        return "–"
    passes = f" ({row['tokens_per_pass']:.2f} a pass)" if abs(row["tokens_per_pass"] - row["accept_length"]) > 0.005 else ""
    speed = f", {row['speedup']:.2f}×" if "speedup" in row else ""
    return f"{row['accept_length']:.2f}{passes}{speed}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table for each device: a line for each head and tree, a column for each set and temperature."""
    parts = []
    for device in dict.fromkeys((r["platform"], r["device"], r["dtype"]) for r in rows):
        here = [r for r in rows if (r["platform"], r["device"], r["dtype"]) == device]
        columns = list(dict.fromkeys((r["set"], r["temperature"]) for r in here))
        columns.sort(key=lambda c: (list(TITLES).index(c[0]) if c[0] in TITLES else len(TITLES), c[1]))
        heads = [f"{TITLES.get(s, s)}, {'greedy' if t == 0 else f'temperature {t:g}'}" for s, t in columns]
        lines = [f"| draft | {' | '.join(heads)} |", "|---" * (1 + len(columns)) + "|"]
        for name in dict.fromkeys(r["row"] for r in here):
            cells = {(r["set"], r["temperature"]): r for r in here if r["row"] == name}
            lines.append(f"| `{name}` | {' | '.join(cell(cells.get(c)) for c in columns)} |")
        parts.append("\n".join([f"{device[1]}, {device[2]}: {described(here)}", "", *lines]))
    return "\n\n".join(parts)


def described(rows: Sequence[dict[str, Any]]) -> str:
    """How the rows were measured, in words."""
    batched = [r for r in rows if r["asked_prompts"]]
    timed = [r for r in rows if "speedup" in r]
    parts = []
    if batched:
        parts.append(f"tokens a round over {span(r['prompts'] for r in batched)} prompts of each set (first turns)")
    if timed:
        what = (
            "speed-up over plain decoding at batch 1"
            if batched
            else "tokens a round and speed-up over plain decoding at batch 1"
        )
        parts.append(f"{what} over {span(r['timed_prompts'] for r in timed)} prompts")
    parts.append(f"at most {span(r['new_tokens'] for r in rows)} tokens an answer")
    return ", ".join(parts)


def span(numbers: Iterable[int]) -> str:
    """A number, or the smallest and largest of several."""
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]}–{found[-1]}"


def measured(rows: Iterable[dict[str, Any]], prompt_set: str = "mt_bench") -> dict[str, Any]:
    """The table of `jaxspec.drafters.measured`, from the timed greedy rows of one prompt set.

    Raises ConfigError when there are none.
    """
    chosen = [r for r in rows if r["set"] == prompt_set and r["temperature"] == 0 and "speedup" in r and r["head_id"]]
    if not chosen:
        raise ConfigError(f"no head was timed greedily on {prompt_set}: run with --timed-prompts and temperature 0")
    kept = ("model", "head", "head_id", "platform", "device", "dtype", *TREE, "accept_length", "speedup", "timed_prompts")
    return {
        "commands": sorted({r["command"] for r in chosen}),
        "prompt_set": prompt_set,
        "rows": [{name: row[name] for name in kept} for row in chosen],
    }
