"""The loop between front end and device: requests in, plan, launch, read, deltas out."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxspec.engine.jobs import Row
from jaxspec.engine.messages import Delta, Device, Failed, Future, Request, SchedulerConfig
from jaxspec.engine.scheduler import Scheduler

WINDOW = 40
"""Reports over which the throughput is taken."""


class Flight(NamedTuple):
    """A report under way."""

    number: int
    future: Future
    rows: list[Row | None]
    rounds: int


class Core:
    """Continuous batching over one device. Runs in the thread that calls it; only one may.

    Args:
      device: runs launches.
      config: the policy.
      clock: seconds, for the statistics.
      check_pages: checks all books after every launch; by default if JAXSPEC_CHECK_PAGES=1 is set.
    """

    def __init__(
        self,
        device: Device,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        check_pages: bool | None = None,
    ):
        self.device, self.config, self.clock = device, config, clock
        self.scheduler = Scheduler(device.limits, config)
        self.check_pages = os.environ.get("JAXSPEC_CHECK_PAGES") == "1" if check_pages is None else check_pages
        self._flights: deque[Flight] = deque()
        self._out: list[Delta | Failed] = []
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # (time, tokens so far) of the last reports
        self._started = clock()
        self._step_seconds = self._wait_seconds = 0.0

    def submit(self, request: Request) -> None:
        """Queues a request; raises ConfigError if it can never run, QueueFull if too many wait."""
        self.scheduler.add(request)

    def abort(self, rid: str) -> None:
        """Ends a request wherever it is; of one that has ended nothing is said."""
        self._end(rid, "abort", None)

    def finish(self, rid: str, kept: int) -> None:
        """The front end found a stop string: the request ends with the first `kept` tokens of its output."""
        self._end(rid, "stop", kept)

    def _end(self, rid: str, reason: str, kept: int | None) -> None:
        delta = self.scheduler.end(rid, reason, kept)
        if delta is not None:
            self._out.append(delta)

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits, is in flight or is still to be said."""
        return not (self.scheduler.jobs or self._flights or self._out)

    def flush(self) -> bool:
        """Empties the prefix cache if nothing runs or waits, and says whether it did."""
        if self.scheduler.jobs:
            return False
        self.scheduler.prefix.reset()
        self.scheduler.check()
        return True

    def step(self, wait: bool = True) -> list[Delta | Failed]:
        """One pass: read the reports that are there, plan, launch; returns what is to be said.

        With `wait` it waits for the oldest report if the pipeline is full or nothing can be launched before it; it never
        waits when nothing is in flight.
        """
        begun = self.clock()
        try:
            self._pass(wait)
        except Exception as error:  # whatever a launch raises ends the requests in flight, not the loop
            self._fail(error)
        if self.check_pages:
            self.scheduler.check()
        self._step_seconds += self.clock() - begun
        out, self._out = self._out, []
        return out

    def _pass(self, wait: bool) -> None:
        while self._flights and self._flights[0].future.ready():
            self._read()
        while self._in_flight() >= self.config.pipeline_depth:
            if not wait or self._out:  # what is known is said before anything else is waited for
                return
            self._read()
        planned = self.scheduler.plan()
        if planned is None:
            if wait and self._flights and not self._out:
                self._read()
            return
        launch, rows = planned
        kinds = bool(launch.prefills) + bool(launch.rounds)
        futures = self.device.launch(launch)
        if len(futures) != kinds:
            raise RuntimeError(f"launch {launch.number} has {kinds} reports, the device promises {len(futures)}")
        self._flights.extend(Flight(launch.number, future, rows, launch.rounds) for future in futures)

    def _in_flight(self) -> int:
        """Launches of which a report was not read."""
        return self._flights[-1].number - self._flights[0].number + 1 if self._flights else 0

    def _read(self) -> None:
        flight = self._flights.popleft()
        begun = self.clock()
        report = flight.future.result()
        now = self.clock()
        self._wait_seconds += now - begun
        deltas = self.scheduler.report(report, flight.rows, flight.number, flight.rounds)
        self._recent.append((now, self.scheduler.tokens))
        self._out.extend(replace(news, at=now) if isinstance(news, Delta) else news for news in deltas)

    def _fail(self, error: Exception) -> None:
        self._flights.clear()
        message = f"{type(error).__name__}: {error}"
        self._out.extend(Failed(rid, message, error) for rid in self.scheduler.fail())
        self.device.reset()

    def _throughput(self) -> float:
        """Tokens a second over the last reports."""
        recent = list(self._recent)
        if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
            return 0.0
        return (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])

    def stats(self) -> dict:
        """Counts and rates; tokens, rounds and launches since the start, times in seconds."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        running = sum(row is not None for row in scheduler.rows)
        cached, prompts = (sum(column) for column in zip(*scheduler.hits, strict=True)) if scheduler.hits else (0, 0)
        return {
            "running": running,
            "queued": len(scheduler.queue),
            "rows": scheduler.limits.buckets[-1],
            "bucket": len(scheduler.rows),
            "total_pages": pool.total,
            "free_pages": pool.free,
            "cached_pages": pool.cached,
            "shared_pages": pool.shared,
            "owned_pages": pool.owned,
            "token_usage": (pool.owned + pool.shared) / pool.total,
            "cache_hit_rate": cached / prompts if prompts else 0.0,
            "gen_throughput": self._throughput(),
            "accept_length": scheduler.round_tokens / scheduler.rounds if scheduler.rounds else 0.0,
            "accept_rate": int(scheduler.accepted @ np.arange(len(scheduler.accepted))) / max(scheduler.proposed, 1),
            "accept_by_depth": tuple((scheduler.accepted[::-1].cumsum()[::-1][1:] / max(scheduler.rounds, 1)).tolist()),
            "tokens_total": scheduler.tokens,
            "rounds_total": scheduler.rounds,
            "proposed_total": scheduler.proposed,
            "stalls_total": scheduler.stalls,
            "retractions_total": scheduler.retractions,
            "launches_total": scheduler.launches,
            "host_seconds_total": self._step_seconds - self._wait_seconds,
            "device_wait_seconds_total": self._wait_seconds,
            "uptime_seconds": self.clock() - self._started,
        }
