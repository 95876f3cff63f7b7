"""Who gets rows, pages, prefill and rounds: a pure policy that turns requests and reports into launches.

Words: `known` is the committed length in the last report read; `bound` the most it can be by now, launches in flight included;
a row *decodes* when all of its prompt has been launched.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.engine.blocks import pack_prefill
from jaxspec.engine.jobs import NO_LOG, Job, Row
from jaxspec.engine.messages import (
    CLEAR,
    FINISH_AND_CLEAR,
    Admission,
    Delta,
    Failed,
    Launch,
    Limits,
    Orders,
    QueueFull,
    Reason,
    Report,
    Request,
    RowReport,
    SchedulerConfig,
)
from jaxspec.engine.pages import PagePool, pages_for
from jaxspec.engine.prefix import Node, PrefixCache, edges, immutable
from jaxspec.sampling_params import CLASSES

LPM_LIMIT = 128
"""With more waiting requests, "longest cached prefix first" costs more than it brings: arrival decides."""
SHRINK_AFTER = 32
"""Launches for which the rows must have fit a smaller table before it shrinks."""
FIRST_RATIO, LAST_RATIO, RATIO_LAUNCHES, MOST_RESERVED = 0.7, 0.14, 600, 4096
"""Share of its remaining output for which a running row counts at admission: where it starts, to which part of that it falls,
within how many decode launches; and the most tokens of a row that count."""


def concerns(row: Row | None) -> bool:
    """Whether a report about a row still counts: its job may have left it since the launch."""
    return row is not None and not row.retired


def table_slots(reach: int, slack: int) -> int:
    """Slots that a row must own for committing `reach` positions: drafters write provisional entries behind them, which
    would meet those of other rows on the scratch page."""
    return reach + slack


class Scheduler:
    """The policy of one device."""

    def __init__(self, limits: Limits, config: SchedulerConfig):
        self.limits, self.config = limits, config
        self.pool = PagePool(limits.total_pages)
        self.prefix = PrefixCache(self.pool, limits.page_size, limits.key_lookahead)
        self.jobs: dict[str, Job] = {}
        self.queue: list[Job] = []
        self.retractions = self.rounds = self.tokens = self.round_tokens = self.proposed = self.launches = self.stalls = 0
        self.accepted = np.zeros(limits.max_accept + 1, np.int64)  # entry i: rounds that emitted i drafts
        self.hits: deque[tuple[int, int]] = deque(maxlen=256)  # (cached, prompt) positions of the last first admissions
        self._arrivals = 0
        self._best_ratio = self._ratio = min(1.0, FIRST_RATIO * config.schedule_conservativeness)
        self._empty_table()

    def _empty_table(self) -> None:
        self.rows: list[Row | None] = [None] * self.limits.buckets[0]
        self._active = 0
        self._filling: list[Row] = []  # rows whose prefill is not launched to its end, by arrival
        self._first_edges: dict[tuple, list[Row]] = {}  # rows whose prefill has not been reported to its end
        self._leaders: dict[str, Job] = {}
        self._moves: tuple[int, ...] | None = None
        self._clear: dict[int, int] = {}
        self._since_prefill = self.config.prefill_decode_interval
        self._short_turn = False
        self._fits = self._peak = 0

    # Requests come and go.

    def refuse(self, request: Request) -> None:
        """Raises ConfigError for a request that can never run: its prompt is empty or too long, its limit negative."""
        length = len(request.ids)
        if not 1 <= length <= self._most:
            raise ConfigError(
                f"the prompt of {request.rid!r} has {length} tokens; between 1 and {self._most} fit (max_len="
                f"{self.limits.max_len}, {self.limits.total_pages} pages of {self.limits.page_size})"
            )
        if request.max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens={request.max_new_tokens} must be >= 0")

    @property
    def _most(self) -> int:
        """Positions of a request at most."""
        limits = self.limits
        return min(limits.max_len, limits.total_pages * limits.page_size - limits.slack)

    def add(self, request: Request) -> None:
        """Puts a request into the queue.

        Raises:
          ConfigError: as `refuse`; or a name in use.
          QueueFull: `max_queued` requests wait already.
        """
        self.refuse(request)
        length = len(request.ids)
        if request.rid in self.jobs:
            raise ConfigError(f"rid={request.rid!r} names a request that has not ended; names must be unique")
        if self.config.max_queued is not None and len(self.queue) >= self.config.max_queued:
            raise QueueFull(f"{len(self.queue)} requests wait, max_queued={self.config.max_queued}")
        self._arrivals += 1
        urgency = request.priority if self.config.low_priority_first else -request.priority
        size, ahead = self.limits.page_size, self.limits.key_lookahead
        first_edge = None
        if length >= size + ahead:
            first_edge = (request.namespace, edges(np.asarray(request.ids, np.int32), 0, 1, size, ahead)[0])
        limit = min(length + request.max_new_tokens, self._most)
        job = Job(request, self._arrivals, limit, (urgency, 1, self._arrivals), first_edge)
        self.jobs[request.rid] = job
        if request.group is not None and request.choice == 0:
            self._leaders[request.group] = job
        insort(self.queue, job, key=lambda waiting: waiting.order)

    def end(self, rid: str, reason: Reason, kept: int | None = None) -> Delta | None:
        """Ends a request in whatever state, with `kept` tokens of output (None: all). None if it has ended already.

        Raises:
          ConfigError: `kept` is more than was emitted.
        """
        job = self.jobs.get(rid)
        if job is None:
            return None
        if kept is not None:
            if not 0 <= kept <= job.emitted:
                raise ConfigError(f"kept={kept} of {rid!r} must be between 0 and the {job.emitted} tokens emitted so far")
            job.count = len(job.request.ids) + kept
        if job.row is None:
            self.queue.remove(job)
        else:
            self._leave(job.row, FINISH_AND_CLEAR)
        self._forget(job)
        return job.delta(None, reason)

    def _forget(self, job: Job) -> None:
        del self.jobs[job.request.rid]
        self._lead_no_more(job)

    def _lead_no_more(self, job: Job) -> None:
        group = job.request.group
        if group is not None and self._leaders.get(group) is job:
            del self._leaders[group]

    def _leave(self, row: Row, order: int, reusable: bool = True) -> None:
        """Takes a row out of the table; its immutable pages go to the prefix cache if they are `reusable`, the others are free.

        Launches in flight may still write to them; launches run in order, and the next one clears the row's table before
        anybody else uses the pages.
        """
        if reusable:
            self._remember(row)
        self._release(row.pages)
        row.retired, row.job.row = True, None
        self.rows[row.index] = None
        self._active -= 1
        if row.launched < row.fill:
            self._filling.remove(row)
        self._filled(row)
        self._clear_table(row.index, order)

    def _clear_table(self, index: int, order: int) -> None:
        """The next launch, the first that may grant a freed page, takes it out of the old row's table."""
        self._clear[index] = order

    def _remember(self, row: Row) -> None:
        """Enters what is immutable of a row into the prefix cache."""
        if self.config.prefix_cache:
            job = row.job
            positions = immutable(row.known, job.count, self.limits.key_lookahead)
            row.cursor = self.prefix.insert(row.namespace, job.tokens[: job.count], row.pages, positions, row.cursor)

    def _release(self, pages: list[int]) -> None:
        self.prefix.released(self.pool.release(pages))

    def _filled(self, row: Row) -> None:
        """The row's prefill is over: nobody waits for it any more."""
        row.common.clear()
        waiting = self._first_edges.get(row.job.first_edge)
        if waiting is not None and row in waiting:
            waiting.remove(row)
            if not waiting:
                del self._first_edges[row.job.first_edge]

    # Reports.

    def report(self, report: Report, rows: list[Row | None], number: int, rounds: int) -> list[Delta | Failed]:
        """Takes in a report of launch `number`, whose table held `rows` and which ran up to `rounds` rounds."""
        deltas = []
        decoded = report.kind == "rounds"
        for row, news in zip(rows, report.rows, strict=True):
            if news is None or not concerns(row):
                continue
            if decoded and number >= row.decodes_from:
                row.unread -= rounds
                self.stalls += news.rounds == row.job.rounds and not news.done
            delta = self._hear(row, news, decoded)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def _hear(self, row: Row, news: RowReport, decoded: bool) -> Delta | Failed | None:
        job = row.job
        new = len(news.tokens)
        if not new and news.length == row.known and not news.done:
            return None
        filling, row.known = row.known < row.fill, news.length
        if new:
            job.tokens[job.count : job.count + new] = news.tokens
            job.count += new
            job.log.append(news)
            self.tokens += new
        if decoded and news.rounds != job.rounds:
            self.rounds += news.rounds - job.rounds
            self.proposed += news.proposed - job.proposed
            self.round_tokens += new
            since = news.rounds - job.rounds
            drafts = np.bincount(news.round_of - job.rounds - 1, news.from_draft, minlength=since).astype(np.int64)
            np.add.at(self.accepted, drafts, 1)
            job.rounds, job.proposed = news.rounds, news.proposed
        if news.broken:
            self._leave(row, CLEAR, reusable=False)
            self._forget(job)
            return job.broken()
        if news.done:
            self._leave(row, CLEAR)
            self._forget(job)
            return job.delta(news, "stop" if news.stopped else "length")
        if filling:
            self._remember(row)
            if row.known >= row.fill:
                self._filled(row)
                self._lead_no_more(job)
        return job.delta(news, None) if new else None

    def fail(self) -> list[str]:
        """Empties table, pool and prefix cache after a failure, and returns the names of the requests that had rows."""
        lost = [row.job for row in self.rows if row is not None]
        for job in lost:
            self._release(job.row.pages)
            job.row.retired = True
            del self.jobs[job.request.rid]
        self.prefix.reset()
        self._empty_table()
        for job in self.queue:
            job.waits_for = None
            if job.request.group is not None and job.request.choice == 0 and not job.emitted:
                self._leaders[job.request.group] = job
        return [job.request.rid for job in lost]

    # Planning.

    def plan(self) -> tuple[Launch, list[Row | None]] | None:
        """The next launch with the rows of its table, or None if nothing can be launched before a report was read."""
        self.prefix.clock = self.launches
        if not self._active and not self.queue:
            return None
        self._shrink()
        if not self._grant():
            self._admit()
        decoding = [row for row in self.rows if row is not None and row.launched == row.fill]
        # In closed mode a launch may run to the end of its rows, so all prompts are taken in before.
        all_first = self.config.grant_all
        hungry = not all_first and self._may_go_on(decoding)
        prefills = ()
        if self._filling and (not hungry or self._since_prefill >= self.config.prefill_decode_interval):
            prefills = self._prefill(hungry)
            self._since_prefill = 0
        number = self.launches
        for row in [row for row in self._filling if row.launched == row.fill]:
            row.decodes_from = number
            self._filling.remove(row)
            decoding.append(row)
        waits = all_first and (prefills or self._filling)  # first tokens are reported before the rounds
        rounds = self.config.rounds_per_launch if self._may_go_on(decoding) and not waits else 0
        if not prefills and not rounds:
            return None
        if rounds:
            for row in decoding:
                row.unread += rounds
            self._since_prefill += 1
            self._ratio = max(self._ratio - self._best_ratio * (1 - LAST_RATIO) / RATIO_LAUNCHES, self._best_ratio * LAST_RATIO)
        return self._launch(prefills, rounds), list(self.rows)

    def _launch(self, prefills: tuple, rounds: int) -> Launch:
        size = self.limits.page_size
        orders, admissions, kind = Orders(finish=self._clear), [], 0
        for row in self.rows:
            if row is None:
                continue
            kind = max(kind, row.job.kind)
            if row.sent < 0:
                admissions.append(self._admission(row))
            elif row.sent < len(row.pages):
                orders.grants.extend((row.index, column, row.pages[column]) for column in range(row.sent, len(row.pages)))
                orders.capacity[row.index] = len(row.pages) * size
            row.sent = len(row.pages)
        launch = Launch(self.launches, len(self.rows), self._moves, orders, tuple(admissions), prefills, rounds, CLASSES[kind])
        self._clear, self._moves = {}, None
        self.launches += 1
        self._fits = self._fits + 1 if self._bucket(self._active) < len(self.rows) else 0
        self._peak = max(self._peak, self._active) if self._fits else 0
        return launch

    def _admission(self, row: Row) -> Admission:
        job = row.job
        logs = (NO_LOG,) * 3
        if job.emitted:
            logs = tuple(
                np.concatenate([getattr(news, name) for news in job.log])[: job.emitted]
                for name in ("from_draft", "round_of", "proposed_upto")
            )
        tokens = job.tokens[: job.count].copy()
        return Admission(
            row.index,
            job.request,
            tokens,
            list(row.pages),
            row.known,
            row.fill,
            job.emitted > 0,
            row.limit,
            *logs,
            job.rounds,
            job.proposed,
        )

    def _bound(self, row: Row) -> int:
        base = max(row.known, row.launched)
        return max(base, min(row.limit - 1, base + self.limits.max_accept * row.unread))

    def _may_go_on(self, rows: list[Row]) -> bool:
        """Whether one of the rows has not certainly ended by the launches in flight."""
        return any(self._bound(row) < row.limit - 1 for row in rows)

    def _reach(self, row: Row, bound: int) -> int:
        """Positions up to which a row should own pages before a launch."""
        if self.config.grant_all:
            return row.limit
        return max(row.fill, min(row.limit, bound + self.config.rounds_per_launch * self.limits.max_accept))

    # The table.

    def _bucket(self, rows: int) -> int:
        return next(size for size in self.limits.buckets if size >= rows)

    def _shrink(self) -> None:
        if self._fits >= SHRINK_AFTER:
            size = self._bucket(max(self._peak, self._active))
            if size < len(self.rows):
                self._regroup([row.index for row in self.rows if row is not None], size)
            self._fits = self._peak = 0

    def _grow(self) -> None:
        keep = [-1 if row is None else row.index for row in self.rows]
        self._regroup(keep, self._bucket(len(self.rows) + 1))

    def _regroup(self, keep: list[int], size: int) -> None:
        """The table gets `size` rows, the first of them the `keep` ones. Rows that were left are empty behind it, so their
        orders are done by it."""
        moves = tuple(keep) + (-1,) * (size - len(keep))
        self.rows = [self.rows[old] if old >= 0 else None for old in moves]
        for index, row in enumerate(self.rows):
            if row is not None:
                row.index = index
        before = self._moves
        self._moves = moves if before is None else tuple(before[old] if old >= 0 else -1 for old in moves)
        self._clear = {}

    # Pages.

    def _take(self, count: int) -> list[int]:
        """Up to `count` pages, from the free ones and by eviction."""
        if count > self.pool.free:
            self.prefix.evict(count - self.pool.free)
        return self.pool.take(min(count, self.pool.free))

    def _grant(self) -> bool:
        """Gives the decoding rows the pages for their next rounds; returns whether a row was preempted for that.

        The oldest row always gets all it needs, every other at least what it takes to go on.
        """
        limits, wants, wanted = self.limits, [], 0
        for row in self.rows:
            if row is None or row.launched < row.fill:
                continue
            bound = self._bound(row)
            if bound >= row.limit - 1:
                continue  # it may be done already
            pages = pages_for(table_slots(self._reach(row, bound), limits.slack), limits.page_size)
            if pages > len(row.pages):
                wants.append((row, pages, pages_for(table_slots(bound, limits.slack), limits.page_size)))
                wanted += pages - len(row.pages)
        if not wants:
            return False
        if wanted <= self.pool.free:
            for row, pages, _ in wants:
                row.pages += self.pool.take(pages - len(row.pages))
            return False
        preempted = False
        oldest = min((row for row in self.rows if row is not None), key=lambda row: row.job.arrival)
        for row, pages, least in sorted(wants, key=lambda want: want[0].job.arrival):
            while not row.retired:
                row.pages += self._take(pages - len(row.pages))
                if len(row.pages) >= (pages if row is oldest else least):
                    break
                victims = [other for other in self.rows if other is not None and other is not oldest]
                if not victims:
                    raise AssertionError(
                        f"{row.job.request.rid!r} runs alone and {self.limits.total_pages} pages do not suffice"
                    )
                self._preempt(max(victims, key=lambda other: (other.job.order[0], other.job.arrival)))
                preempted = True
        return preempted

    def _preempt(self, row: Row) -> None:
        """Sends a row's job back to the head of the queue; it will go on as if nothing had happened.

        Reports of it that are not read are ignored: what they hold will be produced again.
        """
        job = row.job
        self._leave(row, FINISH_AND_CLEAR)
        job.retractions += 1
        self.retractions += 1
        job.order = (job.order[0], 0, job.arrival)
        insort(self.queue, job, key=lambda waiting: waiting.order)
        running = [row.job for row in self.rows if row is not None]
        decoded = sum(job.emitted for job in running)
        asked = sum(job.limit - len(job.request.ids) for job in running)
        self._ratio = min(1.0, (decoded + 20 * len(running)) / (asked + 1))

    # Admission.

    def _admit(self) -> None:
        if not self.queue or self._active == self.limits.buckets[-1]:
            return
        promised = sum(self._future(row) for row in self.rows if row is not None)
        for job in self._in_order():
            if self._active == self.limits.buckets[-1]:
                break
            if self._waits(job):
                continue
            row = self._place(job, promised)
            if row is None:
                break
            promised += self._future(row)

    def _in_order(self) -> list[Job]:
        if self.config.schedule_policy == "fcfs" or len(self.queue) > LPM_LIMIT or not self.config.prefix_cache:
            return list(self.queue)
        return sorted(self.queue, key=lambda job: (*job.order[:2], -len(self._match(job)), job.arrival))

    def _future(self, row: Row) -> int:
        """Pages that a row is expected to ask for yet."""
        known = max(row.known, row.fill)
        ratio = 1.0 if row.job.request.ignore_eos else self._ratio
        slots = table_slots(min(row.limit, known + int(ratio * min(row.limit - known, MOST_RESERVED))), self.limits.slack)
        return max(0, pages_for(slots, self.limits.page_size) - len(row.pages))

    def _match(self, job: Job) -> list[Node]:
        if not self.config.prefix_cache:
            return []
        return self.prefix.match(job.request.namespace, job.tokens[: job.count], self._hittable(job))

    def _hittable(self, job: Job) -> int:
        """Most pages that a job may take over: at least one position is prefilled, and all that is scored."""
        most = min(job.fill - 1, job.count - self.limits.key_lookahead)
        if job.request.score_from is not None:
            most = min(most, job.request.score_from)
        return most // self.limits.page_size

    def _waits(self, job: Job) -> bool:
        """Whether a job had better wait: for its group's first choice, or for a row that takes in the same prefix now."""
        if not self.config.prefix_cache:
            return False
        if job.request.group is not None and self._leaders.get(job.request.group, job) is not job:
            return True
        if job.waits_for is not None:
            if not job.waits_for.retired and job.waits_for.known < job.waits_for.fill:
                return True
            job.waits_for = None
        rows = self._first_edges.get(job.first_edge)
        if not rows:
            return False
        hit = len(self._match(job))
        job.waits_for = next((row for row in rows if self._common(job, row) > hit), None)
        return job.waits_for is not None

    def _common(self, job: Job, row: Row) -> int:
        """Pages that a job can take over once the row's prefill is over."""
        known = row.common.get(job)
        if known is None:
            shortest = min(job.count, row.job.count)
            differ = np.flatnonzero(job.tokens[:shortest] != row.job.tokens[:shortest])
            equal = int(differ[0]) if len(differ) else shortest
            positions = immutable(row.fill, equal, self.limits.key_lookahead)
            known = row.common[job] = min(positions // self.limits.page_size, self._hittable(job))
        return known

    def _place(self, job: Job, promised: int) -> Row | None:
        """Gives a job a row and pages for its prompt and first rounds, if they leave `promised` ones for the others."""
        limits, config = self.limits, self.config
        reach = job.limit if config.grant_all else min(job.limit, job.fill + config.rounds_per_launch * limits.max_accept)
        total = pages_for(table_slots(max(job.fill, reach), limits.slack), limits.page_size)
        if total - self._hittable(job) + promised > self.pool.free + self.pool.cached:
            return None
        path = self._match(job)
        hit = [node.page for node in path]
        self.pool.hold(hit)
        own = total - len(hit)
        pages = self._take(own) if own + promised <= self.pool.free + self.pool.cached else []
        if len(pages) < own:
            self._release(hit + pages)
            return None
        self.prefix.touch(path)
        if None not in self.rows:
            self._grow()
        row = Row(job, self.rows.index(None), hit + pages, len(hit) * limits.page_size, (path[-1], len(path)) if path else None)
        self.rows[row.index] = job.row = row
        self._active += 1
        self.queue.remove(job)
        insort(self._filling, row, key=lambda filling: filling.job.arrival)
        self._first_edges.setdefault(job.first_edge, []).append(row)
        if job.cached_tokens < 0:
            job.cached_tokens = row.known
            self.hits.append((row.known, row.fill))
        return row

    # Prefill.

    def _prefill(self, hungry: bool) -> tuple:
        """Packs this pass's prefill; while a long prompt is at the head, every second pass begins with the others."""
        budget = self.config.prefill_budget if hungry else self.config.max_prefill_tokens
        rows = self._filling
        if len(rows) > 1 and rows[0].fill - rows[0].launched > 4 * self.config.prefill_budget:
            if self._short_turn:
                rows = rows[1:] + rows[:1]
            self._short_turn = not self._short_turn
        return pack_prefill(rows, self.limits, budget, allow_long=not hungry)

    def check(self) -> None:
        """Raises AssertionError unless the books agree: classes of pages, tables, the trie, lengths, the queue."""
        alive = [row for row in self.rows if row is not None]
        self.pool.check([row.pages for row in alive], [node.page for node in self.prefix.nodes()])
        self.prefix.check()
        assert len(alive) == self._active
        assert {id(job) for job in self.jobs.values()} == {id(row.job) for row in alive} | {id(job) for job in self.queue}
        assert sorted((row for row in alive if row.launched < row.fill), key=lambda row: row.job.arrival) == self._filling
        for index, row in enumerate(self.rows):
            if row is None:
                continue
            assert row.index == index and row.job.row is row and not row.retired
            assert row.unread >= 0 and row.known <= self._bound(row)
            slots = len(row.pages) * self.limits.page_size
            assert row.known <= slots and table_slots(row.fill, self.limits.slack) <= slots
            if row.cursor is not None and row.cursor[0].parent is not row.cursor[0]:
                node, depth = row.cursor
                size, ahead = self.limits.page_size, self.limits.key_lookahead
                for edge in reversed(edges(row.job.tokens[: row.job.count], 0, depth, size, ahead)):
                    assert node.edge == edge, f"the trie's text differs from that of {row.job.request.rid!r}"
                    node = node.parent
