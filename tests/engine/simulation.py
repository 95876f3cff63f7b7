"""Drives a Core over a FakeDevice with random requests, and holds every delta against the right text of its request."""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxspec.engine.core import Core
from jaxspec.engine.messages import Failed, Limits, Request, SchedulerConfig
from jaxspec.sampling_params import SamplingParams
from tests.engine.fake_device import VOCABULARY, FakeDevice, text_of


def make_limits(**changes) -> Limits:
    values = dict(
        buckets=(1, 2, 4, 8, 16, 24),
        prefill_sizes=(1, 2, 4, 8, 16),
        block=16,
        long_sizes=(),
        max_len=640,
        total_pages=300,
        page_size=4,
        max_accept=4,
        slack=6,
        key_lookahead=1,
    )
    return Limits(**(values | changes))


GREEDY = SamplingParams()
DEFAULT = SchedulerConfig()


def make_request(rid: str, ids, max_new_tokens: int = 20, **changes) -> Request:
    return Request(rid, np.asarray(ids, np.int32), changes.pop("sampling", GREEDY), max_new_tokens, **changes)


class Traffic:
    """Random requests: prompts from a tree of prefixes, or continuing an earlier text; n of 1 … 4; priorities; stops."""

    def __init__(self, limits: Limits, seed: int, longest: int = 400, most_new: int = 200, prefixes: int = 200):
        self.limits, self.rng = limits, np.random.default_rng(seed)
        self.longest = min(longest, limits.max_len, limits.total_pages * limits.page_size - limits.slack)
        self.most_new = most_new
        self.prefixes = [np.zeros(0, np.int32)]
        for _ in range(prefixes):
            parent = self.prefixes[self.rng.integers(len(self.prefixes))]
            self.prefixes.append(np.concatenate([parent, self._tokens(self._size(60))])[: self.longest - 1])
        self.recent: deque[np.ndarray] = deque(maxlen=32)
        self.made = 0

    def _tokens(self, count: int) -> np.ndarray:
        return self.rng.integers(0, VOCABULARY, count, dtype=np.int32)

    def _size(self, most: int) -> int:
        """1 … most, small ones more often: their logarithm is nearly uniform."""
        return int((most + 1) ** (self.rng.random() ** 1.7))

    def some(self) -> list[Request]:
        """A request, or the siblings of one."""
        rng = self.rng
        if self.recent and rng.random() < 0.2:
            prefix = self.recent[rng.integers(len(self.recent))]
        else:
            prefix = self.prefixes[rng.integers(len(self.prefixes))]
        ids = np.concatenate([prefix[: self._size(self.longest) - 1], self._tokens(self._size(8))])[: self.longest]
        self.made += 1
        siblings = int(rng.integers(2, 5)) if rng.random() < 0.15 else 1
        common = dict(
            ids=ids,
            sampling=GREEDY,
            max_new_tokens=self._size(self.most_new + 1) - 1,
            stop_ids=(3,) if rng.random() < 0.3 else (),
            ignore_eos=bool(rng.random() < 0.1),
            speculation=bool(rng.random() < 0.9),
            priority=int(rng.integers(3)) if rng.random() < 0.3 else 0,
            namespace=("salt",) if rng.random() < 0.1 else (),
            group=f"g{self.made}" if siblings > 1 else None,
            score_from=int(rng.integers(len(ids))) if rng.random() < 0.02 else None,
        )
        return [Request(rid=f"r{self.made}.{choice}", choice=choice, **common) for choice in range(siblings)]


