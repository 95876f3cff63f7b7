"""`Engine`: many requests at once, from many threads, on one device: the core in a thread of its own, text in another."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from jaxspec.config import ConfigError, SpecConfig
from jaxspec.engine import sizes
from jaxspec.engine.config import EngineConfig
from jaxspec.engine.core import Core
from jaxspec.engine.device import Device
from jaxspec.engine.handle import EngineStats, EngineStopped, Handle, LaunchFailed
from jaxspec.engine.memory import Memory, device_of
from jaxspec.engine.messages import Delta, Failed, Limits, NotANumber, QueueFull, Request, SchedulerConfig
from jaxspec.engine.programs import pool_bytes
from jaxspec.kvcache import pages_for
from jaxspec.plain import plain
from jaxspec.requests import build_requests, whole_number
from jaxspec.results import GenerationResult, StreamChunk, result_of
from jaxspec.runtime import available_bytes, total_bytes, use_compilation_cache
from jaxspec.sampling_params import GREEDY, SAMPLED
from jaxspec.speculation import Speculation

RUNNING = {"cpu": 8, "gpu": 64}
"""Requests that run at once unless the settings say otherwise."""
REQUEST_FIELDS = ("speculation", "priority", "namespace", "score_from")


class Engine:
    """Answers many requests at once: they share the pages of common beginnings, join and leave between rounds.

    Every answer is the one that `jaxspec.generate` gives alone. Threads may call at once; `submit` is the one way in.

    Example:
      >>> with jaxspec.Engine(params) as engine:
      ...     results = engine.generate(["Why is the sky blue?", "Name three rivers."], max_new_tokens=64)

    Args:
      params: the target, from `jaxspec.load`.
      draft, algorithm, num_steps, topk, num_draft_tokens, spec: as for `jaxspec.generate`.
      **settings: the fields of `jaxspec.EngineConfig`.

    Raises:
      ConfigError: settings that cannot work; PoolTooLarge (one of them): the pool does not fit.
    """

    def __init__(
        self,
        params,
        draft=None,
        algorithm="auto",
        *,
        num_steps: int | None = None,
        topk: int | None = None,
        num_draft_tokens: int | None = None,
        spec: SpecConfig | None = None,
        **settings: Any,
    ):
        use_compilation_cache()
        names = {f.name for f in dataclasses.fields(EngineConfig)}
        unknown = sorted(set(settings) - names)
        if unknown:
            raise ConfigError(f"Engine has no setting {unknown[0]!r}; there are: {', '.join(sorted(names))}")
        self.params, self.config = params, EngineConfig(**settings)
        self.chosen = Speculation.choose(
            params, draft, algorithm, spec, num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens
        )
        limits = self._limits()
        self.memory = Memory(
            params.tree,
            self.chosen.draft_tree,
            self.chosen.program,
            page_size=self.config.page_size,
            num_pages=limits.total_pages + 1,
        )
        c = self.config
        device = Device(self.memory, limits, self._long, c.num_continuous_decode_steps)
        if c.warmup == "eager":
            device.warm((GREEDY, SAMPLED))
        self._core = Core(
            device,
            SchedulerConfig(
                schedule_policy=c.schedule_policy,
                schedule_conservativeness=c.schedule_conservativeness,
                prefill_budget=c.prefill_budget,
                prefill_decode_interval=c.prefill_decode_interval,
                max_prefill_tokens=c.chunked_prefill_size,
                rounds_per_launch=c.num_continuous_decode_steps,
                prefix_cache=not c.disable_radix_cache,
                low_priority_first=c.schedule_low_priority_values_first,
            ),
            clock=time.perf_counter,
        )
        self._handles: dict[str, Handle] = {}  # by key
        self._keys: dict[str, str] = {}  # by name
        self._names, self._seeds = itertools.count(), itertools.count(c.random_seed or 0)
        self._serial = itertools.count()
        self._lock, self._inbox = threading.Condition(), []
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._state, self._failed_at = "running", -1e9
        self._learned = 0
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run_core, "jaxspec-core"), (self._run_text, "jaxspec-text"))
        ]
        for thread in self._threads:
            thread.start()

    def _limits(self) -> Limits:
        """Sizes of table and pool."""
        c, model, drafter = self.config, self.params.config, self.chosen.program.drafter
        running = c.max_running_requests or RUNNING[sizes.platform()]
        if c.context_length is not None and c.context_length > model.max_positions:
            raise ConfigError(f"context_length={c.context_length} exceeds the model's {model.max_positions} positions")
        context = c.context_length or model.max_positions
        row_pages = pages_for(context + drafter.slack, c.page_size)
        dtype = self.params.tree["embedder"]["embedding"].dtype
        self._long = sizes.prefill_attention(model, dtype)
        if c.max_total_tokens is not None:
            pages = pages_for(c.max_total_tokens, c.page_size)
        else:
            page = pool_bytes(self.chosen.program, self.chosen.draft_tree, 1, c.page_size, str(dtype))
            device = device_of(self.params.tree, self.chosen.draft_tree)
            there, total = available_bytes(device), total_bytes(device)
            if there is None or total is None:
                raise ConfigError("this platform does not say how much memory it has: give max_total_tokens")
            room = there - (1 - c.mem_fraction_static) * total
            pages = min(running * row_pages, int(room // page) - 1)
        if pages < pages_for(1 + drafter.slack + 1, c.page_size):
            raise ConfigError(
                f"{max(pages, 0)} pages of {c.page_size} positions are left for requests, too few for one: raise "
                f"mem_fraction_static={c.mem_fraction_static} or max_total_tokens={c.max_total_tokens}, or take a smaller tree"
            )
        return Limits(
            buckets=sizes.buckets_for(running),
            **sizes.program_sizes(self._long),
            max_len=context,
            total_pages=pages,
            page_size=c.page_size,
            max_accept=drafter.max_accept,
            slack=drafter.slack,
            key_lookahead=drafter.key_lookahead,
            separate_blocks=drafter.separate_blocks,
        )

    # What a caller does.

    def submit(self, prompt, **request: Any) -> Handle | list[Handle]:
        """Starts one prompt or a batch and returns at once.

        Args:
          prompt: as for `jaxspec.generate`.
          **request: the arguments of `jaxspec.generate` from `max_new_tokens` to `chat`; and n (answers to each prompt),
            rid (the request's name), priority, speculation (False: this request drafts nothing), cache_salt and extra_key
            (requests share pages only where both are equal).

        Returns:
          A `Handle`, or a list of them for a batch or n > 1.

        Raises:
          ConfigError: a request that cannot work.
          QueueFull: as many as `max_queued_requests` wait.
          EngineStopped: the engine is closed.
        """
        requests, single = self._requests(prompt, **request)
        tokenizer, abort = self.params.tokenizer, partial(self._tell, "abort")
        handles = [Handle(tokenizer, r, i, f"{r.rid}/{next(self._serial)}", abort) for i, r in enumerate(requests)]
        with self._lock:
            if self._state != "running":
                raise EngineStopped(f"the engine is {self._state}: it takes no more requests")
            names = [h.rid for h in handles]
            taken = next((n for n in names if n in self._keys or names.count(n) > 1), None)
            if taken is not None:
                raise ConfigError(f"rid={taken!r} names a request that has not ended; names must be unique")
            most = self.config.max_queued_requests
            waiting = len(self._core.scheduler.queue) + sum(kind == "submit" for kind, *_ in self._inbox)
            if most is not None and waiting + len(handles) > most:
                raise QueueFull(f"{waiting} requests wait, max_queued_requests={most}")
            for handle in handles:
                self._core.scheduler.refuse(handle.request)
            self._handles |= {h.key: h for h in handles}
            self._keys |= {h.rid: h.key for h in handles}
            self._inbox += [("submit", dataclasses.replace(h.request, rid=h.key)) for h in handles]
            self._lock.notify_all()
        return handles[0] if single else handles

    def generate(self, prompt, **request: Any) -> GenerationResult | list[GenerationResult]:
        """Answers one prompt or a batch and waits for it; arguments and errors as for `submit`."""
        handles = self.submit(prompt, **request)
        return handles.result() if isinstance(handles, Handle) else [h.result() for h in handles]

    async def stream(self, prompt, **request: Any) -> AsyncIterator[StreamChunk]:
        """Pieces of one answer as they come (`async for`); leaving the iteration aborts the request."""
        async with contextlib.aclosing(self._one(prompt, request).__aiter__()) as chunks:
            async for chunk in chunks:
                yield chunk

    def stream_sync(self, prompt, **request: Any) -> Iterator[StreamChunk]:
        """The same as an ordinary iterator."""
        yield from self._one(prompt, request)

    def _one(self, prompt, request: dict) -> Handle:
        handles = self.submit(prompt, **request)
        if isinstance(handles, Handle):
            return handles
        if len(handles) == 1:
            return handles[0]
        for handle in handles:
            handle.abort()
        raise ConfigError(f"a stream answers one prompt, {len(handles)} answers were asked for: use submit")

    def abort(self, rid: str) -> None:
        """Ends a request wherever it is; nothing happens if it has ended."""
        with self._lock:
            key = self._keys.get(rid)
        if key is not None:
            self._tell("abort", key)

    def abort_all(self) -> None:
        """Ends every request."""
        with self._lock:
            handles = list(self._handles.values())
        for handle in handles:
            handle.abort()

    def flush_cache(self, timeout: float = 0.0) -> bool:
        """Forgets all cached prefixes, once nothing runs or waits; False if that is not so within `timeout` seconds."""
        end = time.perf_counter() + timeout
        while True:
            with self._lock:
                if self._state in ("closed", "stopped"):
                    raise EngineStopped(f"the engine is {self._state}")
                answer: queue.SimpleQueue[bool] = queue.SimpleQueue()
                self._inbox.append(("flush", answer))
                self._lock.notify_all()
            if answer.get():
                return True
            if time.perf_counter() >= end:
                return False
            time.sleep(0.01)

    def stats(self) -> EngineStats:
        """See `EngineStats`."""
        programs = sorted({function.__name__ for function, _ in list(self.memory.executables)})
        tree = {name: getattr(self.chosen.spec, name) for name in ("num_steps", "topk", "num_draft_tokens")}
        compiling = self.memory.compile_seconds(0.0)
        return EngineStats(**self._core.stats(), **tree, compile_seconds_total=compiling, programs=tuple(programs))

    def drain(self, timeout: float | None = None) -> bool:
        """Takes no more requests and waits for those there are; False if some are left after `timeout` seconds."""
        with self._lock:
            if self._state == "running":
                self._state = "draining"
            handles = list(self._handles.values())
        end = None if timeout is None else time.perf_counter() + timeout
        return all(handle.wait(None if end is None else max(end - time.perf_counter(), 0)) for handle in handles)

    def close(self) -> None:
        """Ends all requests, stops the threads and frees the pools. Calling it again does nothing."""
        with self._lock:
            if self._state == "closed":
                return
            self._state = "closed"
            self._lock.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self.memory.pools, self._core.device.rows = None, None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Requests.

    def _requests(
        self,
        prompt,
        *,
        n: int = 1,
        rid: str | None = None,
        priority: int = 0,
        speculation: bool = True,
        cache_salt: str = "",
        extra_key: str = "",
        **request: Any,
    ) -> tuple[list[Request], bool]:
        n = whole_number("n", plain(n), 1)
        made, single = build_requests(self.params, prompt, **request)
        if self.config.random_seed is not None and request.get("seed") is None:
            made = [self._reseeded(r, next(self._seeds)) for r in made]
        found = []
        for i, one in enumerate(made):
            name = self._free_name() if rid is None else rid if single else f"{rid}-{i}"
            common = {"priority": priority, "speculation": speculation, "namespace": (cache_salt, extra_key)}
            for choice in range(n):
                copy = dataclasses.replace(
                    one, rid=name if n == 1 else f"{name}-{choice}", group=name if n > 1 else None, choice=choice, **common
                )
                found.append(self._reseeded(copy, mixed(one.sampling.seed, choice)) if choice else copy)
        return found, single and n == 1

    def _free_name(self) -> str:
        """A name that no caller has chosen for a request under way."""
        return next(name for name in map(str, self._names) if name not in self._keys)

    @staticmethod
    def _reseeded(request: Request, seed: int) -> Request:
        return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=seed))

    # The core's thread.

    def _tell(self, *message: Any) -> None:
        with self._lock:
            self._inbox.append(message)
            self._lock.notify_all()

    def _run_core(self) -> None:
        try:
            self._serve()
        finally:
            with self._lock:
                if self._state != "closed":
                    self._state = "stopped"
                left, self._inbox = self._inbox, []
            self._outbox.put(None)
            for kind, what in left:
                if kind == "flush":
                    what.put(False)

    def _serve(self) -> None:
        while True:
            with self._lock:
                while not self._inbox and self._core.idle and self._state != "closed":
                    self._lock.wait()
                if self._state == "closed":
                    break
                # Under the lock: whoever counts the waiting finds a request either in the inbox or in the queue.
                messages, self._inbox = self._inbox, []
                for kind, what in messages:
                    if kind == "submit":
                        self._core.submit(what)
                    elif kind == "abort":
                        self._core.abort(what)
                    elif kind == "finish":
                        self._core.finish(*what)
                    elif kind == "flush":
                        what.put(self._core.flush())
            self._learn()
            events = self._core.step()
            if events:
                self._outbox.put(events)
            if any(isinstance(e, Failed) and not isinstance(e.error, NotANumber) for e in events) and self._fails_again():
                break

    def _fails_again(self) -> bool:
        """Whether a launch has failed for the second time within a minute: the engine stops then."""
        now = time.perf_counter()
        again, self._failed_at = now - self._failed_at < 60, now
        return again

    def _learn(self) -> None:
        """Puts what a history has learnt since into the drafter's parameters, between two launches."""
        draft = self.chosen.draft
        if self._learned and not self._core.scheduler.jobs:
            self._learned = 0
            self.memory.use(draft.arrays())

    # The text thread.

    def _run_text(self) -> None:
        while (events := self._outbox.get()) is not None:
            for event in events:
                handle = self._handles.get(event.rid)
                if handle is None or handle.answer.reason is not None:
                    continue
                if isinstance(event, Failed):
                    self._forget(handle)
                    alone = isinstance(event.error, NotANumber)
                    handle.end(None, event.error if alone else LaunchFailed(event.message))
                else:
                    try:
                        self._hear(handle, event)
                    except Exception as error:  # a tokenizer's, say: it ends this request, not the thread of all
                        handle.abort()
                        self._forget(handle)
                        handle.end(None, error)
        with self._lock:
            left, self._handles, self._keys = list(self._handles.values()), {}, {}
        for handle in left:
            handle.end(None, EngineStopped(f"the engine is {self._state}"))

    def _hear(self, handle: Handle, delta: Delta) -> None:
        answer = handle.answer
        at = delta.at or time.perf_counter()  # an end that no report told has no time of its own
        handle.ended = at - handle.begun - self.memory.compile_seconds(handle.begun, at)
        if delta.tokens and not answer.tokens:
            handle.first = handle.ended
        cut = answer.add(delta.tokens, delta.from_draft, delta.round_of, delta.proposed_upto, delta.reason)
        if cut is not None and delta.reason is None:
            self._tell("finish", (handle.key, cut))
        over, piece, result = answer.reason is not None, answer.piece(), None
        if over:
            result = result_of(
                handle.request,
                answer,
                self.chosen.program.drafter,
                self.chosen.spec,
                self.params.tokenizer,
                first=handle.first,
                all_first=handle.first,
                ended=handle.ended,
                all_ended=handle.ended,
                cached_tokens=delta.cached_tokens,
                num_retractions=delta.num_retractions,
            )
        if piece.tokens or piece.text or over:
            handle.push(StreamChunk(handle.index, piece.text, piece.tokens, result, piece.from_draft))
        if over:
            if hasattr(self.chosen.draft, "insert") and answer.reason != "abort":
                self.chosen.draft.insert([*handle.request.ids.tolist(), *answer.tokens])
                self._learned += 1
            self._forget(handle)
            handle.end(result)

    def _forget(self, handle: Handle) -> None:
        with self._lock:
            self._handles.pop(handle.key, None)
            self._keys.pop(handle.rid, None)


def mixed(seed: int, choice: int) -> int:
    """The seed of another choice of the same request (SplitMix64); choice 0 has the request's own."""
    if not choice:
        return seed
    x = (seed + choice * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)
