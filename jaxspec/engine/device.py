"""The compiled programs of an engine and the state they work on: the only place that launches anything.

Pools and rows are separate arguments, and only programs that compute with the model see the pools; what joins, leaves or
moves is rows. Nothing here waits for the device but `Flight.result`.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxspec.engine import rows as table
from jaxspec.engine.messages import Admission, Launch, Limits, Orders, Prefill, Report, RowReport
from jaxspec.engine.rows import Layout
from jaxspec.fused_attention import Implementation
from jaxspec.kvcache import LayerKV, init_layers, join, pages_for, split
from jaxspec.models import decoder
from jaxspec.round import Program, prefill_step, run_rounds
from jaxspec.runtime import announced, check_memory, compiled

ADMISSIONS = (1, 8)
"""Rows that one program of admissions puts into the table."""


@partial(jax.jit, static_argnames="program", donate_argnames=("pools", "rows"))
def rounds_program(params, draft_params, pools, rows, *, program: Program):
    """Rounds on the table until no row takes part any more."""
    return split(run_rounds(params, draft_params, join(pools, rows), program=program))


@partial(jax.jit, static_argnames=("program", "chunk", "fresh", "ends"), donate_argnames=("pools", "rows"))
def prefill_program(params, draft_params, pools, rows, continued, *, program: Program, chunk: int, fresh, ends: int):
    """`round.prefill_step` on rows from `rows.take_blocks`."""
    with decoder.full_precision(params):
        return split(prefill_step(program, params, draft_params, join(pools, rows), chunk, fresh, continued, ends))


@partial(jax.jit, static_argnames=("layout", "program", "batch", "dtype"))
def empty_program(draft_params, *, layout: Layout, program: Program, batch: int, dtype: str):
    """A table of empty rows."""
    draft = drafter_rows(program, draft_params, layout, batch, dtype)
    return table.empty_rows(layout, batch, no_pools(program), draft)


@partial(jax.jit, static_argnames=("layout", "program", "dtype"), donate_argnames="rows")
def admit_program(draft_params, rows, mail, *, layout: Layout, program: Program, dtype: str):
    """`rows.admit`, the drafter's state fresh."""
    return table.admit(layout, rows, mail, drafter_rows(program, draft_params, layout, mail.shape[0], dtype))


@partial(jax.jit, static_argnames=("program", "num_pages", "page_size", "dtype"))
def pools_program(draft_params, *, program: Program, num_pages: int, page_size: int, dtype: str):
    """Zeroed pools: the target's, then the drafter's."""
    c = program.config
    layers = init_layers(c.num_layers, num_pages, page_size, c.num_kv_heads, c.key_head_dim, c.value_head_dim, dtype)
    return layers + split(program.drafter.init(draft_params, 1, num_pages, page_size, page_size, dtype))[0]


orders_program = jax.jit(table.obey, donate_argnames="rows")
regroup_program = jax.jit(table.regroup)
take_program = jax.jit(table.take_blocks)
put_program = jax.jit(table.put_blocks, donate_argnames="rows")
report_program = jax.jit(table.report, static_argnames=("window", "rounds"), donate_argnames="rows")


def pool_bytes(program: Program, draft_tree: Any, num_pages: int, page_size: int, dtype: str) -> int:
    """Bytes of pools of that many pages."""
    static = {"program": program, "num_pages": num_pages, "page_size": page_size, "dtype": dtype}
    shapes = jax.eval_shape(partial(pools_program, **static), draft_tree)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def no_pools(program: Program) -> tuple[LayerKV, ...]:
    """Empty pools in the places of the target's."""
    return (LayerKV(None, None),) * program.config.num_layers


def drafter_rows(program: Program, draft_params: Any, layout: Layout, batch: int, dtype: str) -> Any:
    """A drafter's state of `batch` fresh rows, with empty pools."""
    return split(program.drafter.init(draft_params, batch, 1, layout.page_size, layout.max_len, dtype))[1]


COMPILERS = 4
"""Programs that are compiled at once."""

