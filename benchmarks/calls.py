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
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.benchmarking import shapes
from jaxspec.benchmarking.records import write_rows
from jaxspec.benchmarking.rounds import Runner, at_context, fill_pools
from jaxspec.benchmarking.simulated import SimulatedAcceptance
from jaxspec.engine import kept, programs
from jaxspec.engine import rows as table
from jaxspec.engine.batch import open_batch
from jaxspec.kvcache import join, split
from jaxspec.round import round_step, run_rounds
from jaxspec.runtime import compiled


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
            from jaxspec.tokenizer.tokenizer import Tokenizer

            self.target.tokenizer = Tokenizer(args.tokenizer.read_text())
        draft = None if args.draft == "none" else shapes.random_draft(args.draft, self.target.config, args.dtype)
        steps, topk, nodes = args.tree
        self.how = (
            {"algorithm": "none"}
            if draft is None
            else {"draft": draft, "num_steps": steps, "topk": topk, "num_draft_tokens": nodes}
        )
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
            wall, parts, first = [], [], []
            for repeat in range(2):
                for begin in range(0, 32, size):
                    seconds, results = timed(lambda b=begin, s=size: self.generate(prompts[b : b + s], 64), 1)
                    stats = results[0].stats
                    if repeat:
                        wall.append(seconds)
                        parts.append(stats.prefill_seconds + stats.decode_seconds)
                        first.append(statistics.median(r.stats.time_to_first_token for r in results))
            self.add(
                part="calls",
                batch=size,
                wall_ms=statistics.median(wall) * 1e3,
                first_token_ms=statistics.median(first) * 1e3,
                wall_over_parts=sum(wall) / sum(parts),
                beyond_parts_ms=statistics.median(np.subtract(wall, parts)) * 1e3,
            )
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
            part="programs",
            first_half=halves[0],
            second_half=halves[1],
            programs=counts[0],
            more_in_second_half=len(programs[1] - programs[0]),
            wall_seconds=time.perf_counter() - begun,
        )

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

    def rows_at(self, batch: int, context: int, capacity: int):
        """A `Batch` behind `context` random tokens with a table of `capacity` positions."""
        rows = open_batch(
            self.target,
            [self.prompt(8) for _ in range(batch)],
            max_new_tokens=8,
            ignore_eos=True,
            capacity=capacity,
            **self.how,
        )
        state = at_context(fill_pools(rows.state), context, self.rng.integers(0, 64, (batch, context + 1)))
        pages = state.cache.page_table.shape[1]
        table = jnp.arange(1, 1 + batch * pages, dtype=jnp.int32).reshape(batch, pages)
        rows.state = dataclasses.replace(
            state,
            limit=jnp.full_like(state.limit, capacity),
            capacity=jnp.full_like(state.capacity, pages * 16),
            cache=dataclasses.replace(state.cache, page_table=table),
        )
        if rows.program.drafter.max_accept > 1:
            rows.program = dataclasses.replace(rows.program, verifier=SimulatedAcceptance(3.0))
        return rows

    def widths(self) -> None:
        """A round in tables of several widths."""
        for batch in (1, 8):
            for capacity in (1024, 2048, 4096, 16384):
                runner = Runner(self.rows_at(batch, 512, capacity), 512)
                runner(4)
                seconds = [(runner(36) - runner(4)) / 32 for _ in range(3)]
                self.add(part="widths", batch=batch, capacity=capacity, ms=statistics.median(seconds) * 1e3)
                del runner

    def launches(self) -> None:
        """Four ways to run 64 rounds: one launch; 64 of one round; with orders and a report as programs around each, reports
        read late; with both inside the program of the round."""

        def whole_program(tree, draft_tree, pools, rows, mail, program):
            state = run_rounds(tree, draft_tree, join(pools, table.obey(rows, mail)), program=program)
            pools, rows = split(state)
            return pools, *table.report(rows, 9, 1)

        inside_program = jax.jit(whole_program, static_argnames="program", donate_argnames=("pools", "rows"))
        alone_program = jax.jit(
            lambda tree, draft_tree, pools, rows, program: split(
                round_step(program, tree, draft_tree, join(pools, dataclasses.replace(rows, rounds_left=rows.rounds_left + 1)))
            ),
            static_argnames="program",
            donate_argnames=("pools", "rows"),
        )
        for batch in (1, 8, 64):
            found = self.rows_at(batch, 512, 1024)
            runner = Runner(found, 512)
            runner(4)
            whole = statistics.median([(runner(68) - runner(4)) / 64 for _ in range(3)])
            runner.reset()
            found.allow(1)
            pools, rows = split(found.state)
            args = (found.tree, found.draft_tree)
            one, _ = compiled(programs.rounds_program, *args, pools, rows, program=found.program)
            orders = table.pack_orders(batch, 4 * batch + 4, {}, [], {}, 1)
            obey, _ = compiled(programs.orders_program, rows, orders)
            report, _ = compiled(programs.report_program, rows, window=9, rounds=1)
            alone, _ = compiled(alone_program, *args, pools, rows, program=found.program)
            inside, _ = compiled(inside_program, *args, pools, rows, orders, program=found.program)

            def again(pools, rows):
                length = jnp.full_like(rows.cache.length, 512)
                return pools, dataclasses.replace(rows, cache=dataclasses.replace(rows.cache, length=length))

            def plain(count, pools, rows, alone=alone, args=args):
                for _ in range(count):
                    pools, rows = alone(*args, pools, rows)
                return pools, rows

            def within(count, pools, rows, inside=inside, orders=orders, args=args):
                flights = []
                for _ in range(count):
                    pools, rows, packed = inside(*args, pools, rows, orders)
                    packed.copy_to_host_async()
                    flights.append(packed)
                    if len(flights) > 2:
                        np.asarray(flights.pop(0))
                return pools, rows

            def around(count, pools, rows, one=one, report=report, obey=obey, orders=orders, args=args):
                flights = []
                for _ in range(count):
                    rows = obey(rows, orders)
                    pools, rows = one(*args, pools, rows)
                    rows, packed = report(rows)
                    packed.copy_to_host_async()
                    flights.append(packed)
                    if len(flights) > 2:
                        np.asarray(flights.pop(0))
                return pools, rows

            times = {}
            for name, loop in (("launches_ms", plain), ("around_ms", around), ("inside_ms", within)):
                seconds = []
                for _ in range(4):
                    pools, rows = again(pools, rows)
                    jax.block_until_ready((pools, rows))
                    begun = time.perf_counter()
                    pools, rows = loop(64, pools, rows)
                    jax.block_until_ready(rows)
                    seconds.append((time.perf_counter() - begun) / 64)
                times[name] = statistics.median(seconds[1:]) * 1e3
            self.add(part="launches", batch=batch, loop_of_64_ms=whole * 1e3, **times)
            del found, runner, pools, rows, one, obey, report, alone, inside

    def engine(self) -> None:
        """Rows through Python."""
        for rows in (1, 8, 64):
            with jaxspec.Engine(
                self.target, max_running_requests=rows, max_total_tokens=rows * 1536, context_length=1024, **self.how
            ) as engine:
                prompts = [self.prompt(512) for _ in range(rows)]
                for _ in range(2):  # the second time with what is cached, as below
                    engine.generate(prompts, max_new_tokens=64, ignore_eos=True)
                before, begun = engine.stats(), time.perf_counter()
                results = engine.generate(prompts, max_new_tokens=256, ignore_eos=True)
                wall, after = time.perf_counter() - begun, engine.stats()
                rounds = max(r.stats.rounds for r in results)
                decode = max(r.stats.end_to_end_seconds for r in results) - max(r.stats.time_to_first_token for r in results)
                launches = after.launches_total - before.launches_total
                self.add(
                    part="engine",
                    rows=rows,
                    wall_ms=wall * 1e3,
                    round_ms=decode / rounds * 1e3,
                    rounds=rounds,
                    first_token_ms=statistics.median(r.stats.time_to_first_token for r in results) * 1e3,
                    host_ms_a_launch=(after.host_seconds_total - before.host_seconds_total) / launches * 1e3,
                    waiting_share=(after.device_wait_seconds_total - before.device_wait_seconds_total) / wall,
                )

    def prefix(self) -> None:
        """A prefix hit."""
        length = self.args.prefix
        with jaxspec.Engine(self.target, max_running_requests=4, max_total_tokens=4 * length, **self.how) as engine:
            cold, warm, cached = [], [], []
            for _ in range(4):
                prompt = self.prompt(length)
                cold.append(engine.generate(prompt, max_new_tokens=2, ignore_eos=True).stats.time_to_first_token)
                again = engine.generate(prompt[:-32] + self.prompt(32), max_new_tokens=2, ignore_eos=True).stats
                warm.append(again.time_to_first_token)
                cached.append(again.cached_tokens)
            self.add(
                part="prefix",
                tokens=length,
                cold_ms=statistics.median(cold[1:]) * 1e3,
                hit_ms=statistics.median(warm[1:]) * 1e3,
                cached_tokens=cached[-1],
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", choices=sorted(shapes.MODELS))
    parser.add_argument("--draft", default="eagle3", help="a draft shape, or none (default: eagle3)")
    parser.add_argument("--tree", type=int, nargs=3, default=(3, 1, 4), metavar=("STEPS", "TOPK", "NODES"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, so that answers are decoded as well")
    parser.add_argument("--prefix", type=int, default=8192, help="tokens of `prefix`'s prompts (default: 8192)")
    parser.add_argument("--most", type=int, default=400, help="new tokens of `programs` at most (default: 400)")
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["calls"],
        choices=["calls", "programs", "stream", "widths", "launches", "engine", "prefix"],
    )
    parser.add_argument("--json", type=Path, help="written after every part")
    args = parser.parse_args()
    bench = Bench(args)
    for part in args.parts:
        getattr(bench, part)()
        if args.json is not None:
            write_rows(args.json, bench.rows, target=args.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
