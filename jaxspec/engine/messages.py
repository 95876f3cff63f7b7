"""What front end, scheduler and device say to each other: frozen dataclasses of ids and numpy arrays, picklable, no JAX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.sampling_params import SamplingParams

Reason = Literal["stop", "length", "abort"]


class QueueFull(RuntimeError):
    """As many requests wait as `max_queued` allows."""


@dataclass(frozen=True, eq=False)
class Request:
    """One text to be continued.

    Attributes:
      rid: name, unique among the requests that have not ended.
      ids: prompt, int32, at least one token.
      sampling: sampling parameters.
      max_new_tokens: most tokens of output; 0 only takes in the prompt.
      stop_ids: a token of these ends the output and counts as emitted.
      ignore_eos: the caller wants `max_new_tokens` whatever happens (the scheduler then reserves for all of them).
      stop: stop strings; the front end's business, which calls `Core.finish`.
      speculation: False drafts nothing for this row.
      priority: see `SchedulerConfig.low_priority_first`.
      namespace: prompts share pages of the prefix cache only within a namespace (cache salt, extra key).
      group: name of the siblings of one request with n > 1, which share the prompt; `choice` 0 goes first.
      score_from: positions from here on get log-probs, so a prefix hit may not reach beyond it.
    """

    rid: str
    ids: np.ndarray
    sampling: SamplingParams
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    speculation: bool = True
    priority: int = 0
    namespace: tuple = ()
    group: str | None = None
    choice: int = 0
    score_from: int | None = None


@dataclass(frozen=True, eq=False)
class Delta:
    """What a report brought for one request. The last one of a request has a `reason`.

    `from_draft`, `round_of`, `proposed_upto` have one entry a token; `cached_tokens` are the prompt positions that the
    first admission found in the prefix cache, `num_retractions` the preemptions up to now, `at` the core's clock when the
    report was read.
    """

    rid: str
    tokens: list[int]
    from_draft: np.ndarray
    round_of: np.ndarray
    proposed_upto: np.ndarray
    reason: Reason | None
    cached_tokens: int
    num_retractions: int
    at: float = 0.0


class NotANumber(RuntimeError):
    """The model's activations for a request became NaN: its weights are damaged, or its numbers overflow their type."""


@dataclass(frozen=True)
class Failed:
    """A request that ended because a launch raised, or the model's output for it was not a number (`NotANumber`)."""

    rid: str
    message: str
    error: Exception


@dataclass(frozen=True)
class SchedulerConfig:
    """Policy of the scheduler.

    Attributes:
      schedule_policy: "fcfs", or "lpm" (longest cached prefix first, while at most 128 wait).
      schedule_conservativeness: scales the share of its remaining output for which a running row counts at admission.
      prefill_budget: positions of prefill per pass while anyone decodes.
      prefill_decode_interval: decode launches from one pass with prefill to the next, while anyone decodes.
      max_prefill_tokens: positions of prefill per pass while nobody decodes.
      rounds_per_launch: most rounds of a launch.
      pipeline_depth: launches in flight, 1 or 2.
      prefix_cache: whether prompts may take over pages of earlier texts.
      grant_all: every page up to limit + slack is granted at admission, so nobody is ever preempted (closed mode).
      low_priority_first: lower values of `priority` go first instead of higher ones.
      max_queued: most requests that may wait; None for any number.

    Raises:
      ConfigError: a value out of its range.
    """

    schedule_policy: Literal["fcfs", "lpm"] = "fcfs"
    schedule_conservativeness: float = 1.0
    prefill_budget: int = 512
    prefill_decode_interval: int = 1
    max_prefill_tokens: int = 8192
    rounds_per_launch: int = 1
    pipeline_depth: int = 2
    prefix_cache: bool = True
    grant_all: bool = False
    low_priority_first: bool = False
    max_queued: int | None = None

    @classmethod
    def closed(cls, rounds: int, depth: int) -> SchedulerConfig:
        """For a batch that is known from the beginning: all pages at admission, all prompts, then `rounds` at a time."""
        return cls(rounds_per_launch=rounds, pipeline_depth=depth, prefix_cache=False, grant_all=True)

    def __post_init__(self):
        if self.schedule_policy not in ("fcfs", "lpm"):
            raise ConfigError(f'schedule_policy={self.schedule_policy!r} must be "fcfs" or "lpm"')
        if not self.schedule_conservativeness > 0:
            raise ConfigError(f"schedule_conservativeness={self.schedule_conservativeness} must be > 0")
        for name in ("prefill_budget", "prefill_decode_interval", "max_prefill_tokens", "rounds_per_launch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be >= 1")
        if self.pipeline_depth not in (1, 2):
            raise ConfigError(f"pipeline_depth={self.pipeline_depth} must be 1 or 2")
        if self.max_queued is not None and self.max_queued < 1:
            raise ConfigError(f"max_queued={self.max_queued} must be None or >= 1")