LAUNCHES = threading.RLock()
"""Held by whoever compiles or launches: a program's first run on a GPU records a graph, during which no other thread may
launch anything (`cudaErrorStreamCaptureUnjoined`)."""


class Memory:
    """The page pools of a target and a drafter, and the programs that were compiled for them.

    Attributes:
      tree, draft_tree: the parameters.
      program: the static half of its programs, of any sampling class.
      page_size, num_pages: of the pools, the scratch page counted.
      dtype: the pools' type, that of the target's embedding.
      pools: the arrays, replaced at each launch; the target's first.
      compiled: when a program had been compiled (`time.perf_counter`), and the seconds that it took.
    """

    def __init__(self, tree: Any, draft_tree: Any, program: Program, *, page_size: int, num_pages: int):
        """Zeroed pools. Raises PoolTooLarge if they do not fit."""
        self.tree, self.draft_tree, self.program = tree, draft_tree, program
        self.page_size, self.num_pages = page_size, num_pages
        self.dtype = str(tree["embedder"]["embedding"].dtype)
        self.compiled: list[tuple[float, float]] = []
        self.executables: dict[Any, Any] = {}
        self.static = {"program": program, "num_pages": num_pages, "page_size": page_size, "dtype": self.dtype}
        self.bytes = pool_bytes(program, draft_tree, num_pages, page_size, self.dtype)
        self.pools: tuple[LayerKV, ...] | None = None
        self.zero()

    def zero(self) -> None:
        """Zeroed pools in place of what is there."""
        self.pools = None
        check_memory(self.bytes, f"{(self.num_pages - 1) * self.page_size} positions in all")
        with LAUNCHES:
            self.pools = pools_program(self.draft_tree, **self.static)

    def use(self, draft_tree: Any) -> None:
        """Takes other parameters of the drafter; programs stay if shapes do."""
        kind = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (self.draft_tree, draft_tree)]
        if kind[0] != kind[1]:
            self.executables.clear()
        self.draft_tree = draft_tree

    def compile_seconds(self, begin: float, end: float = math.inf) -> float:
        """Spent on compiling between two readings of `time.perf_counter`."""
        return sum(seconds for at, seconds in self.compiled if begin <= at <= end)

    def run(self, function, key: Any, *args, **static) -> Any:
        """Runs a jitted function, compiled once for `key`, which must tell all its shapes and static arguments apart."""
        program = self.executables.get((function, key))
        if program is None:
            program = self.compile([(function, key, args, static)])[0]
        return program(*args)

    def compile(self, wanted: list[tuple[Any, Any, tuple, dict]]) -> list[Any]:
        """Compiles what is missing of (function, key, arguments or their shapes, static arguments), all of it at once."""
        missing = [(f, key, args, static) for f, key, args, static in wanted if (f, key) not in self.executables]
        if missing:
            begun = time.perf_counter()
            with announced([f.__name__ for f, *_ in missing]), ThreadPoolExecutor(COMPILERS) as pool:
                jobs = [pool.submit(compiled, f, *args, **static) for f, _, args, static in missing]
                made = [job.result() for job in jobs]
            self.executables |= {(f, key): program for (f, key, *_), (program, _) in zip(missing, made, strict=True)}
            if any(seconds for _, seconds in made):
                now = time.perf_counter()
                self.compiled.append((now, now - begun))
        return [self.executables[f, key] for f, key, *_ in wanted]


class Flight:
    """A report under way. Its copy to the host begins at once."""

    def __init__(self, kind: str, packed: jax.Array):
        self.kind, self.packed = kind, packed
        packed.copy_to_host_async()

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        return self.packed.is_ready()

    def result(self) -> Report:
        """Waits for the launch and reads what it did."""
        data = np.asarray(self.packed)
        fixed = len(table.HEADER)
        window = (data.shape[1] - fixed) // 4
        rows = []
        for line in data:
            length, done, stopped, rounds, proposed, count = line[:fixed].tolist()
            tokens, from_draft, round_of, upto = (line[fixed + i * window :][:count] for i in range(4))
            rows.append(
                RowReport(
                    length=length,
                    done=bool(done),
                    stopped=bool(stopped),
                    tokens=tokens.tolist(),
                    from_draft=from_draft.astype(bool),
                    round_of=round_of,
                    proposed_upto=upto,
                    rounds=rounds,
                    proposed=proposed,
                )  # fmt: skip
            )
        return Report(self.kind, rows)


