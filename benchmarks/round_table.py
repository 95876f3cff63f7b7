"""A picture of what a round costs as batch, context and tree grow; the table itself comes from `bench round --readme`.

    python benchmarks/round_table.py benchmarks/results/h200_round.json --png benchmarks/results/h200_rounds.png

Without --png, prints the table beside SGLang's rounds.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

from jaxspec.benchmarking.peers import markdown


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    rows = json.loads(args.table.read_text())
    if args.png is None:
        print(markdown(rows))
    else:
        plot(rows, args.png)


if __name__ == "__main__":
    main()
