"""The table of rounds beside SGLang's, and a picture of what a round costs as batch, context and tree grow.

    python benchmarks/round_table.py benchmarks/results/h200_round.json --readme README.md
    python benchmarks/round_table.py benchmarks/results/h200_round.json --png benchmarks/results/h200_rounds.png

The rows come from `python -m jaxspec.bench round --suite peer --json`, SGLang's from `benchmarks/peers`. With neither option
the table is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from readme import replace_between

from jaxspec.benchmarking.records import read_rows
from jaxspec.benchmarking.suites import PEER_ORDER, PEER_ROWS
from jaxspec.config import ConfigError

PEER = Path(__file__).parent / "peers" / "sglang_0.5.17_h200.json"
BEGIN, END = "<!-- rounds -->", "<!-- /rounds -->"
"""Marks in README between which the table stands."""


def round_name(kwargs: dict) -> str:
    """What `PEER_ROWS` calls the round of an SGLang engine with these arguments."""
    algorithm = kwargs.get("speculative_algorithm")
    if algorithm is None:
        return "plain"
    if algorithm == "DFLASH":
        return "dflash 16"  # the block of its draft
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    return f"{algorithm.lower()} {'/'.join(str(kwargs[name]) for name in names if name in kwargs)}"


def peer_rounds(path: Path = PEER) -> dict[tuple[str, int], tuple[float, float | None]]:
    """SGLang's rounds at 512-token prompts: (name, batch) → ms, and ms in which its GPU works (None: not watched).

    Of several runs of a round the best counts. Part of the first number is host time where trees or a second model are
    involved.
    """
    times, working = defaultdict(list), defaultdict(list)
    for run in json.loads(path.read_text())["runs"]:
        if run["env"] and run["engine_kwargs"].get("speculative_algorithm") != "NGRAM":  # simulated acceptance
            continue
        name = round_name(run["engine_kwargs"])
        for cell in run["cells"]:
            if cell.get("prompt") == 512:
                times[name, cell["batch"]].append(statistics.median(cell["ms_per_cycle"]))
        for batch, watched in (run["gpu_profile"] or {}).items():
            working[name, int(batch)].append(watched["gpu_busy_ms"])
    return {key: (min(found), min(working[key], default=None)) for key, found in times.items()}


def markdown(rows: Sequence[dict]) -> str:
    """Rows of the peer suite as a Markdown table: by context, batch and the order of `PEER_ROWS`."""
    names, peers = list(PEER_ROWS), peer_rounds()
    known = [row for row in rows if (row["name"], row["batch"], row["context"]) in PEER_ORDER]
    lines = [
        "| round | batch | context | jaxspec | memory floor | SGLang 0.5.17 (GPU busy) | SGLang / jaxspec |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(known, key=lambda row: (row["context"], row["batch"], names.index(row["name"]))):
        theirs, ratio = "–", "–"
        if row["context"] == 512 and (row["name"], row["batch"]) in peers:
            ms, working = peers[row["name"], row["batch"]]
            theirs = f"{ms:.2f}" + ("" if working is None else f" ({working:.2f})")
            ratio = f"{ms / row['ms']:.2f}"
        share = row["floor_ms"] / row["ms"]
        floor = f"{row['floor_ms']:.2f} ms ({share:.0%})"
        cells = (row["name"], row["batch"], row["context"], f"{row['ms']:.2f} ms", floor, theirs, ratio)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    """Three panels: ms over batch, over context, over the number of verified nodes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def nodes(name: str) -> int | None:
        if name == "plain":
            return 1
        return int(name.rsplit("/", 1)[-1]) if name.startswith("eagle3") else None

    panels = (
        ("batch", lambda r: (r["name"], r["batch"]) if r["context"] == 512 else None),
        ("context", lambda r: (f"{r['name']}, batch {r['batch']}", r["context"])),
        ("nodes verified (EAGLE-3)", lambda r: (f"batch {r['batch']}", nodes(r["name"])) if r["context"] == 512 else None),
    )
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (label, point) in zip(figure.subplots(1, 3), panels, strict=True):
        lines = defaultdict(list)
        for row in rows:
            placed = point(row)
            if placed is not None and placed[1] is not None:
                lines[placed[0]].append((placed[1], row["ms"], row["floor_ms"]))
        for name, points in lines.items():
            if len(points) > 1:
                x, ms, floor = zip(*sorted(points), strict=True)
                (line,) = axes.plot(x, ms, marker="o", label=name)
                axes.plot(x, floor, linestyle=":", color=line.get_color())
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(xlabel=label, ylabel="ms a round (dotted: memory floor)", ylim=(0, None))
        axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--readme", type=Path, help="put the table between this file's marks")
    parser.add_argument("--png", type=Path)
    args = parser.parse_args(arguments)
    rows = read_rows(args.table)
    if not rows:
        raise ConfigError(f"{args.table} holds no rows")
    if args.png is not None:
        plot(rows, args.png)
    if args.readme is not None:
        replace_between(args.readme, BEGIN, END, markdown(rows))
    if args.png is None and args.readme is None:
        print(markdown(rows))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"error: {error}")
