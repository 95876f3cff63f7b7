"""Where the seconds go when programs are compiled: tracing, lowering, XLA's stages, the first run.

    PYTHONPATH=. python3 benchmarks/compile_times.py --target llama-3.1-8b --json compile_times.json

A case is "round:BATCH" or "prefill:CHUNK:BATCH". All cases are compiled by one process, in their order, with an empty
compile cache, and run once with random weights that are made on the device. XLA's stages come from its own log: `passes` over
the program without `tuning` (the choice of each product's and fusion's kernel, with a device by timing), `kernels` to machine
code; the rest of `compile` is mostly loading. `fusions` are those to be chosen for, `known` of them were chosen before,
`tried` are the variants compiled for the others. Settings of XLA are compared by runs under several ``XLA_FLAGS``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from jaxspec.benchmarking.records import write_rows
from jaxspec.config import ConfigError

CASES = ("round:1", "round:8", "prefill:64:1", "prefill:512:1")
SECONDS = ("trace", "lower", "compile", "passes", "tuning", "kernels", "first_run", "second_run")
COUNTS = ("fusions", "known", "tried")
LOG = {
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_CPP_VMODULE": "gpu_compiler=1,hlo_pass_pipeline=1,config_assigner=1,compile_module_to_llvm_ir=1",
}
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_PROGRAM = "jit_(?:run_rounds|prefill_chunk)"
_STAGE = re.compile(rf"(RunHloPasses for|RunBackend for|HLO pass: config-assigner)(?: {_PROGRAM})? time: ([\d.]+) (us|ms|s) ")


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to compile: a round, or with `chunk` the prefill of so many prompt tokens."""

    name: str
    batch: int
    chunk: int | None = None


def parse_case(text: str) -> Case:
    """A case from "round:BATCH" or "prefill:CHUNK:BATCH". Raises ConfigError for anything else."""
    kind, *numbers = text.split(":")
    wanted = {"round": 1, "prefill": 2}.get(kind)
    if wanted != len(numbers) or not all(n.isdecimal() and int(n) for n in numbers):
        raise ConfigError(f"case {text!r} must be round:BATCH or prefill:CHUNK:BATCH with positive numbers")
    return Case(text, int(numbers[-1]), int(numbers[0]) if kind == "prefill" else None)


def begins(case: str) -> str:
    """The line that stands in the log before what XLA says about a case."""
    return f"compile_times: {case} is compiled"


def xla_stages(log: str) -> dict[str, float]:
    """Seconds of XLA's stages and what it tuned, from its log of one program; nothing where it has said nothing."""
    found: dict[str, float] = {}
    for stage, number, unit in _STAGE.findall(log):
        name = {"RunHloPasses for": "passes", "RunBackend for": "kernels"}.get(stage, "tuning")
        found[name] = found.get(name, 0.0) + float(number) * UNITS[unit]
    if "passes" in found:
        found["passes"] -= found.get("tuning", 0.0)
        found["fusions"] = sum(map(int, re.findall(r"Finding configs for (\d+) unique", log)))
        found["known"] = log.count("Using cached config")
        found["tried"] = len(re.findall(r"IR emission for (?!jit_)", log))
    return {name: round(value, 3) for name, value in found.items()}


def timed(function, *args, **kwargs):
    """What a function gives and the seconds that it took."""
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return result, round(time.perf_counter() - start, 3)


class Programs:
    """The cases' arguments on the device, one state for each batch, and their programs."""

    def __init__(self, target: str, row: str, context: int):
        from jaxspec import loading
        from jaxspec.benchmarking import rounds, suites

        if row not in suites.PEER_ROWS:
            raise ConfigError(f"{row!r} is no row of the peer suite; rows: {', '.join(suites.PEER_ROWS)}")
        self.entry, self.context, self._rounds = suites.PEER_ROWS[row], context, rounds
        self.weights = suites.Weights(target, loading.default_dtype())
        self._batches: dict = {}

    def batch(self, case: Case):
        """The case's batch, behind `context` random tokens."""
        if case.batch not in self._batches:
            at = dataclasses.replace(self.entry.case, batch=case.batch, context=self.context)
            draft = self.weights.draft(self.entry.draft)
            self._batches[case.batch] = self._rounds.prepare(at, self.weights.target, draft, max_rounds=8)
        return self._batches[case.batch]

    def arguments(self, case: Case) -> tuple:
        """The traced arguments: one round from the context on, or the prompt's beginning."""
        import jax.numpy as jnp

        batch = self.batch(case)
        batch.allow(1)
        if case.chunk is not None:
            cache = dataclasses.replace(batch.state.cache, length=jnp.zeros_like(batch.state.cache.length))
            batch.state = dataclasses.replace(batch.state, cache=cache)
        return batch.tree, batch.draft_tree, batch.state

    def compile(self, case: Case):
        """The compiled program and its seconds by stage."""
        from jaxspec.prefill import prefill_chunk
        from jaxspec.round import run_rounds
        from jaxspec.runtime import compiler_options

        static = {"program": self.batch(case).program}
        function = run_rounds
        if case.chunk is not None:
            function, static = prefill_chunk, {**static, "chunk": case.chunk}
        traced, trace = timed(function.trace, *self.arguments(case), **static)
        lowered, lower = timed(traced.lower)
        program, seconds = timed(lowered.compile, compiler_options())
        return program, {"trace": trace, "lower": lower, "compile": seconds}

    def run(self, case: Case, program) -> float:
        """Seconds of one run, waiting included; it takes the state over and leaves the next."""
        import jax

        batch = self.batch(case)
        arguments = jax.block_until_ready(self.arguments(case))
        batch.state, seconds = timed(lambda: jax.block_until_ready(program(*arguments)))
        batch.state = self._rounds.at_context(batch.state, self.context)
        return seconds


