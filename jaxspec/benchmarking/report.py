"""Results as text tables."""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.benchmarking.bandwidth import Bandwidth
from jaxspec.benchmarking.rounds import RoundResult


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned: the first to the left, numbers to the right."""
    cells = [[str(c) for c in row] for row in (header, *rows)]
    width = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, width, strict=True)))
        for row in cells
    ]
    return "\n".join((lines[0], "-" * len(lines[0]), *lines[1:]))


def bandwidth_line(bandwidth: Bandwidth) -> str:
    """The bandwidths of a run in words."""
    return f"memory: copy {bandwidth.copy:.3f} TB/s (bytes read and written), read {bandwidth.read:.3f} TB/s"


def round_report(result: RoundResult) -> str:
    """A round by parts."""
    title = (
        f"{result.name}, batch {result.batch}, context {result.context}: {result.ms:.3f} ms a round (spread "
        f"{result.spread_ms:.3f}), floor {result.floor_ms:.3f} ms ({result.floor_ms / result.ms:.0%}), accept length "
        f"{result.accept_length:.2f}, {result.tokens_per_second:.0f} tokens/s"
    )
    if result.spread_ms > 0.2 * result.ms:
        title += "\nthe repeats differ by more than a fifth: give --rounds more rounds, or more --repeats"
    if not result.parts:
        return title + "\nno parts: the profiler was off or told nothing about the device"
    rows = [
        (
            name,
            f"{p['ms']:.4f}",
            f"{p['ms'] / result.ms:.0%}",
            f"{p['bytes'] / 1e6:.1f}" if p["bytes"] else "",
            f"{p['share']:.0%}" if p["share"] else "",
        )
        for name, p in result.parts.items()
    ]
    return title + "\n" + table(("part", "ms", "of round", "MB to read", "floor/time"), rows)


def summary(results: Sequence[RoundResult]) -> str:
    """One line per round."""
    rows = [
        (
            r.name,
            r.batch,
            r.context,
            f"{r.ms:.3f}",
            f"{r.floor_ms:.3f}",
            f"{r.floor_ms / r.ms:.0%}",
            f"{r.tokens_per_second:.0f}",
            f"{r.parts['gaps']['ms']:.3f}" if r.parts else "",
        )
        for r in results
    ]
    return table(("round", "batch", "context", "ms", "floor ms", "floor/time", "tokens/s", "gaps ms"), rows)