@dataclass(frozen=True)
class Limits:
    """What a device can do.

    Attributes:
      buckets: row-table sizes, ascending.
      prefill_sizes: numbers of blocks of the prefill programs, ascending.
      block: positions of a block.
      long_sizes: positions of the programs that take in the beginning of one prompt alone, ascending; may be empty.
      max_len: most positions (prompt and output) of a row.
      total_pages: pages that can be granted, ids 1 … total_pages (page 0 is scratch).
      page_size: slots of a page.
      max_accept: most tokens a round emits.
      slack: slots behind the committed length that a program may write.
      key_lookahead: tokens behind a position on which its draft entries depend.
      separate_blocks: whether several blocks of one text may stand in one prefill program.
      long_anywhere: whether a long program may begin behind what is there already.
      max_ends: most rows whose prompt may end in one prefill program.

    Raises:
      ConfigError: a list that is not ascending, a value out of its range.
    """

    buckets: tuple[int, ...]
    prefill_sizes: tuple[int, ...]
    block: int
    long_sizes: tuple[int, ...]
    max_len: int
    total_pages: int
    page_size: int
    max_accept: int
    slack: int
    key_lookahead: int
    separate_blocks: bool = True
    long_anywhere: bool = False
    max_ends: int = 2**30

    def __post_init__(self):
        for name, may_be_empty in (("buckets", False), ("prefill_sizes", False), ("long_sizes", True)):
            sizes = getattr(self, name)
            if list(sizes) != sorted(set(sizes)) or any(size < 1 for size in sizes) or not (sizes or may_be_empty):
                raise ConfigError(f"{name}={sizes} must be ascending sizes >= 1")
        for name in ("block", "max_len", "total_pages", "page_size", "max_accept", "max_ends"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be >= 1")
        for name in ("slack", "key_lookahead"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be >= 0")


@dataclass(frozen=True, slots=True)
class Block:
    """Positions start … start + count − 1 of the prompt in `row`, count <= Limits.block (a long program: its size)."""

    row: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prefill program. `size` is its number of blocks, or with `long` the positions of its single block."""

    blocks: tuple[Block, ...]
    size: int
    long: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Admission:
    """Overwrites a row of the table.

    Attributes:
      row: its index.
      request: whose row it becomes.
      tokens: int32 prompt; of a resumed request prompt and output so far, the bonus token (index `fill`) included.
      pages: page ids of the columns 0 …; the row's capacity is len(pages) times the page size.
      cached: positions at the beginning whose pages are filled already; the row's committed length.
      fill: positions that prefill has to take in altogether.
      resumed: the token behind `fill` is known, so the end of prefill emits nothing.
      limit: most positions, prompt and output together.
      from_draft, round_of, proposed_upto: the log of the output so far, one entry a token; empty for a first admission.
      rounds, proposed: counters of the last report; 0 for a first admission.
    """

    row: int
    request: Request
    tokens: np.ndarray
    pages: list[int]
    cached: int
    fill: int
    resumed: bool
    limit: int
    from_draft: np.ndarray
    round_of: np.ndarray
    proposed_upto: np.ndarray
    rounds: int
    proposed: int


FINISH_AND_CLEAR = 2
"""A finish order: the row is done and its table holds only the scratch page."""
CLEAR = 3
"""A finish order for a row that the device itself has ended: its table holds only the scratch page."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What changes in the rows of the table, indices as after the regrouping.

    Attributes:
      finish: row -> 1 done, 2 done and table cleared, 3 table cleared.
      grants: (row, column, page).
      capacity: row -> slots of the pages in its table, for rows with grants.
    """

    finish: dict[int, int] = field(default_factory=dict)
    grants: list[tuple[int, int, int]] = field(default_factory=list)
    capacity: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class Launch:
    """Programs for the device, in this order: regroup, orders, admissions, each prefill, report (if there was any prefill),
    rounds, report (if there were any rounds).

    Attributes:
      number: counts launches.
      bucket: rows of the table.
      moves: row i takes what row moves[i] was, -1 an empty row; None for no change. A device starts, and starts again after
        `reset`, with an empty table of the smallest bucket.
      rounds: most rounds, 0 for none.
      sampling_class: the smallest class that serves all rows.
    """

    number: int
    bucket: int
    moves: tuple[int, ...] | None
    orders: Orders
    admissions: tuple[Admission, ...]
    prefills: tuple[Prefill, ...]
    rounds: int
    sampling_class: str


@dataclass(frozen=True, eq=False, slots=True)
class RowReport:
    """A row after the programs of a launch.

    Attributes:
      length: committed positions.
      done: the row has ended; with `stopped` by a stop id, with `broken` by activations that are not numbers, else by its
        limit.
      tokens: emitted since the row's last report, with the log entries `from_draft`, `round_of`, `proposed_upto`.
      rounds, proposed: the row's counters since its first admission.
    """

    length: int
    done: bool
    stopped: bool
    tokens: list[int]
    from_draft: np.ndarray
    round_of: np.ndarray
    proposed_upto: np.ndarray
    rounds: int
    proposed: int
    broken: bool = False


@dataclass(frozen=True, eq=False)
class Report:
    """The rows of the table by index, None where nothing is to be said."""

    kind: Literal["prefill", "rounds"]
    rows: list[RowReport | None]


class Future(Protocol):
    """A report that may still be under way."""

    def ready(self) -> bool:
        """Whether `result` returns without waiting."""

    def result(self) -> Report:
        """Waits for the report; raises what its programs raised."""


class Device(Protocol):
    """Runs launches in order, without waiting for their results."""

    limits: Limits

    def launch(self, launch: Launch) -> list[Future]:
        """Starts the programs and returns their reports: of prefill, of rounds, each if there is one."""

    def reset(self) -> None:
        """Zeroes the pools and empties the table, after a failure."""
