"""A picture of rounds inside the device loop: what the device runs when, and where it waits.

    XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true \\
        python benchmarks/profile_round.py --row "eagle3 3/1/4" --png benchmarks/results/h200_round_profile.png

With the flag CUDA graphs stay on under the profiler, as in real runs; the kernels in them are then known by their own names
only. Prints the busy share and the longest gaps. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxspec import loading
from jaxspec.benchmarking import profile, rounds, suites
from jaxspec.runtime import use_compilation_cache

GROUPS = (
    ("attention", re.compile("attention|kernel_merge|mosaic|partial|custom_call", re.I), "tab:orange"),
    ("products", re.compile("gemm|nvjet|cublas|cutlass|splitk|xmma|dot", re.I), "tab:blue"),
    ("everything else", re.compile(""), "tab:green"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="eagle3 3/1/4", help="a row of the peer suite")
    parser.add_argument("--target", default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4, help="rounds in the picture")
    parser.add_argument("--png", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    use_compilation_cache()
    entry = suites.PEER_ROWS[args.row]
    case = dataclasses.replace(entry.case, batch=args.batch, context=args.context)
    weights = suites.Weights(args.target, loading.default_dtype())
    session = rounds.prepare(case, weights.target, weights.draft(entry.draft), 8 + args.rounds)
    runner = rounds.Runner(session, args.context)
    runner(8)
    unwatched = (runner(8 + args.rounds) - runner(8)) / args.rounds
    found = sorted(runner.record(args.rounds, read=profile.kernels), key=lambda op: op.start)
    if not found:
        raise SystemExit("the profiler reported nothing that ran on the device")
    begin, end = found[0].start, max(op.start + op.seconds for op in found)
    gaps = [g * 1e6 for g in profile.idle_gaps(found)]
    report = {
        "row": args.row, "batch": args.batch, "context": args.context, "rounds": args.rounds,
        "ms_per_round_unwatched": unwatched * 1e3,
        "ms_per_round_watched": (end - begin) / args.rounds * 1e3,
        "busy_ms_per_round": profile.busy_seconds(found) / args.rounds * 1e3,
        "kernels_per_round": len(found) / args.rounds,
        "longest_gaps_us": [round(g, 1) for g in gaps[:10]],
        "gaps_above_20_us": sum(g > 20 for g in gaps),
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    if args.json is not None:
        suites.write_json(args.json, [report])

    figure = Figure(figsize=(14, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    left = found
    for row, (label, pattern, colour) in enumerate(GROUPS):
        here = [op for op in left if pattern.search(op.instruction)]
        left = [op for op in left if not pattern.search(op.instruction)]
        spans = [((op.start - begin) * 1e3, op.seconds * 1e3) for op in here]
        total = sum(op.seconds for op in here) / args.rounds * 1e3
        axes.broken_barh(spans, (row - 0.4, 0.8), color=colour, label=f"{label}: {total:.2f} ms a round")
    axes.set(
        yticks=range(len(GROUPS)), yticklabels=[g[0] for g in GROUPS], xlabel="ms",
        title=f"{args.rounds} rounds of {args.row}, batch {args.batch}, context {args.context}: "
        f"{report['ms_per_round_watched']:.2f} ms each ({unwatched * 1e3:.2f} unwatched), busy "
        f"{report['busy_ms_per_round']:.2f}, longest gap {gaps[0] if gaps else 0:.0f} us",
    )  # fmt: skip
    axes.legend(loc="upper right", fontsize="small")
    figure.savefig(args.png, dpi=150)


if __name__ == "__main__":
    main()
