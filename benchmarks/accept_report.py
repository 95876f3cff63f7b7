"""Files of measured accept lengths (`jaxspec.benchmarking.accept`): reading them, the README's table, the automatic choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxspec.benchmarking.accept import speed
from jaxspec.benchmarking.records import read_rows
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
SPEED = {
    "asked_timed",
    "timed_prompts",
    "plain_tokens_per_second",
    "tokens_per_second",
    "speedup",
    "median_speedup",
    "plain_round_ms",
    "round_ms",
    "timed_accept_length",
    "repeats",
    "same_tokens",
    "shares",
    "timed_command",
}
"""What a row says of speed."""
BEGIN, END = "<!-- accept lengths -->", "<!-- /accept lengths -->"
"""Marks in README between which the tables stand."""
TITLES = {"mt_bench": "MT-Bench", "gsm8k": "GSM8K", "humaneval": "HumanEval"}


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file; none of a file that is not there.

    Raises ConfigError for another kind of file.
    """
    rows = read_rows(path)
    if any(set(KEY) - set(r) for r in rows):
        raise ConfigError(f"{path} is not a file of accept lengths (rows with {', '.join(KEY)})")
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


def joined(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that several processes measured on shares of the same prompts, as one row each.

    Accept lengths are means over all rounds, speeds sums over all prompts; what single processes found stays beside them
    (``shares``). A row whose prompts one process had is as it was, without its prompt-by-prompt timings.
    """
    found: dict[tuple, dict[tuple, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(key(row), {})[tuple(row.get("share", (0, 1)))] = row
    return [join_shares(list(parts.values())) for parts in found.values()]


def join_shares(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One row from the shares of its prompts. Raises ConfigError for shares of different numbers of processes."""
    kept = {name: value for name, value in parts[0].items() if name not in ("share", "by_prompt")}
    if len(parts) == 1:
        return kept
    numbers = {part["share"][1] if "share" in part else 1 for part in parts}
    if len(numbers) > 1:
        raise ConfigError(f"{parts[0]['row']} on {parts[0]['set']}: shares of {sorted(numbers)} processes cannot be joined")
    rounds = [part["rounds"] for part in parts]
    depth = max(len(part["accept_by_depth"]) for part in parts)
    by_depth = [part["accept_by_depth"] + [0.0] * (depth - len(part["accept_by_depth"])) for part in parts]

    def mean(values: Iterable[float], weights: Sequence[float]) -> float:
        total = sum(weights)
        return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total else 1.0

    kept |= {name: sum(part[name] for part in parts) for name in ("prompts", "completion_tokens", "rounds")}
    kept |= {name: mean([part[name] for part in parts], rounds) for name in ("accept_length", "tokens_per_pass")}
    prompts = [part["prompts"] for part in parts]
    kept["accept_length_by_prompt_mean"] = mean([part["accept_length_by_prompt_mean"] for part in parts], prompts)
    kept["accept_by_depth"] = [mean(column, rounds) for column in zip(*by_depth, strict=True)]
    timed = [part for part in parts if "by_prompt" in part]
    if timed:
        columns = {name: sum((part["by_prompt"][name] for part in timed), []) for name in timed[0]["by_prompt"]}
        kept |= speed(columns) | {"same_tokens": sum(part["same_tokens"] for part in timed), "repeats": timed[0]["repeats"]}
    shown = ("timed_prompts", "speedup", "plain_round_ms", "round_ms") if timed else ("prompts", "accept_length")
    kept["shares"] = [{name: part[name] for name in shown} for part in timed or parts]
    return kept


def completed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each head, tree, set and temperature on a device: the last that was measured.

    Accept lengths over many prompts (``asked_prompts``) and speeds over a few may come from two runs: a row of the first
    kind gets the speed of the second, and its command as ``timed_command``.
    """
    lengths, speeds, order = {}, {}, {}
    for row in rows:
        name = tuple(row[part] for part in KEY if not part.startswith("asked"))
        order[name] = None
        if row["asked_prompts"]:
            lengths[name] = row
        if "speedup" in row:
            speeds[name] = row
    found = []
    for name in order:
        row, timed = lengths.get(name), speeds.get(name)
        if row is not None and timed is not None and timed is not row:
            own = {"timed_command": timed["command"]} | {key: value for key, value in timed.items() if key in SPEED}
            row = {key: value for key, value in row.items() if key not in SPEED} | own
        found.append(timed if row is None else row)
    return found


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


def commands(rows: Iterable[dict[str, Any]]) -> list[str]:
    """What measured them, each command once."""
    return sorted({row[name] for row in rows for name in ("command", "timed_command") if name in row})


def span(numbers: Iterable[int]) -> str:
    """A number, or the smallest and largest of several."""
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]}–{found[-1]}"


def measured(rows: Iterable[dict[str, Any]], prompt_set: str = "mt_bench") -> dict[str, Any]:
    """The table of `jaxspec.drafters.measured`, from the timed greedy rows of one prompt set.

    Of rows that several machines of a platform measured, the one over the most prompts counts.

    Raises ConfigError when there are none.
    """
    chosen = [r for r in rows if r["set"] == prompt_set and r["temperature"] == 0 and "speedup" in r and r["head_id"]]
    if not chosen:
        raise ConfigError(f"no head was timed greedily on {prompt_set}: run with --timed-prompts and temperature 0")
    largest = {
        (r["model"], r["row"], r["head_id"], r["platform"], r["dtype"]): id(r)
        for r in sorted(chosen, key=lambda r: r["timed_prompts"])
    }
    chosen = [r for r in chosen if id(r) in largest.values()]
    kept = ("model", "head", "head_id", "platform", "device", "dtype", *TREE, "accept_length", "speedup", "timed_prompts")
    return {
        "commands": commands(chosen),
        "prompt_set": prompt_set,
        "rows": [{name: row[name] for name in kept} for row in chosen],
    }