def child(target: str, row: str, context: int, cases: list[str], threads: int) -> None:
    """Compiles and runs the cases, a line of JSON for each."""
    import jax

    from jaxspec.runtime import use_compilation_cache

    use_compilation_cache()
    programs = Programs(target, row, context)
    parsed = [parse_case(case) for case in cases]
    for case in parsed:
        jax.block_until_ready(programs.batch(case).state)  # what makes weights and states is compiled here
    writing = threading.Lock()

    def one(case: Case) -> None:
        if threads == 1:
            print(begins(case.name), file=sys.stderr, flush=True)
        program, seconds = programs.compile(case)
        with writing:
            seconds["first_run"], seconds["second_run"] = programs.run(case, program), programs.run(case, program)
            print(json.dumps({"case": case.name, **seconds}), flush=True)

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, parsed))
    device = jax.devices()[0]
    everything = round(time.perf_counter() - start, 3)
    print(json.dumps({"all": everything, "device": device.device_kind, "jax": jax.__version__}), flush=True)


def table(rows: list[dict]) -> str:
    """The rows as text, columns that no row has left out."""
    columns = [name for name in (*SECONDS, *COUNTS) if any(name in row for row in rows)]
    lines = [["case", *columns]]
    for row in rows:
        cells = [row.get(name) for name in columns]
        lines.append(
            [
                row["case"],
                *("" if x is None else f"{x:.2f}" if n in SECONDS else str(x) for n, x in zip(columns, cells, strict=True)),
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def measure(args: argparse.Namespace, cache: str) -> dict:
    """A process that compiles the cases, and what it and XLA say about them."""
    command = [sys.executable, __file__, "--child", "--target", args.target, "--row", args.row]
    command += ["--context", str(args.context), "--threads", str(args.threads), "--cases", *args.cases]
    environment = {**os.environ, "JAXSPEC_CACHE": cache, **(LOG if args.threads == 1 else {})}
    with tempfile.TemporaryFile("w+") as log:
        try:
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, timeout=args.budget)
            output, status = done.stdout, done.returncode
        except subprocess.TimeoutExpired as late:
            output, status = (late.stdout or b"").decode(), f"cut off after the budget of {args.budget:.0f} s"
        log.seek(0)
        text = log.read()
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if status:
        print("\n".join(text.splitlines()[-15:]), f"\nthe process ended: {status}", sep="", file=sys.stderr)
    rows = [line for line in lines if "case" in line]
    for row in rows:
        _, marker, behind = text.partition(begins(row["case"]))
        if marker:
            row |= xla_stages(behind.partition("compile_times: ")[0])
    result = {"target": args.target, "row": args.row, "context": args.context, "threads": args.threads}
    result |= {"xla_flags": os.environ.get("XLA_FLAGS", ""), "python": platform.python_version(), "rows": rows}
    for line in lines:
        if "all" in line:
            result |= line
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama-3.1-8b")
    parser.add_argument("--row", default="eagle3 3/1/4", help="of the peer suite (default: %(default)s)")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--threads", type=int, default=1, help="cases compiled at a time; several leave XLA's stages out")
    parser.add_argument("--again", action="store_true", help="a second process with the cache that the first has left")
    parser.add_argument("--budget", type=float, default=150, help="seconds for each process (default: 150)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for case in args.cases:
        parse_case(case)
    if args.threads < 1:
        raise ConfigError(f"--threads {args.threads} must be at least 1")
    if args.child:
        child(args.target, args.row, args.context, args.cases, args.threads)
        return
    results = []
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty", "filled")[: 2 if args.again else 1]:
            results.append({"cache": name, **measure(args, cache)})
            everything = f", all {results[-1]['all']:.1f} s" if "all" in results[-1] else ""
            print(f"{args.target}, {args.row}, {name} cache{everything}", table(results[-1]["rows"]), sep="\n", flush=True)
    if args.json is not None:
        write_rows(args.json, results)


if __name__ == "__main__":
    main()
