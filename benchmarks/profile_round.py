"""A picture of rounds inside the device loop: what the device runs when, and where it waits.

    XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true \\
        python benchmarks/profile_round.py --row "eagle3 3/1/4" --png benchmarks/results/h200_round_profile.png

Watched twice. With the flag CUDA graphs stay on under the profiler, as in real runs; the kernels in them are then known by
their own names only. The whole loop is one graph, and the profiler keeps the last run of every node of it: one round, whose
length is compared with the time from round to round of an unwatched run; the difference is what lies between rounds.
Without graphs every kernel of all rounds is seen, launched by the host one by one, so that gaps are longer than they really
are. Prints the busy share and the longest gaps of both, and what lies before and behind them.
Any row of the peer suite will do: `--row "uno 8/1/8"`, `--row "eagle3 5/8/64" --batch 8`. `--kernels` adds a table of every
kernel and the kernels of some layers in their order, each with the time since the end of the one before it (negative: they
overlap). The picture needs matplotlib and is left out without `--png`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
from collections import Counter
from pathlib import Path

from jaxspec import loading
from jaxspec.benchmarking import profile, rounds, suites
from jaxspec.benchmarking.records import write_rows
from jaxspec.runtime import use_compilation_cache

GROUPS = (
    ("attention", re.compile("attention|kernel_merge|mosaic|partial", re.I), "tab:orange"),
    ("products", re.compile("gemm|nvjet|cublas|cutlass|splitk|xmma|dot", re.I), "tab:blue"),
    ("adapter", re.compile("lora", re.I), "tab:purple"),
    ("everything else", re.compile(""), "tab:green"),
)
LONG_GAP = 20e-6
"""Seconds of idleness from which the picture shows a gap and says what lies before and behind it."""
NAMED = 24  # gaps that get a label, the longest ones
UNWATCHED = 32  # rounds that are timed without the profiler
IN_ORDER = 60
"""Kernels that `--kernels` lists one by one: a third of the way into a round, so that layers of a draft pass are among them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="eagle3 3/1/4", help="a row of the peer suite")
    parser.add_argument("--target", default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4, help="rounds in the picture")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--kernels", action="store_true", help="print a table of kernels for each way of watching")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    use_compilation_cache()
    entry = suites.PEER_ROWS[args.row]
    case = dataclasses.replace(entry.case, batch=args.batch, context=args.context)
    weights = suites.Weights(args.target, loading.default_dtype())
    batch = rounds.prepare(case, weights.target, weights.draft(entry.draft), 8 + UNWATCHED)
    runner = rounds.Runner(batch, args.context)
    runner(8)
    unwatched = statistics.median((runner(8 + UNWATCHED) - runner(8)) / UNWATCHED for _ in range(5))
    found = {graphs: watch(runner, args.rounds, graphs) for graphs in (True, False)}
    found = {graphs: ops for graphs, ops in found.items() if ops}
    counts = dict.fromkeys(found, args.rounds)
    if True in found and (behind := last_round(found[True], unwatched)):
        found[True], counts[True] = behind, 1
    if not found:
        raise SystemExit("the profiler reported nothing that ran on the device")
    reports = [
        {
            "row": args.row,
            "batch": args.batch,
            "context": args.context,
            "rounds": counts[graphs],
            "cuda_graphs": graphs,
            "ms_per_round_unwatched": unwatched * 1e3,
            **summary(ops, counts[graphs]),
        }
        for graphs, ops in found.items()
    ]
    for report in reports:
        if report["cuda_graphs"] and report["rounds"] == 1:
            report["us_between_rounds"] = (report["ms_per_round_unwatched"] - report["ms_per_round_watched"]) * 1e3
    if args.kernels:
        for (graphs, ops), report in zip(found.items(), reports, strict=True):
            report["kernels"], report["in_order"] = by_kernel(ops, counts[graphs]), in_order(ops, counts[graphs])
            print(f"{args.row}, CUDA graphs {'on' if graphs else 'off'}: kernel, times a round, us each, us a round")
            for name, times, each in report["kernels"]:
                print(f"{name:50s} {times:7.1f} {each:8.2f} {times * each:9.1f}")
            print("in order: kernel, us since the end of the one before, us")
            for name, gap, took in report["in_order"]:
                print(f"{name:50s} {gap:8.2f} {took:8.2f}")
    short_reports = [{k: v for k, v in report.items() if k not in ("kernels", "in_order")} for report in reports]
    print(json.dumps(short_reports, indent=1))
    if args.json is not None:
        write_rows(args.json, reports)
    if args.png is not None:
        draw(args.png, list(found.values()), reports)


