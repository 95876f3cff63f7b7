"""How long a GPU works in a profiler's trace: the union of all kernels' intervals."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of what some interval (begin, end) covers."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def busy(path: str, cycles: float) -> dict:
    """Milliseconds a cycle of a trace (``.trace.json.gz``, times in microseconds): wall time and time with a kernel running."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X" and e.get("cat") == "kernel"]
    wall = max(end for _, end in kernels) - min(begin for begin, _ in kernels)
    return {
        "cycles": cycles,
        "wall_ms": wall / cycles / 1e3,
        "gpu_busy_ms": union(kernels) / cycles / 1e3,
        "kernels_per_cycle": len(kernels) / cycles,
    }
