"""Attention alone on a GPU: time, GB/s and share of the KV bytes' floor, for both back ends and several tilings.

    python benchmarks/kernels/attention.py --out DIR --budget 200                 # the points that have a target
    python benchmarks/kernels/attention.py --out DIR --parts bandwidth,targets,choices,more,commit,ncu --budget 400

Each part runs in a process of its own and writes DIR/<part>.json after every row: a kernel that crashes or hangs costs its
row, and a part that is started again goes on behind the rows that it has. DIR/attention.json collects all rows.
A row's time is that of one call among many dependent ones inside one jitted loop, over enough distinct pools that none
stays in the L2 cache. As in a model of 32 layers, 32 calls share one preparation of the mask; rows named "own mask" make
every call prepare its own. Floor: bytes of the live keys and values over the read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
import warnings

HERE = pathlib.Path(__file__).resolve()
for folder in (HERE.parent, HERE.parents[2]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from attention_points import choices_part, more_part, ncu_part, pick, targets_part  # noqa: E402
from cache_writes import commit_part  # noqa: E402
from timing import Rows, bandwidth, read_rate  # noqa: E402

from jaxspec.benchmarking.records import write_rows  # noqa: E402

PARTS = {"bandwidth": 25, "targets": 80, "choices": 100, "more": 90, "commit": 30, "ncu": 45}  # seconds at most


def child(part: str, out: pathlib.Path, limit: float):
    """Runs one part in this process."""
    warnings.filterwarnings("ignore", ".*Triton.*", DeprecationWarning)
    rows = Rows(out, part, limit)
    if part == "bandwidth":
        bandwidth(rows)
    else:
        parts = {"targets": targets_part, "choices": choices_part, "more": more_part, "commit": commit_part, "ncu": ncu_part}
        parts[part](rows, out)


NCU_METRICS = (
    "gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,launch__registers_per_thread,"
    "launch__shared_mem_per_block_dynamic,sm__warps_active.avg.per_cycle_active,launch__occupancy_limit_shared_mem"
)


def run_part(part: str, out: pathlib.Path, limit: float):
    """A part in its own process, started again a few times behind a row that killed it."""
    stop = time.time() + limit
    for _ in range(6):
        left = stop - time.time()
        if left < 6:
            return
        command = [sys.executable, __file__, "--out", str(out), "--child", part, "--budget", str(left - 3)]
        if part == "ncu":
            names = "regex:tree_attention|_attention|merge|mosaic|body"
            command = [
                "ncu",
                "--clock-control",
                "none",
                "--csv",
                "--log-file",
                str(out / "ncu.csv"),
                "--metrics",
                NCU_METRICS,
                "-k",
                names,
                *command,
            ]
        env = dict(os.environ, XLA_PYTHON_CLIENT_MEM_FRACTION="0.8", TF_CPP_MIN_LOG_LEVEL="2")
        with open(out / f"{part}.log", "a") as log:
            try:
                process = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=left + 2)
                status = process.returncode
            except (subprocess.TimeoutExpired, OSError) as e:
                status = type(e).__name__
        print(f"[{part}] {status}, {limit - (stop - time.time()):.0f} s", flush=True)
        if status in (0, "TimeoutExpired", "FileNotFoundError") or part == "ncu":
            return


def ncu_table(out: pathlib.Path):
    """Kernels in launch order, as ncu saw them."""
    import csv

    path = out / "ncu.csv"
    if not path.exists():
        return
    launches: dict = {}
    for row in csv.DictReader(x for x in path.read_text().splitlines() if x.startswith('"')):
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"][:40]})
        launch[row["Metric Name"]] = f"{row['Metric Value']} {row['Metric Unit']}"
    print("\nncu, cold caches, in launch order:", " ".join(json.loads((out / "ncu.json").read_text())))
    for launch in launches.values():
        print("  ", launch.pop("kernel"), "; ".join(f"{k.split('.')[0].split('__')[-1]} {v}" for k, v in launch.items()))


def table(out: pathlib.Path):
    """Prints all rows, fastest first within a point, and collects them in attention.json."""
    every, points = [], {}
    for part in PARTS:
        path = out / f"{part}.json"
        for name, row in (json.loads(path.read_text()) if path.exists() else {}).items():
            every.append({"part": part, "name": name, **row})
            if part in ("targets", "choices", "more"):
                words = name.split(" ", 3)
                points.setdefault(" ".join(words[:3]), []).append((words[3], row))
            elif part != "ncu":
                print(f"  {name:24s}", " ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    write_rows(out / "attention.json", every)
    print(f"\nus, GB/s, share of the floor at {read_rate(out) / 1e12:.2f} TB/s; tilings as split(s)/block/rows/warps/stages")
    for point, cells in points.items():
        print(" ", point)
        for name, row in sorted(cells, key=lambda c: c[1].get("us", 1e9)):
            text = row["error"][:90] if "error" in row else f"{row['us']:8.1f} {row['gbps']:6.0f} {row['share']:5.0%}"
            print(f"     {name:32s} {text}")
    for mean, kind in pick(every)[:5]:
        print(f"  16 rows, geometric mean over the points with a target: {mean:5.1%} {kind}")


def main():
    """Parses the command line; see the module's first lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the JSON files")
    parser.add_argument("--parts", default="bandwidth,targets,choices", help=f"which of {', '.join(PARTS)}, in this order")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds in all")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.child:
        child(options.child, out, options.budget)
        return
    stop = time.time() + options.budget
    for part in options.parts.split(","):
        if part not in PARTS:
            parser.error(f"no part {part!r}; there are {', '.join(PARTS)}")
        run_part(part, out, min(PARTS[part], stop - time.time()))
    ncu_table(out)
    table(out)


if __name__ == "__main__":
    main()