def watch(runner: rounds.Runner, count: int, graphs: bool) -> list[profile.Operation]:
    """What the device ran, in the order of time; nothing where this way of watching fails."""
    try:
        return sorted(runner.record(count, graphs=graphs, read=profile.kernels), key=lambda op: op.start)
    except Exception as error:  # the other way may work
        print(f"cuda graphs {graphs}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return []


def last_round(found: list[profile.Operation], period: float) -> list[profile.Operation]:
    """What lies behind a gap of over half a round: the last round of a loop that is one graph; empty without such a gap."""
    gap = max(profile.idle_gaps(found), key=lambda gap: gap.seconds, default=None)
    if gap is None or gap.seconds < period / 2:
        return []
    return [op for op in found if op.start > gap.start]


def summary(found: list[profile.Operation], count: int) -> dict:
    """Times and gaps of `count` rounds; few kernels a round say that the profiler saw whole graphs only."""
    begin, end = found[0].start, max(op.start + op.seconds for op in found)
    gaps = profile.idle_gaps(found)
    long = [gap for gap in gaps if gap.seconds > LONG_GAP]
    places = Counter((gap.after, gap.before) for gap in long)
    idle = Counter()
    for gap in long:
        idle[gap.after, gap.before] += gap.seconds
    return {
        "ms_per_round_watched": (end - begin) / count * 1e3,
        "busy_ms_per_round": profile.busy_seconds(found) / count * 1e3,
        "kernels_per_round": len(found) / count,
        "idle_ms_per_round": sum(gap.seconds for gap in gaps) / count * 1e3,
        "longest_gaps_us": [round(gap.seconds * 1e6, 1) for gap in gaps[:10]],
        "gaps_above_20_us": len(long),
        "where": [
            {"after": after, "before": before, "times": places[after, before], "us_each": seconds / places[after, before] * 1e6}
            for (after, before), seconds in idle.most_common(12)
        ],
    }


def by_kernel(found: list[profile.Operation], count: int) -> list[tuple[str, float, float]]:
    """(name, times a round, microseconds each) of every kernel, the costliest first."""
    times, seconds = Counter(), Counter()
    for op in found:
        name = short(op.instruction)  # layers share their kernels; a number in a name tells different ones apart
        times[name] += 1
        seconds[name] += op.seconds
    return [(name, times[name] / count, total / times[name] * 1e6) for name, total in seconds.most_common()]


def in_order(found: list[profile.Operation], count: int) -> list[tuple[str, float, float]]:
    """(name, microseconds since the end of the kernel before, its own) of `IN_ORDER` kernels of the first round."""
    first = len(found) // count // 3
    pairs = zip(found[first - 1 :], found[first : first + IN_ORDER], strict=False)
    return [(short(b.instruction), (b.start - a.start - a.seconds) * 1e6, b.seconds * 1e6) for a, b in pairs]


def short(name: str) -> str:
    """The end of an instruction's or a kernel's name, without the arguments of a C++ function."""
    return name.partition("(")[0][-32:]


def draw(path: Path, found: list[list[profile.Operation]], reports: list[dict]) -> None:
    """One panel for each way of watching."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.4 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, ops, report in zip(figure.subplots(len(found), squeeze=False)[:, 0], found, reports, strict=True):
        begin, left = ops[0].start, ops
        for row, (label, pattern, colour) in enumerate(GROUPS):
            here = [op for op in left if pattern.search(op.instruction)]
            left = [op for op in left if not pattern.search(op.instruction)]
            spans = [((op.start - begin) * 1e3, op.seconds * 1e3) for op in here]
            total = sum(op.seconds for op in here) / report["rounds"] * 1e3
            axes.broken_barh(spans, (row - 0.4, 0.8), color=colour, label=f"{label}: {total:.2f} ms a round")
        for i, gap in enumerate(g for g in profile.idle_gaps(ops) if g.seconds > LONG_GAP):
            start = (gap.start - begin) * 1e3
            axes.axvspan(start, start + gap.seconds * 1e3, color="tab:red", alpha=0.3, linewidth=0)
            if i < NAMED:
                label = f"{gap.seconds * 1e6:.0f} us: {short(gap.after)} … {short(gap.before)}"
                side = "right" if gap.start - begin > (ops[-1].start - begin) / 2 else "left"
                axes.text(start, len(GROUPS) - 0.3 + 0.45 * (i % 6), label, fontsize="x-small", color="tab:red", ha=side)
        axes.set_ylim(-0.6, len(GROUPS) + 2.5)
        longest = report["longest_gaps_us"][0] if report["longest_gaps_us"] else 0
        axes.set(
            yticks=range(len(GROUPS)),
            yticklabels=[g[0] for g in GROUPS],
            xlabel="ms",
            title=f"{report['rounds']} round(s) of {report['row']}, batch {report['batch']}, context {report['context']}, CUDA "
            f"graphs {'on' if report['cuda_graphs'] else 'off'}: {report['ms_per_round_watched']:.2f} ms each "
            f"({report['ms_per_round_unwatched']:.2f} unwatched), busy {report['busy_ms_per_round']:.2f}, "
            f"longest gap {longest:.0f} us",
        )
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
