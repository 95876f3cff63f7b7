"""One command for a machine with a GPU: correctness first, then every round of the peer table within a time budget.

    PYTHONPATH=. python3 benchmarks/device_session.py --budget 570 --out "$OUT"

Writes h200_round.json (a row at a time, the most telling rows first), gpu_tests.log, the costliest instructions of every
round (round.log), the time to first token (h200_prefill.json) and pictures of rounds in the device loop. A second command
goes on where the first stopped when it is given the first one's table: --resume benchmarks/results/h200_round.json.
Further options go to `bench round`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROFILED = ("plain", "eagle3 3/1/4")


def run(command: list[str], seconds: float, log: Path, flags: str = "") -> int:
    """Runs a command for at most so long; its output goes to the screen's tail and to a file. 124: it ran out of time."""
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    start = time.perf_counter()
    with log.open("w") as out:
        try:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=seconds, env=environment).returncode
        except subprocess.TimeoutExpired:
            code = 124
    print(f"[{code}] {time.perf_counter() - start:.0f} s: {' '.join(command)}", flush=True)
    return code


def tail(path: Path, lines: int) -> None:
    print("\n".join(path.read_text(errors="replace").splitlines()[-lines:]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=570, help="seconds for everything (default: 570)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "out"))
    parser.add_argument("--tests-seconds", type=float, default=150, help="most that the GPU tests may take; 0 leaves them out")
    parser.add_argument("--profile-seconds", type=float, default=140, help="kept back for prefill and pictures; 0: none")
    parser.add_argument("--resume", type=Path, help="a table of an earlier session; its rows are kept and not measured again")
    args, rest = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + args.budget
    table = args.out / "h200_round.json"
    if args.resume is not None:
        shutil.copy(args.resume, table)

    failed = 0
    if args.tests_seconds:
        log = args.out / "gpu_tests.log"
        failed = run([sys.executable, "-m", "pytest", "tests/gpu", "-q"], args.tests_seconds, log)
        tail(log, 15)

    left = end - time.perf_counter() - args.profile_seconds
    log = args.out / "round.log"
    command = [sys.executable, "-m", "jaxspec.bench", "round", "--suite", "peer", "--json", str(table), "--detail"]
    if args.resume is not None:
        command.append("--resume")
    failed |= run([*command, "--budget", f"{left - 25:.0f}", *rest], left + 30, log)

    left = end - time.perf_counter() - 5
    if args.profile_seconds and left > 20:
        command = [sys.executable, "-m", "jaxspec.bench", "prefill", "--target", "llama-3.1-8b", "--lengths", "1024", "8192"]
        prefill = args.out / "prefill.log"
        run([*command, "--json", str(args.out / "h200_prefill.json")], left, prefill)
        tail(prefill, 6)
    for row in PROFILED:
        left = end - time.perf_counter() - 5
        if args.profile_seconds and left > 20:
            name = f"h200_profile_{row.replace(' ', '_').replace('/', '-')}"
            command = [sys.executable, "benchmarks/profile_round.py", "--row", row, "--png", str(args.out / f"{name}.png")]
            picture = args.out / f"{name}.log"
            run([*command, "--json", str(args.out / f"{name}.json")], left, picture,
                "--xla_enable_command_buffers_during_profiling=true")  # fmt: skip
            tail(picture, 22)
    tail(log, 60)
    return failed


if __name__ == "__main__":
    sys.exit(main())
