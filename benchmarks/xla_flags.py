"""Rounds under several settings of XLA: a short burst and a long run of each, with the chip's clock and power beside them.

    PYTHONPATH=. python3 benchmarks/xla_flags.py --rows "eagle3 5/8/64:8" "uno 8/1/8:1" --budget 150 --json out.json

A row is its name in the peer suite and the batch. Every setting has a process of its own, as XLA keeps what autotuning
found for a product as long as the process lives. Where the long run is slower than the burst and the clock falls, the chip
is at its power limit: no flag removes that, fewer or cheaper operations do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from kernels.watch import Watch

from jaxspec.benchmarking.records import write_rows

SETTINGS: dict[str, str] = {
    "default": "",
    "round-graphs": "--xla_gpu_enable_command_buffer=-WHILE,-CONDITIONAL",
    "concurrent": "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT",
    "cublas": "--xla_gpu_enable_triton_gemm=false",
    "cudnn": "--xla_gpu_cudnn_gemm_fusion_level=3",
    "warp-specialization": "--xla_gpu_experimental_enable_triton_warp_specialization=true",
    "serial": "--xla_gpu_command_buffer_scheduling_mode=SERIALIZE",
    "no-fusion-tuning": "--xla_gpu_experimental_enable_fusion_autotuner=false",
    "exhaustive": "--xla_gpu_exhaustive_tiling_search=true",
}
"""Name → what it adds to XLA_FLAGS. The last one takes minutes to compile."""
BURST, LONG = (2, 6), (4, 36)


def per_round(runner, few: int, many: int, repeats: int) -> list[float]:
    """Milliseconds of a round, from pairs of runs."""
    found = []
    for _ in range(repeats):
        shorter = runner(few)
        found.append((runner(many) - shorter) / (many - few) * 1e3)
    return found


def measure(rows: list[str], target: str, context: int, setting: str) -> None:
    """Prints one line of JSON for each row, in this process's setting."""
    from jaxspec import loading
    from jaxspec.benchmarking import rounds, suites
    from jaxspec.runtime import use_compilation_cache

    use_compilation_cache()
    weights = suites.Weights(target, loading.default_dtype())
    for label in rows:
        name, _, batch = label.rpartition(":")
        entry = suites.PEER_ROWS[name]
        case = dataclasses.replace(entry.case, batch=int(batch), context=context)
        batch = rounds.prepare(case, weights.target, weights.draft(entry.draft), LONG[1])
        runner = rounds.Runner(batch, context)
        runner(2)
        bursts = []
        for _ in range(4):
            time.sleep(0.5)  # so that the chip cools down
            bursts += per_round(runner, *BURST, repeats=1)
        with Watch() as watch:
            long = per_round(runner, *LONG, repeats=4)
        result = {
            "row": name,
            "batch": int(batch),
            "context": context,
            "setting": setting,
            "flags": SETTINGS[setting],
            "burst_ms": statistics.median(bursts),
            "long_ms": statistics.median(long),
            "fastest_long_ms": min(long),
            "compile_seconds": runner.compile_seconds,
            **watch.summary(),
        }
        print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["eagle3 5/8/64:8"], help="row of the peer suite, colon, batch")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS)[:6], choices=SETTINGS)
    parser.add_argument("--target", default="llama-3.1-8b")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--budget", type=float, default=150, help="seconds; a setting is not begun that would not be through")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help="measure the one setting in this process")
    args = parser.parse_args()
    if args.here:
        measure(args.rows, args.target, args.context, *args.settings)
        return
    begun, slowest, results = time.perf_counter(), 0.0, []
    for setting in args.settings:
        start = time.perf_counter()
        left = args.budget - (start - begun)
        if left < slowest:
            print(f"{left:.0f} s left of {args.budget:.0f}: {setting} and what follows was not begun", flush=True)
            break
        command = [sys.executable, __file__, "--here", "--settings", setting, "--rows", *args.rows]
        command += ["--target", args.target, "--context", str(args.context)]
        flags = f"{os.environ.get('XLA_FLAGS', '')} {SETTINGS[setting]}".strip()
        try:
            done = subprocess.run(
                command, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, timeout=max(left, 10)
            )
        except subprocess.TimeoutExpired:
            print(f"{setting}: not through in the {left:.0f} s that were left", flush=True)
            break
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"row"')]
        for result in found:
            print(json.dumps(result), flush=True)
        if done.returncode:
            print(f"{setting}: ended with {done.returncode}: {done.stderr[-600:]}", flush=True)
        results += found
        slowest = max(slowest, time.perf_counter() - start)
        if args.json is not None:
            write_rows(args.json, results)


if __name__ == "__main__":
    main()
