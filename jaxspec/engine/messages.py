"""What front end, core and device say to each other: frozen records of token ids and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxspec.sampling_params import SamplingParams


@dataclass(frozen=True, eq=False)
class Request:
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


@dataclass(frozen=True)
class Limits:
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
    max_ends: int = 16


@dataclass(frozen=True)
class Block:
    row: int
    start: int
    count: int


@dataclass(frozen=True)
class Prefill:
    blocks: tuple[Block, ...]
    size: int
    long: bool = False


@dataclass(frozen=True, eq=False)
class Admission:
    row: int
    request: Request
    tokens: np.ndarray
    pages: list[int]
    cached: int
    fill: int
    resumed: bool
    limit: int
    rounds: int = 0
    proposed: int = 0


@dataclass(frozen=True)
class Orders:
    finish: dict[int, int] = field(default_factory=dict)
    grants: list = field(default_factory=list)
    capacity: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Launch:
    number: int
    bucket: int
    moves: tuple[int, ...] | None
    orders: Orders
    admissions: tuple[Admission, ...]
    prefills: tuple[Prefill, ...]
    rounds: int
    sampling_class: str


@dataclass(frozen=True, eq=False)
class RowReport:
    length: int
    done: bool
    stopped: bool
    tokens: list[int]
    from_draft: np.ndarray
    round_of: np.ndarray
    proposed_upto: np.ndarray
    rounds: int
    proposed: int


@dataclass(frozen=True, eq=False)
class Report:
    kind: str
    rows: list