class Device:
    """A table of rows over a `Memory`: the `Device` that `engine.core` drives.

    Attributes:
      limits: what the scheduler must know.
      layout: sizes of the rows.
      rows: the table; None before the first launch.
      bucket: how many rows it has.
      rounds: what `rounds_left` of every row is between launches.
    """

    def __init__(self, memory: Memory, limits: Limits, long: Implementation | None = None, rounds: int = 1):
        """A table without rows.

        Args:
          memory: pools and programs.
          limits: sizes that may be asked for.
          long: how `Prefill.long` attends.
          rounds: what launches usually ask for.
        """
        self.memory, self.limits, self.long = memory, limits, long
        slack = memory.program.drafter.slack
        self.layout = Layout(limits.max_len, pages_for(limits.max_len + slack, memory.page_size), memory.page_size)
        self.rows, self.bucket, self.rounds = None, 0, rounds

    @property
    def program(self) -> Program:
        """The static half of the programs."""
        return self.memory.program

    def reset(self) -> None:
        """Forgets every row and zeroes the pools: after a launch that raised, whose arguments may be gone."""
        self.rows, self.bucket = None, 0
        self.memory.zero()

    def launch(self, launch: Launch) -> list[Flight]:
        """Starts everything that `launch` says, in its order; returns a report for the prefills and one for the rounds."""
        with LAUNCHES:
            flights = []
            self._arrange(launch)
            if launch.orders.finish or launch.orders.grants or launch.orders.capacity:
                self._orders(launch.orders, table.KEEP)
            if launch.rounds and launch.rounds != self.rounds:
                self._orders(Orders(), launch.rounds)
                self.rounds = launch.rounds
            self._admit(launch.admissions)
            if launch.prefills:
                self._compile_ahead(launch)
            for prefill in launch.prefills:
                self._prefill(prefill, launch.sampling_class)
            if launch.prefills:
                flights.append(self._report("prefill"))
            if launch.rounds:
                self._rounds(launch.sampling_class)
                flights.append(self._report("rounds"))
            return flights

    def _run(self, function, key: Any, *args, **static) -> Any:
        return self.memory.run(function, (self.layout, self.bucket, key), *args, **static)

    @property
    def _row_arguments(self) -> dict[str, Any]:
        return {"layout": self.layout, "program": self.program, "dtype": self.memory.dtype}

    def _arrange(self, launch: Launch) -> None:
        if self.rows is None:
            self.bucket = launch.bucket
            self.rows = self._run(empty_program, None, self.memory.draft_tree, batch=self.bucket, **self._row_arguments)
        elif launch.moves is not None:
            moves = np.asarray(launch.moves, np.int32)
            self.rows = self._run(regroup_program, launch.bucket, self.rows, moves)
            self.bucket = launch.bucket

    def _orders(self, orders: Orders, rounds: int) -> None:
        size = 4 * self.bucket + 4
        grants = list(orders.grants)
        for start in range(0, max(len(grants), 1), size):
            first = start == 0
            mail = table.pack_orders(
                self.bucket, size, orders.finish if first else {}, grants[start : start + size],
                orders.capacity if first else {}, rounds,
            )  # fmt: skip
            self.rows = self._run(orders_program, None, self.rows, mail)

    def _admit(self, admissions: tuple[Admission, ...]) -> None:
        left = list(admissions)
        while left:
            size = next((n for n in ADMISSIONS if n >= len(left)), ADMISSIONS[-1])
            mail = table.pack_admissions(
                self.layout, size, [self._described(a) for a in left[:size]], self.program.config.vocab_size
            )
            draft_tree = self.memory.draft_tree
            self.rows = self._run(admit_program, size, draft_tree, self.rows, mail, **self._row_arguments)
            left = left[size:]

    def _described(self, a: Admission) -> dict[str, Any]:
        request = a.request
        return {
            "row": a.row, "length": a.cached, "prompt_length": len(request.ids), "fill": a.fill, "resumed": a.resumed,
            "limit": a.limit, "capacity": len(a.pages) * self.memory.page_size, "rounds_left": self.rounds,
            "drafting": request.speculation, "seen": a.fill + a.resumed, "rounds": a.rounds, "proposed": a.proposed,
            "sampling": request.sampling, "stop_ids": request.stop_ids, "ignore_eos": request.ignore_eos,
            "pages": a.pages, "tokens": a.tokens,
        }  # fmt: skip

    def _prefill_of(self, prefill: Prefill, of_class: str) -> tuple[Any, dict]:
        """The key and the static arguments of a prefill program."""
        count = 1 if prefill.long else prefill.size
        chunk = prefill.size if prefill.long else self.limits.block
        static = {
            "program": dataclasses.replace(self.program, sampling=of_class), "chunk": chunk,
            "fresh": self.long if prefill.long else None, "ends": min(self.limits.max_ends, count),
        }  # fmt: skip
        return (self.layout, count, chunk, prefill.long, of_class), static

    def _prefill(self, prefill: Prefill, of_class: str) -> None:
        memory, (key, static) = self.memory, self._prefill_of(prefill, of_class)
        blocks = np.full((key[1], 2), -1, np.int32)
        for line, block in zip(blocks, prefill.blocks, strict=False):
            line[:] = block.row, block.start
        whole = key[1] == self.bucket and all(block.row == i for i, block in enumerate(prefill.blocks))
        if whole:  # each row has one block: they are the table itself
            taken, continued = self.rows, np.zeros(key[1], bool)
        else:
            taken, continued = self._run(take_program, key[1], self.rows, blocks)
        memory.pools, taken = memory.run(
            prefill_program, key, memory.tree, memory.draft_tree, memory.pools, taken, continued, **static
        )  # fmt: skip
        self.rows = taken if whole else self._run(put_program, key[1], self.rows, taken, blocks, continued)

    def _rounds_of(self, of_class: str) -> tuple[Any, dict]:
        """The key and the static arguments of a program of rounds."""
        return (self.layout, self.bucket, of_class), {"program": dataclasses.replace(self.program, sampling=of_class)}

    def _rounds(self, of_class: str) -> None:
        memory, (key, static) = self.memory, self._rounds_of(of_class)
        memory.pools, self.rows = memory.run(
            rounds_program, key, memory.tree, memory.draft_tree, memory.pools, self.rows, **static
        )  # fmt: skip

    def _compile_ahead(self, launch: Launch) -> None:
        """Compiles the large programs of a launch with prefill, and of the rounds behind it, side by side: nobody waits for
        one after the other."""
        memory, of_class = self.memory, launch.sampling_class
        keys = {key: static for key, static in (self._prefill_of(p, of_class) for p in launch.prefills)}
        rounds_key, rounds_static = self._rounds_of(of_class)
        if (rounds_program, rounds_key) in memory.executables:
            rounds_static = None
        if rounds_static is None and all((prefill_program, key) in memory.executables for key in keys):
            return
        common = (memory.tree, memory.draft_tree, memory.pools)
        rows = jax.eval_shape(lambda x: x, self.rows)
        wanted = []
        if rounds_static is not None:
            wanted.append((rounds_program, rounds_key, (*common, rows), rounds_static))
        for key, static in keys.items():
            taken, continued = jax.eval_shape(take_program, rows, np.zeros((key[1], 2), np.int32))
            wanted.append((prefill_program, key, (*common, taken, continued), static))
        memory.compile(wanted)

    def _report(self, kind: str) -> Flight:
        most = self.limits.max_accept * min(self.rounds, self.limits.max_len) + 1
        static = {"window": min(most, self.limits.max_len), "rounds": self.rounds}
        self.rows, packed = self._run(report_program, self.rounds, self.rows, **static)
        return Flight(kind, packed)
