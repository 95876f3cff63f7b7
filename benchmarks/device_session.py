"""One command for a machine with a GPU, within a time budget: correctness, attention alone, start-up, rounds, pictures.

    PYTHONPATH=. python3 benchmarks/device_session.py --budget 570 --out "$OUT" --stages tests attention rounds
    PYTHONPATH=. python3 benchmarks/device_session.py --budget 570 --out "$OUT" --stages startup prefill profile rounds \\
        --resume benchmarks/results/h200_round.json

Stages run in the order given; each has a limit of its own and stops cleanly at it or at the budget, whichever is first.
`rounds` writes h200_round.json a row at a time, the most telling first, and goes on where an earlier table, given with
--resume, stopped; put it last, it takes all the time that is left. What cannot be understood is for `bench round`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

LIMITS = {"tests": 150, "attention": 180, "startup": 150, "prefill": 60, "profile": 120, "lossless": 120, "bf16": 90,
          "rounds": 3600}  # fmt: skip
"""Seconds that a stage may take at most."""
PROFILED = ("plain", "eagle3 3/1/4")
TAIL = {"tests": 15, "attention": 40, "prefill": 6, "rounds": 60}


def run(command: list[str], seconds: float, log: Path, flags: str = "") -> int:
    """Runs a command for at most so long; its output goes to a file. 124: it ran out of time."""
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    start = time.perf_counter()
    with log.open("w") as out:
        try:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=seconds, env=environment).returncode
        except subprocess.TimeoutExpired:
            code = 124
    print(f"[{code}] {time.perf_counter() - start:.0f} s: {' '.join(command)}", flush=True)
    return code


def commands(stage: str, args: argparse.Namespace, seconds: float, rest: list[str]) -> list[tuple[list[str], Path, str]]:
    """(command, log, XLA flags) of everything that a stage runs; `seconds` are those that it has."""
    python, out = sys.executable, args.out
    log = out / f"{stage}.log"
    if stage == "tests":
        workers = ["-n", "8"] if importlib.util.find_spec("xdist") else []
        return [([python, "-m", "pytest", "tests/gpu", "-q", *workers], log, "")]
    if stage == "attention":
        own = ["--out", str(out / "attention"), "--budget", f"{seconds - 15:.0f}", "--parts", *args.attention_parts]
        return [([python, "benchmarks/kernels/attention.py", *own], log, "")]
    if stage == "startup":
        own = ["--target", args.target, "--budget", f"{seconds - 5:.0f}", "--out", str(out / "h200_startup.json")]
        return [([python, "benchmarks/startup.py", *own], log, "")]
    if stage == "prefill":
        own = ["--target", args.target, "--lengths", *args.lengths, "--json", str(out / "h200_prefill.json")]
        return [([python, "-m", "jaxspec.bench", "prefill", *own], log, "")]
    if stage in ("lossless", "bf16"):
        own = ["--target", args.target, "--runs", *args.runs, "--json", str(out / f"h200_{stage}.json")]
        if stage == "bf16":  # 20 000 tokens, of which the first that rounding changes are reported
            return [
                ([python, "benchmarks/lossless.py", *own, "--dtype", "bfloat16", "--tokens", "2500", "--batch", "8"], log, "")
            ]
        return [([python, "benchmarks/lossless.py", *own, "--tokens", "48", "--batch", "1"], log, "")]
    if stage == "profile":
        found = []
        for row in PROFILED:
            name = f"h200_profile_{row.replace(' ', '_').replace('/', '-')}"
            own = [
                "--row",
                row,
                "--target",
                args.target,
                "--png",
                str(out / f"{name}.png"),
                "--json",
                str(out / f"{name}.json"),
            ]
            flags = "--xla_enable_command_buffers_during_profiling=true" if args.gpu_flags else ""
            found.append(([python, "benchmarks/profile_round.py", *own], out / f"{name}.log", flags))
        return found
    command = [python, "-m", "jaxspec.bench", "round", "--suite", "peer", "--target", args.target, "--detail", "--resume"]
    return [([*command, "--json", str(out / "h200_round.json"), "--budget", f"{seconds - 40:.0f}", *rest], log, "")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=570, help="seconds for everything (default: 570)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "out"))
    parser.add_argument("--stages", nargs="+", choices=list(LIMITS), default=["tests", "prefill", "profile", "rounds"])
    parser.add_argument("--target", default="llama-3.1-8b", help="a built-in shape")
    parser.add_argument("--lengths", nargs="+", default=["1024", "8192"], help="prompts of the prefill stage, in tokens")
    parser.add_argument("--attention-parts", nargs="+", default=["bandwidth,targets,choices"])
    parser.add_argument("--runs", nargs="+", default=["eagle3 3/1/4", "standalone 3/1/4"],
                        help="algorithms of the stages lossless and bf16, as benchmarks/lossless.py names them")  # fmt: skip
    parser.add_argument("--resume", type=Path, help="a table of an earlier session; its rows are kept and not measured again")
    parser.add_argument("--no-gpu-flags", dest="gpu_flags", action="store_false", help="for a rehearsal on a CPU")
    args, rest = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + args.budget
    if args.resume is not None:
        shutil.copy(args.resume, args.out / "h200_round.json")

    failed = 0
    for stage in args.stages:
        stage_end = min(end - 5, time.perf_counter() + LIMITS[stage])
        for command, log, flags in commands(stage, args, stage_end - time.perf_counter(), rest):
            left = stage_end - time.perf_counter()
            if left < 20:
                print(f"{stage}: {left:.0f} s left, not begun: {log.name}", flush=True)
                continue
            failed |= run(command, left, log, flags)
            lines = log.read_text(errors="replace").splitlines()
            print("\n".join(lines[-TAIL.get(stage, 25) :]), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
