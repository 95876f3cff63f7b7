"""SGLang's rounds on the same machine, and the table that puts ours beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxspec.benchmarking.suites import PEER_ORDER, PEER_ROWS, replace_between

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


BEGIN, END = "<!-- rounds -->", "<!-- /rounds -->"
"""Marks in README between which the table stands."""


def markdown(rows: Sequence[dict]) -> str:
    """Rows of ``h200_round.json`` as a Markdown table: by context, batch and the order of `PEER_ROWS`."""
    names = list(PEER_ROWS)
    known = [row for row in rows if (row["name"], row["batch"], row["context"]) in PEER_ORDER]
    lines = [
        "| round | batch | context | jaxspec | memory floor | SGLang 0.5.17 (GPU busy) | SGLang / jaxspec |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(known, key=lambda row: (row["context"], row["batch"], names.index(row["name"]))):
        key = (row["name"], row["batch"])
        peer = SGLANG_MS.get(key) if row["context"] == 512 else None
        theirs, ratio = "–", "–"
        if peer is not None:
            theirs = f"{peer:.2f}" + (f" ({SGLANG_BUSY_MS[key]:.2f})" if key in SGLANG_BUSY_MS else "")
            ratio = f"{peer / row['ms']:.2f}"
        share = row["floor_ms"] / row["ms"]
        floor = f"{row['floor_ms']:.2f} ms ({share:.0%})"
        cells = (row["name"], row["batch"], row["context"], f"{row['ms']:.2f} ms", floor, theirs, ratio)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def write_readme(path: Path, rows: Sequence[dict]) -> None:
    """Puts the table between README's marks, in one step.

    Raises ConfigError when the file has no such marks.
    """
    replace_between(path, BEGIN, END, markdown(rows))
