"""What a scheduler keeps of a request that has not ended: its job, and the row that the job has while it runs."""

from __future__ import annotations

import math

import numpy as np

from jaxspec.engine.messages import Delta, Failed, NotANumber, Reason, Request, RowReport
from jaxspec.engine.prefix import Node
from jaxspec.sampling_params import CLASSES, sampling_class

NO_LOG = np.zeros(0, np.int32)


class Job:
    """A request that has not ended: its official tokens, its log, and its row while it has one."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "count",
        "first_edge",
        "kind",
        "limit",
        "log",
        "order",
        "proposed",
        "request",
        "retractions",
        "rounds",
        "row",
        "tokens",
        "waits_for",
    )

    def __init__(self, request: Request, arrival: int, limit: int, order: tuple, first_edge: tuple | None):
        self.request, self.arrival, self.limit, self.order, self.first_edge = request, arrival, limit, order, first_edge
        self.count = len(request.ids)
        self.tokens = np.empty(limit, np.int32)
        self.tokens[: self.count] = request.ids
        self.log: list[RowReport] = []
        self.rounds = self.proposed = self.retractions = 0
        self.cached_tokens = -1
        self.kind = CLASSES.index(sampling_class(request.sampling))
        self.row: Row | None = None
        self.waits_for: Row | None = None

    @property
    def emitted(self) -> int:
        """Tokens of output."""
        return self.count - len(self.request.ids)

    @property
    def fill(self) -> int:
        """Positions that prefill has to take in: the prompt, or of a resumed request all before its bonus token."""
        return self.count - 1 if self.emitted else self.count

    def broken(self) -> Failed:
        """What the caller hears when the model's output for the job is not a number."""
        message = (
            f"request {self.request.rid!r} ends after {self.emitted} tokens behind a prompt of {len(self.request.ids)}: the "
            "model's activations are not numbers (NaN). Its weights are damaged (convert them again), or numbers overflow "
            "their type (load with dtype='bfloat16' or 'float32')"
        )
        return Failed(self.request.rid, message, NotANumber(message))

    def delta(self, news: RowReport | None, reason: Reason | None) -> Delta:
        """What `news` brought."""
        tokens, logs = (
            ([], (NO_LOG,) * 3) if news is None else (news.tokens, (news.from_draft, news.round_of, news.proposed_upto))
        )
        return Delta(self.request.rid, tokens, *logs, reason, max(self.cached_tokens, 0), self.retractions)


class Row:
    """A job's place in the table. Reports and launches hold rows, not indices: a late one never reaches another job's row."""

    __slots__ = (
        "common",
        "cursor",
        "decodes_from",
        "fill",
        "index",
        "job",
        "known",
        "launched",
        "limit",
        "namespace",
        "pages",
        "retired",
        "sent",
        "unread",
    )

    def __init__(self, job: Job, index: int, pages: list[int], cached: int, cursor: tuple[Node, int] | None):
        self.job, self.index, self.pages, self.cursor = job, index, pages, cursor
        self.known = self.launched = cached
        self.fill, self.limit, self.namespace = job.fill, job.limit, job.request.namespace
        self.sent = -1  # pages that the device knows of; -1 before the admission was launched
        self.unread = 0  # rounds launched for the row whose report was not read
        self.decodes_from: float = math.inf  # the first launch that may run rounds of it
        self.common: dict[Job, int] = {}  # pages that waiting jobs share with it, while its prefill lasts
        self.retired = False