class Simulation:
    """A core, its device, and what every request has emitted."""

    def __init__(self, limits: Limits, config: SchedulerConfig = DEFAULT, seed: int = 0, check_every: int = 1, **device):
        self.device = FakeDevice(limits, seed, **device)
        self.core = Core(self.device, config, check_pages=check_every == 1)
        self.rng = np.random.default_rng(seed + 1)
        self.check_every, self.steps = check_every, 0
        self.alive: dict[str, list[int]] = {}
        self.stop_at: dict[str, int] = {}
        self.reasons: dict[str, str] = {}
        self.failed: list[Failed] = []
        self.deltas: dict[str, list] = {}
        self.keep_deltas = False
        self.ended = self.preempted = self.cached = 0

    def submit(self, *requests: Request, stop_at: int | None = None) -> None:
        for request in requests:
            self.device.texts[request.rid] = text_of(request, self.device.limits)
            self.core.submit(request)
            self.alive[request.rid] = []
            if stop_at is not None:
                self.stop_at[request.rid] = stop_at

    def step(self, wait: bool = True) -> None:
        for delta in self.core.step(wait):
            if isinstance(delta, Failed):
                self.failed.append(delta)
                del self.alive[delta.rid]
                continue
            self._hear(delta)
        self.steps += 1
        if self.steps % self.check_every == 0:
            self.core.scheduler.check()
            self._compare_tables()

    def _hear(self, delta) -> None:
        rid = delta.rid
        assert rid in self.alive, f"{rid} speaks after its end"
        if self.keep_deltas:
            self.deltas.setdefault(rid, []).append(delta)
        emitted, text = self.alive[rid], self.device.texts[rid]
        assert delta.tokens or delta.reason
        assert len(delta.from_draft) == len(delta.round_of) == len(delta.proposed_upto) == len(delta.tokens)
        emitted.extend(delta.tokens)
        right = text.output
        assert emitted == right[: len(emitted)], f"{rid} emitted {emitted} instead of {right}"
        stop_at = self.stop_at.get(rid)
        if delta.reason is None:
            if stop_at is not None and len(emitted) >= stop_at:
                del self.stop_at[rid]
                self.core.finish(rid, stop_at)
                self.stop_at[rid] = 10**9
            return
        if delta.reason == "length" or (delta.reason == "stop" and stop_at != 10**9):
            assert emitted == right, f"{rid} ended early: {delta.reason}"
            assert (delta.reason == "stop") == text.stopped
        self.reasons[rid] = delta.reason
        self.preempted += delta.num_retractions
        self.cached += delta.cached_tokens
        self.ended += 1
        del self.alive[rid], self.device.texts[rid]
        self.stop_at.pop(rid, None)

    def _compare_tables(self) -> None:
        """The device's tables are the host's lists, and no length is beyond its bound."""
        rows, size = self.device.rows, self.device.limits.page_size
        if self.core.scheduler._moves is not None or len(self.core.scheduler.rows) != len(rows["table"]):
            return
        for row in self.core.scheduler.rows:
            if row is not None and row.sent >= 0:
                table = rows["table"][row.index]
                assert table[: row.sent].tolist() == row.pages[: row.sent] and not table[row.sent :].any()
                assert rows["capacity"][row.index] == row.sent * size
                assert rows["length"][row.index] <= self.core.scheduler._bound(row)

    def drain(self, most: int = 100_000) -> None:
        for _ in range(most):
            if self.core.idle:
                return
            self.step()
        raise AssertionError(f"not idle after {most} steps: {self.core.stats()}")

    def run(self, traffic: Traffic, requests: int, outstanding: int = 48) -> None:
        """`requests` requests, with aborts at random times and stop strings, at most about `outstanding` at once."""
        rng, most = self.rng, 400 * requests + 1000
        submitted = 0
        while submitted < requests:
            most -= 1
            assert most, f"too many steps: {self.core.stats()}"
            while len(self.alive) < outstanding and submitted < requests and rng.random() < 0.9:
                some = traffic.some()
                self.submit(*some, stop_at=int(rng.integers(1, 30)) if rng.random() < 0.1 else None)
                submitted += len(some)
            if self.alive and rng.random() < 0.03:
                rids = list(self.alive)
                self.core.abort(rids[int(rng.integers(len(rids)))])
                self.core.abort("nobody")
            before = list(self.alive) if rng.random() < 0.2 else ()
            texts = {rid: self.device.texts[rid] for rid in before}
            self.step(wait=rng.random() < 0.8)
            for rid in before:
                if rid not in self.alive:
                    traffic.recent.append(texts[rid].tokens)
            assert not self.failed, self.failed
        self.drain()
        assert not self.failed, self.failed
        self.settle()

    def settle(self) -> None:
        """All is over: every page is free or cached, and free after a flush."""
        assert not self.alive and self.core.idle
        pool = self.core.scheduler.pool
        assert pool.free + pool.cached == pool.total
        self.core.scheduler.check()
        assert self.core.flush()
        assert pool.free == pool.total


def tokens(count: int, first: int = 0) -> np.ndarray:
    """`count` ids in a row, from `first`."""
    return (np.arange(count, dtype=np.int32) + first) % 61


def simulate(config: SchedulerConfig = DEFAULT, **limits) -> Simulation:
    """A simulation without chance that keeps what was launched and said."""
    sim = Simulation(make_limits(**limits), config, stall=0.0, most_delay=0)
    sim.keep_deltas = True
    sim.device.launches = []
    return sim
