"""What a user waits for around the rounds: host work of a call, first tokens, compiling, on random weights of a built-in shape.

    python benchmarks/calls.py --target smollm2-135m --draft eagle3 --parts calls programs stream --json FILE
    python benchmarks/calls.py --target llama-3.1-8b --draft eagle3 --parts programs widths engine

calls     32 prompts of mixed lengths one at a time and in batches of 8, and a batch of 8 prompts of 60 … 750 tokens: wall time
          from the call, first token, and what the wall time has beyond prefill and decoding
programs  40 prompts of 40 lengths (5 … 1500) with 16 … 400 new tokens, alone and in batches of 1 … 8: programs and seconds
stream    one round a chunk beside one loop
widths    a round at 512 committed tokens in tables of several widths
launches  a round by itself, and with the small programs that an engine puts around it (serving.md 10.1)
engine    an `Engine` with 1, 8 and 64 rows, wall time a round
prefix    first token of an 8192-token prompt, cold and when its pages are cached
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np

import jaxspec
from jaxspec.benchmarking import shapes
from jaxspec.engine import kept

ROOT = Path(__file__).resolve().parents[1]


def timed(call, repeats: int) -> tuple[float, list]:
    """Median wall seconds of a call and the results of the last one."""
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        results = call()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds), results


class Bench:
    """A target with a draft, and what is asked of them."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.target = shapes.random_model(args.target, args.dtype)
        if args.tokenizer is not None:
            from jaxspec.conversion.tokenizer import Tokenizer

            tokenizer = Tokenizer.from_file(args.tokenizer) if hasattr(Tokenizer, "from_file") else None
            self.target.tokenizer = tokenizer
        draft = None if args.draft == "none" else shapes.random_draft(args.draft, self.target.config, args.dtype)
        steps, topk, nodes = args.tree
        self.how = {"algorithm": "none"} if draft is None else {
            "draft": draft, "num_steps": steps, "topk": topk, "num_draft_tokens": nodes
        }  # fmt: skip
        self.rng = np.random.default_rng(0)
        self.rows: list[dict] = []

    def prompt(self, length: int) -> list[int]:
        """Random ids."""
        return self.rng.integers(0, self.target.config.vocab_size, length).tolist()

    def generate(self, prompts, new, **options):
        """`jaxspec.generate` past stop ids."""
        return jaxspec.generate(self.target, prompts, max_new_tokens=new, ignore_eos=True, **self.how, **options)

    def add(self, **row) -> None:
        """Prints and keeps a result."""
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def calls(self) -> None:
        """Host work."""
        lengths = self.rng.integers(20, 400, 32).tolist()
        prompts = [self.prompt(n) for n in lengths]
        self.generate(prompts[:1], 64), self.generate(prompts[:8], 64)
        for size in (1, 8):
            wall, parts, first, host = [], [], [], []
            for repeat in range(2):
                for begin in range(0, 32, size):
                    seconds, results = timed(lambda b=begin, s=size: self.generate(prompts[b : b + s], 64), 1)
                    stats = results[0].stats
                    if repeat:
                        wall.append(seconds)
                        parts.append(stats.prefill_seconds + stats.decode_seconds)
                        first.append(statistics.median(r.stats.time_to_first_token for r in results))
            self.add(
                part="calls", batch=size, wall_ms=statistics.median(wall) * 1e3, first_token_ms=statistics.median(first) * 1e3,
                wall_over_parts=sum(wall) / sum(parts), beyond_parts_ms=statistics.median(np.subtract(wall, parts)) * 1e3,
            )  # fmt: skip
        mixed = [self.prompt(int(n)) for n in np.linspace(60, 750, 8)]
        one = self.prompt(sum(map(len, mixed)))
        hundred = self.prompt(100)
        for name, asked in (("100 tokens", [hundred]), ("8 mixed", mixed), ("their tokens in one row", [one])):
            self.generate(asked, 1)
            wall, results = timed(lambda a=asked: self.generate(a, 1), 9)
            stats = results[0].stats
            self.add(part="first token", prompts=name, wall_ms=wall * 1e3, first_token_ms=stats.time_to_first_token * 1e3)

    def programs(self) -> None:
        """Compiling."""
        lengths = np.linspace(5, 1500, 40).astype(int)
        self.rng.shuffle(lengths)
        news = np.linspace(16, 400, 40).astype(int)
        self.rng.shuffle(news)
        kept.forget()
        halves = [{"seconds": 0.0, "calls": 0, "over_1_s": 0} for _ in range(2)]
        programs: list[set] = [set(), set()]
        begun = time.perf_counter()
        jobs = [[i] for i in range(40)] + [[(7 * i + j) % 40 for j in range(1 + i % 8)] for i in range(40)]
        order = [job for pair in zip(jobs[:40], jobs[40:], strict=True) for job in pair]
        for number, job in enumerate(order):
            half = halves[number >= len(order) // 2]
            results = self.generate(
                [self.prompt(int(lengths[i])) for i in job], [int(min(news[i], self.args.most)) for i in job]
            )
            compiled = results[0].stats.compile_seconds
            half["calls"] += 1
            half["seconds"] += compiled
            half["over_1_s"] += compiled > 1
            for memory in kept.everything():
                programs[number >= len(order) // 2] |= {(f.__name__, key) for f, key in memory.executables}
        counts = [{kind: sum(n == kind for n, _ in found) for kind in sorted({n for n, _ in found})} for found in programs]
        self.add(
            part="programs", first_half=halves[0], second_half=halves[1], programs=counts[0],
            more_in_second_half=len(programs[1] - programs[0]), wall_seconds=time.perf_counter() - begun,
        )  # fmt: skip

    def stream(self) -> None:
        """One round a chunk."""
        prompt, new = self.prompt(200), 128
        self.generate([prompt], new)
        list(jaxspec.stream(self.target, [prompt], max_new_tokens=new, ignore_eos=True, **self.how))
        _, results = timed(lambda: self.generate([prompt], new), 5)
        stats = results[0].stats
        loop = stats.decode_seconds / max(stats.rounds, 1)
        seconds = []
        for _ in range(5):
            *_, last = jaxspec.stream(self.target, [prompt], max_new_tokens=new, ignore_eos=True, **self.how)
            seconds.append(last.result.stats.decode_seconds / max(last.result.stats.rounds, 1))
        chunk = statistics.median(seconds)
        self.add(part="stream", loop_ms=loop * 1e3, chunk_ms=chunk * 1e3, ratio=chunk / loop)

    def widths(self) -> None:
        """A round in tables of several widths."""
        from jaxspec.engine.batch import open_batch

        for batch in (1, 8):
            for capacity in (640, 1024, 2048, 4096, 8192, 16384):
                if capacity + 8 > self.target.config.max_positions and capacity > 640:
                    continue
                rows = open_batch(
                    self.target, [self.prompt(8) for _ in range(batch)], max_new_tokens=8, ignore_eos=True, capacity=capacity,
                    **self.how,
                )  # fmt: skip
                from jaxspec.benchmarking.rounds import Runner, at_context, fill_pools

                rows.state = at_context(fill_pools(rows.state), 512, self.rng.integers(0, 64, (batch, 513)))
                import dataclasses

                rows.state = dataclasses.replace(rows.state, limit=rows.state.limit * 0 + capacity)
                table = np.arange(1, 1 + batch * rows.state.cache.page_table.shape[1]).reshape(batch, -1).astype(np.int32)
                rows.state = dataclasses.replace(
                    rows.state, capacity=rows.state.capacity * 0 + capacity + 64,
                    cache=dataclasses.replace(rows.state.cache, page_table=jax.numpy.asarray(table)),
                )  # fmt: skip
                runner = Runner(rows, 512)
                runner(4)
                seconds = [(runner(36) - runner(4)) / 32 for _ in range(3)]
                self.add(part="widths", batch=batch, capacity=capacity, ms=statistics.median(seconds) * 1e3)
                del rows, runner


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", choices=sorted(shapes.MODELS))
    parser.add_argument("--draft", default="eagle3", help="a draft shape, or none (default: eagle3)")
    parser.add_argument("--tree", type=int, nargs=3, default=(3, 1, 4), metavar=("STEPS", "TOPK", "NODES"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, so that answers are decoded as well")
    parser.add_argument("--most", type=int, default=400, help="new tokens of `programs` at most (default: 400)")
    parser.add_argument(
        "--parts", nargs="+", default=["calls"],
        choices=["calls", "programs", "stream", "widths", "launches", "engine", "prefix"],
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="written after every part")
    args = parser.parse_args()
    bench = Bench(args)
    for part in args.parts:
        getattr(bench, part)()
        if args.json is not None:
            report = {
                "command": " ".join(["python", "benchmarks/calls.py", *sys.argv[1:]]), "jax": jax.__version__,
                "device": jax.devices()[0].device_kind, "target": args.target, "rows": bench.rows,
            }  # fmt: skip
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
