"""What a caller of an `Engine` holds: a request under way, figures of the engine, and its errors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from jaxspec.engine.messages import Request
from jaxspec.results import GenerationResult, StreamChunk
from jaxspec.tokenizer.text import Answer


class EngineStopped(RuntimeError):
    """The engine was closed, or a launch failed for the second time within a minute."""


class LaunchFailed(RuntimeError):
    """The device failed while a request was running; the engine goes on with others."""


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """What an engine does at the moment and has done so far; counts of pages, tokens and launches, times in seconds.

    Attributes:
      running, queued: requests.
      rows, bucket: most rows of the table, and those that it has now.
      total_pages, free_pages, cached_pages, shared_pages, owned_pages: the pool by class.
      token_usage: part of the pool that running requests hold.
      cache_hit_rate: part of the last prompts' tokens that were cached.
      gen_throughput: tokens a second over the last 40 reports.
      accept_length: tokens a round emitted, over all rounds.
      accept_rate: part of the proposed drafts that were emitted.
      accept_by_depth: part of the rounds that emitted a draft at depth 1, 2, …
      num_steps, topk, num_draft_tokens: the tree; None where the algorithm has no such parameter.
      tokens_total, rounds_total, proposed_total, retractions_total, launches_total: since the start.
      stalls_total: how often a row took no part in a launch, for want of pages.
      host_seconds_total, device_wait_seconds_total: of the core's loop, working and waiting for the device.
      compile_seconds_total, uptime_seconds: since the start.
      programs: names of the compiled programs.
    """

    running: int
    queued: int
    rows: int
    bucket: int
    total_pages: int
    free_pages: int
    cached_pages: int
    shared_pages: int
    owned_pages: int
    token_usage: float
    cache_hit_rate: float
    gen_throughput: float
    accept_length: float
    accept_rate: float
    accept_by_depth: tuple[float, ...]
    num_steps: int | None
    topk: int | None
    num_draft_tokens: int | None
    tokens_total: int
    rounds_total: int
    proposed_total: int
    stalls_total: int
    retractions_total: int
    launches_total: int
    host_seconds_total: float
    device_wait_seconds_total: float
    compile_seconds_total: float
    uptime_seconds: float
    programs: tuple[str, ...]


class Handle:
    """One request under way. Iterate over it, synchronously or not, for its pieces; or wait for `result`.

    Attributes:
      rid: its name.
      index: which prompt of the call it belongs to.
      key: what the core calls it. A name may be used again once its request has ended for the caller; with a stop string
        that is before the core knows.
    """

    def __init__(self, tokenizer: Any, request: Request, index: int, key: str, abort: Callable[[str], None]):
        self.rid, self.index, self.request, self.key, self._abort = request.rid, index, request, key, abort
        self.answer = Answer(tokenizer, request.ids, request.stop)
        self.begun = time.perf_counter()
        self.first = self.ended = 0.0
        self._chunks: queue.SimpleQueue[StreamChunk | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._result: GenerationResult | None = None
        self._error: Exception | None = None
        self._wake: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Waits for the answer.

        Raises:
          TimeoutError: it is not there after `timeout` seconds.
          LaunchFailed, EngineStopped: it will never be.
          NotANumber: the model's output for this request was NaN; others are not concerned.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"request {self.rid!r} has not ended within {timeout} s")
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the request ends within `timeout` seconds."""
        return self._over.wait(timeout)

    def abort(self) -> None:
        """Ends the request; its result has what had been emitted, with finish reason "abort"."""
        self._abort(self.key)

    def __iter__(self) -> Iterator[StreamChunk]:
        """Pieces as they come; leaving the iteration aborts the request."""
        try:
            while (chunk := self._chunks.get()) is not None:
                yield chunk
            self.result()
        finally:
            self.abort()

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        """The same for a running event loop."""
        self._wake = (asyncio.get_running_loop(), asyncio.Event())
        try:
            while True:
                self._wake[1].clear()
                try:
                    chunk = self._chunks.get_nowait()
                except queue.Empty:
                    await self._wake[1].wait()
                    continue
                if chunk is None:
                    break
                yield chunk
            self.result()
        finally:
            self.abort()

    def push(self, chunk: StreamChunk | None) -> None:
        """Hands a piece on; None behind the last one."""
        self._chunks.put(chunk)
        wake = self._wake
        if wake is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                wake[0].call_soon_threadsafe(wake[1].set)

    def end(self, result: GenerationResult | None, error: Exception | None = None) -> None:
        """Sets the outcome."""
        self._result, self._error = result, error
        self.push(None)
        self._over.set()
