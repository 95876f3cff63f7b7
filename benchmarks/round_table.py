"""The table of rounds beside SGLang's, as Markdown, and a picture of what a round costs as batch, context and tree grow.

python benchmarks/round_table.py benchmarks/results/h200_round.json --png benchmarks/results/h200_rounds.png
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

SGLANG_MS = {
    ("plain", 1): 4.76, ("plain", 4): 4.91, ("plain", 8): 5.03, ("plain", 32): 5.78,
    ("eagle3 3/1/4", 1): 5.91, ("eagle3 3/1/4", 4): 6.10, ("eagle3 3/1/4", 8): 6.22, ("eagle3 3/1/4", 32): 7.67,
    ("eagle3 5/4/8", 1): 7.94, ("eagle3 5/4/8", 8): 8.56, ("eagle3 3/4/16", 1): 6.91, ("eagle3 3/4/16", 8): 8.62,
    ("eagle3 5/8/64", 1): 8.49, ("eagle3 5/8/64", 8): 19.06, ("eagle 5/4/8", 1): 8.60, ("dflash 16", 1): 6.05,
    ("dflash 16", 8): 7.31, ("ngram 16", 1): 7.66, ("ngram 16", 8): 10.66, ("standalone 3/1/4", 1): 10.81,
}  # fmt: skip
"""SGLang 0.5.17 on one H200: (round, batch) → ms at 512-token prompts; same shapes, bf16, random weights, FlashAttention-3,
CUDA graphs, overlapped scheduling. Part of it is host time where trees or a second model are involved."""

SGLANG_BUSY_MS = {
    ("plain", 1): 4.68, ("plain", 8): 4.87, ("eagle3 3/1/4", 1): 5.65, ("eagle3 3/1/4", 8): 6.01, ("eagle3 5/4/8", 1): 7.11,
    ("eagle3 5/4/8", 8): 8.10, ("eagle3 3/4/16", 1): 6.55, ("eagle3 3/4/16", 8): 8.21, ("eagle3 5/8/64", 1): 8.04,
    ("eagle3 5/8/64", 8): 18.32, ("eagle 5/4/8", 1): 8.17, ("dflash 16", 1): 6.05, ("dflash 16", 8): 7.06,
    ("ngram 16", 1): 5.47, ("ngram 16", 8): 7.11,
}  # fmt: skip
"""The same without the time in which its GPU waits: what kernels alone take."""


def markdown(rows: list[dict]) -> str:
    """The rows as a Markdown table, in the order in which they were measured."""
    lines = [
        "| round | batch | context | jaxspec ms | floor ms | floor / time | SGLang ms (GPU busy) | ratio | where the ms go |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        key = (row["name"], row["batch"])
        peer = SGLANG_MS.get(key) if row["context"] == 512 else None
        theirs, ratio = "–", "–"
        if peer is not None:
            theirs = f"{peer:.2f}" + (f" ({SGLANG_BUSY_MS[key]:.2f})" if key in SGLANG_BUSY_MS else "")
            ratio = f"{peer / row['ms']:.2f}"
        spent = sorted(row["parts"].items(), key=lambda item: -item[1]["ms"])
        where = ", ".join(f"{name} {part['ms']:.2f}" for name, part in spent if part["ms"] >= 0.01 * row["ms"])
        lines.append(
            f"| {row['name']} | {row['batch']} | {row['context']} | {row['ms']:.2f} | {row['floor_ms']:.2f} | "
            f"{row['floor_ms'] / row['ms']:.0%} | {theirs} | {ratio} | {where} |"
        )
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
        axes.set(xlabel=label, ylabel="ms a round (dotted: memory floor)", ylim=(0, None))
        axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the table here instead of to the screen")
    args = parser.parse_args()
    rows = json.loads(args.table.read_text())
    if args.markdown is None:
        print(markdown(rows))
    else:
        args.markdown.write_text(markdown(rows) + "\n")
    if args.png is not None:
        plot(rows, args.png)


if __name__ == "__main__":
    main()
