"""One command for a machine with a GPU, within a time budget: correctness, attention alone, start-up, rounds, pictures.

    PYTHONPATH=. python3 benchmarks/device_session.py --budget 570 --out "$OUT" --stages tests attention rounds
    PYTHONPATH=. python3 benchmarks/device_session.py --budget 570 --out "$OUT" --stages startup prefill profile rounds \\
        --resume benchmarks/results/h200_round.json

Stages run in the order given; each has a limit of its own and stops cleanly at it or at the budget, whichever is first.
`rounds` writes h200_round.json a row at a time, the most telling first, and goes on where an earlier table, given with
--resume, stopped; put it last, it takes all the time that is left. With `--gpus 2` two processes share its rows, a GPU
each. What cannot be understood is for `bench round`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

LIMITS = {
    "tests": 200,
    "attention": 180,
    "startup": 150,
    "prefill": 60,
    "profile": 120,
    "lossless": 420,
    "bf16": 240,
    "rounds": 3600,
}
"""Seconds that a stage may take at most."""
PROFILED = ("plain", "eagle3 3/1/4")
TAIL = {"tests": 15, "attention": 40, "prefill": 6, "rounds": 60, "lossless": 30, "bf16": 30}


@dataclasses.dataclass(frozen=True)
class Job:
    """A command, the file that its output goes to, and what it adds to XLA's flags."""

    command: list[str]
    log: Path
    flags: str = ""

    def start(self) -> subprocess.Popen:
        """Begins it."""
        environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {self.flags}".strip()}
        with self.log.open("w") as out:
            return subprocess.Popen(self.command, stdout=out, stderr=subprocess.STDOUT, env=environment)


def run(jobs: list[Job], seconds: float) -> int:
    """Runs commands side by side for at most so long. 124: one ran out of time."""
    start, failed = time.perf_counter(), 0
    for job, process in [(job, job.start()) for job in jobs]:
        try:
            code = process.wait(timeout=max(0.0, seconds - (time.perf_counter() - start)))
        except subprocess.TimeoutExpired:
            process.kill()
            code = 124
        failed = failed or code
        print(f"[{code}] {time.perf_counter() - start:.0f} s: {' '.join(job.command)}", flush=True)
    return failed


def stage_jobs(stage: str, args: argparse.Namespace, seconds: float, rest: list[str]) -> list[list[Job]]:
    """What a stage runs in the `seconds` that it has: one list after the other, the jobs of a list side by side."""
    python, out = sys.executable, args.out
    log = out / f"{stage}.log"
    if stage == "tests":
        workers = ["-n", "8"] if importlib.util.find_spec("xdist") else []
        return [[Job([python, "-m", "pytest", "tests/gpu", "-q", *workers], log)]]
    if stage == "attention":
        own = ["--out", str(out / "attention"), "--budget", f"{seconds - 15:.0f}", "--parts", *args.attention_parts]
        return [[Job([python, "benchmarks/kernels/attention.py", *own], log)]]
    if stage == "startup":
        own = ["--target", args.target, "--budget", f"{seconds - 5:.0f}", "--out", str(out / "h200_startup.json")]
        return [[Job([python, "benchmarks/startup.py", *own], log)]]
    if stage == "prefill":
        own = ["--target", args.target, "--lengths", *args.lengths, "--json", str(out / "h200_prefill.json")]
        return [[Job([python, "-m", "jaxspec.bench", "prefill", *own], log)]]
    if stage in ("lossless", "bf16"):
        return [[job] for job in lossless_jobs(stage, args)]
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
            found.append([Job([python, "benchmarks/profile_round.py", *own], out / f"{name}.log", flags)])
        return found
    return [[round_job(args, seconds, rest)]]


def lossless_jobs(stage: str, args: argparse.Namespace) -> list[Job]:
    """Speculative against plain answers: the 8B shape with random weights, and the demo model where its prompts are given."""
    short = stage == "lossless"
    cases = [
        (
            args.target,
            ["--runs", *args.runs, *(["--tokens", "48", "--batch", "1"] if short else ["--tokens", "2500", "--batch", "8"])],
        )
    ]
    if args.prompts is not None:
        many = ["--tokens", "128", "--batch", "8"] if short else ["--tokens", "256", "--batch", "80"]
        cases.insert(0, ("smollm2-135m", ["--prompts", str(args.prompts), *many]))
    common = ["--dtype", "float32" if short else "bfloat16"]
    return [
        Job(
            [
                sys.executable,
                "benchmarks/lossless.py",
                "--target",
                target,
                *own,
                *common,
                "--json",
                str(args.out / f"h200_{stage}_{target}.json"),
            ],
            args.out / f"{stage}_{target}.log",
        )
        for target, own in cases
    ]


def round_job(args: argparse.Namespace, seconds: float, rest: list[str]) -> Job:
    """The peer table; a table of an earlier session is gone on with."""
    path = args.out / "h200_round.json"
    if args.resume is not None:
        shutil.copy(args.resume, path)
    command = [sys.executable, "-m", "jaxspec.bench", "round", "--suite", "peer", "--target", args.target]
    own = ["--detail", "--resume", "--json", str(path), "--budget", f"{seconds - 40:.0f}", "--gpus", str(args.gpus)]
    return Job([*command, *own, *rest], args.out / "rounds.log")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=570, help="seconds for everything (default: 570)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "out"))
    parser.add_argument("--stages", nargs="+", choices=list(LIMITS), default=["tests", "prefill", "profile", "rounds"])
    parser.add_argument("--target", default="llama-3.1-8b", help="a built-in shape")
    parser.add_argument("--lengths", nargs="+", default=["1024", "8192"], help="prompts of the prefill stage, in tokens")
    parser.add_argument("--attention-parts", nargs="+", default=["bandwidth,targets,choices"])
    parser.add_argument(
        "--runs",
        nargs="+",
        default=["eagle3 3/1/4", "standalone 3/1/4"],
        help="algorithms of the stages lossless and bf16, as benchmarks/lossless.py names them",
    )
    parser.add_argument("--prompts", type=Path, help="mt_bench.jsonl: lossless and bf16 run the demo model on it, too")
    parser.add_argument("--gpus", type=int, default=1, help="that share the rows of the stage rounds (default: 1)")
    parser.add_argument("--resume", type=Path, help="a table of an earlier session; its rows are kept and not measured again")
    parser.add_argument("--no-gpu-flags", dest="gpu_flags", action="store_false", help="for a rehearsal on a CPU")
    args, rest = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + args.budget

    failed = 0
    for stage in args.stages:
        stage_end = min(end - 5, time.perf_counter() + LIMITS[stage])
        for jobs in stage_jobs(stage, args, stage_end - time.perf_counter(), rest):
            left = stage_end - time.perf_counter()
            if left < 20:
                print(f"{stage}: {left:.0f} s left, not begun: {jobs[0].log.name}", flush=True)
                continue
            failed |= run(jobs, left)
            for job in jobs:
                lines = job.log.read_text(errors="replace").splitlines()
                print("\n".join(lines[-TAIL.get(stage, 25) :]), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
