"""The table of rows on the device: turns launches into programs, the only place that launches anything.

Nothing here waits for the device but `Flight.result`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxspec.engine import rows as table
from jaxspec.engine.memory import LAUNCHES, Memory, Rehearsal
from jaxspec.engine.messages import Admission, Block, Launch, Limits, Orders, Prefill, Report, Request, RowReport
from jaxspec.engine.programs import (
    admit_program,
    empty_program,
    orders_program,
    prefill_program,
    put_program,
    regroup_program,
    report_program,
    rounds_program,
    take_program,
)
from jaxspec.engine.rows import Layout
from jaxspec.kvcache import pages_for
from jaxspec.round import Program
from jaxspec.runtime import own_settings
from jaxspec.sampling_params import CLASSES, SamplingParams
from pallas_kernels.attention.rows import Library

ADMISSIONS = (1, 8)
"""Rows that one program of admissions puts into the table."""


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
            length, done, stopped, broken, rounds, proposed, count = line[:fixed].tolist()
            tokens, from_draft, round_of, upto = (line[fixed + i * window :][:count] for i in range(4))
            rows.append(
                RowReport(
                    length=length,
                    done=bool(done),
                    stopped=bool(stopped),
                    broken=bool(broken),
                    tokens=tokens.tolist(),
                    from_draft=from_draft.astype(bool),
                    round_of=round_of,
                    proposed_upto=upto,
                    rounds=rounds,
                    proposed=proposed,
                )
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

    def __init__(self, memory: Memory, limits: Limits, long: Library | None = None, rounds: int = 1):
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
                flights.append(Flight("prefill", self._report()))
            if launch.rounds:
                self._rounds(launch.sampling_class)
                flights.append(Flight("rounds", self._report()))
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
                self.bucket,
                size,
                orders.finish if first else {},
                grants[start : start + size],
                orders.capacity if first else {},
                rounds,
            )
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
            "row": a.row,
            "length": a.cached,
            "prompt_length": len(request.ids),
            "fill": a.fill,
            "resumed": a.resumed,
            "limit": a.limit,
            "capacity": len(a.pages) * self.memory.page_size,
            "rounds_left": self.rounds,
            "drafting": request.speculation,
            "seen": a.fill + a.resumed,
            "rounds": a.rounds,
            "proposed": a.proposed,
            "sampling": request.sampling,
            "stop_ids": request.stop_ids,
            "ignore_eos": request.ignore_eos,
            "pages": a.pages,
            "tokens": a.tokens,
        }

    def _prefill_of(self, prefill: Prefill, of_class: str) -> tuple[Any, dict]:
        """The key and the static arguments of a prefill program."""
        count = 1 if prefill.long else prefill.size
        chunk = prefill.size if prefill.long else self.limits.block
        static = {
            "program": dataclasses.replace(self.program, sampling=of_class),
            "chunk": chunk,
            "fresh": self.long if prefill.long else None,
            "ends": min(self.limits.max_ends, count),
        }
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
        )
        self.rows = taken if whole else self._run(put_program, key[1], self.rows, taken, blocks, continued)

    def _rounds_of(self, of_class: str) -> tuple[Any, dict]:
        """The key and the static arguments of a program of rounds."""
        return (self.layout, self.bucket, of_class), {"program": dataclasses.replace(self.program, sampling=of_class)}

    def _rounds(self, of_class: str) -> None:
        memory, (key, static) = self.memory, self._rounds_of(of_class)
        memory.pools, self.rows = memory.run(
            rounds_program, key, memory.tree, memory.draft_tree, memory.pools, self.rows, **static
        )

    @own_settings()
    def _compile_ahead(self, launch: Launch) -> None:
        """Compiles the large programs of a launch with prefill, and of the rounds behind it, side by side: nobody waits for
        one after the other."""
        memory, of_class = self.memory, launch.sampling_class
        keys = {key: static for key, static in (self._prefill_of(p, of_class) for p in launch.prefills)}
        rounds_key, rounds_static = self._rounds_of(of_class)
        if memory.knows(rounds_program, rounds_key):
            rounds_static = None
        if rounds_static is None and all(memory.knows(prefill_program, key) for key in keys):
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

    def _report(self) -> jax.Array:
        most = self.limits.max_accept * min(self.rounds, self.limits.max_len) + 1
        static = {"window": min(most, self.limits.max_len), "rounds": self.rounds}
        self.rows, packed = self._run(report_program, self.rounds, self.rows, **static)
        return packed

    # All programs at once.

    def warm(self, classes: Iterable[str] = CLASSES) -> None:
        """Compiles all that launches of these sampling classes can ask for: afterwards no launch compiles anything."""
        rehearsal = Rehearsal(self.memory)
        with LAUNCHES:
            Device(rehearsal, self.limits, self.long, self.rounds)._rehearse(tuple(classes))
            self.memory.compile(list(rehearsal.wanted.values()))

    def _rehearse(self, classes: tuple[str, ...]) -> None:
        limits, empty = self.limits, Launch(0, 0, None, Orders(), (), (), 0, CLASSES[0])
        request = Request("", np.zeros(1, np.int32), SamplingParams(seed=0), 1)
        log = np.zeros(0, np.int32)
        admission = Admission(0, request, request.ids, [], 0, 1, False, 1, log, log, log, 0, 0)
        block = Block(limits.buckets[-1], 0, 1)  # of no row: its program is not on the table itself
        prefills = [Prefill((block,), size) for size in limits.prefill_sizes]
        prefills += [Prefill((block,), size, long=True) for size in limits.long_sizes]
        for bucket in limits.buckets:
            self.rows = None
            self._arrange(dataclasses.replace(empty, bucket=bucket))
            for size in (size for size in limits.buckets if size != bucket):
                rows = self.rows
                self._arrange(dataclasses.replace(empty, bucket=size, moves=(-1,) * size))
                self.rows, self.bucket = rows, bucket
            self._orders(Orders(), self.rounds)
            for size in ADMISSIONS:
                self._admit((admission,) * size)
            self._report()
            for of_class in classes:
                for prefill in prefills:
                    self._prefill(prefill, of_class)
                self._rounds(of_class)
