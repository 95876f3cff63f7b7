"""Lists of rounds to measure: the rows of the peer table, in order of importance, and the machinery that runs them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxspec.benchmarking.bandwidth import Bandwidth
from jaxspec.benchmarking.records import write_rows
from jaxspec.benchmarking.rounds import RoundCase, RoundResult, measure
from jaxspec.benchmarking.shapes import random_draft, random_model
from jaxspec.config import ConfigError, SpecConfig
from jaxspec.params import ModelParams


@dataclasses.dataclass(frozen=True)
class SuiteCase:
    """A case with the built-in shapes that it needs (`shapes.MODELS`, `shapes.drafts`)."""

    case: RoundCase
    draft: str | None = None


def _row(name: str, algorithm: str, tree: tuple[int | None, int | None, int | None], draft: str | None) -> SuiteCase:
    return SuiteCase(RoundCase(name, algorithm, SpecConfig(*tree)), draft)


PEER_ROWS: dict[str, SuiteCase] = {
    row.case.name: row
    for row in (
        _row("plain", "NONE", (None, None, None), None),
        _row("eagle3 3/1/4", "EAGLE3", (3, 1, 4), "eagle3"),
        _row("eagle3 5/4/8", "EAGLE3", (5, 4, 8), "eagle3"),
        _row("eagle3 3/4/16", "EAGLE3", (3, 4, 16), "eagle3"),
        _row("eagle3 5/8/64", "EAGLE3", (5, 8, 64), "eagle3"),
        _row("eagle 5/4/8", "EAGLE", (5, 4, 8), "eagle"),
        _row("ngram 16", "NGRAM", (None, None, 16), None),
        _row("standalone 3/1/4", "STANDALONE", (3, 1, 4), "llama-1b"),
        _row("dflash 16", "DFLASH", (None, None, None), "dflash"),
        _row("dflash tree 16", "DFLASH", (None, 4, 16), "dflash"),
        _row("uno 8/1/8", "UNO", (None, 1, 8), "uno"),
        _row("uno 16/32/32", "UNO", (15, 32, 32), "uno"),
    )
}
"""The rounds of the peer table by name, at batch 1 and context 512."""

PEER_ORDER: tuple[tuple[str, int, int], ...] = (
    ("standalone 3/1/4", 1, 512),
    ("dflash 16", 1, 512),
    ("plain", 1, 512),
    ("eagle3 3/1/4", 1, 512),
    ("uno 8/1/8", 1, 512),
    ("dflash tree 16", 1, 512),
    ("dflash 16", 8, 512),
    ("eagle3 5/8/64", 8, 512),
    ("eagle3 3/4/16", 8, 512),
    ("ngram 16", 8, 512),
    ("eagle3 5/4/8", 1, 512),
    ("eagle3 5/8/64", 1, 512),
    ("plain", 8, 512),
    ("eagle3 3/1/4", 8, 512),
    ("ngram 16", 1, 512),
    ("eagle 5/4/8", 1, 512),
    ("eagle3 3/4/16", 1, 512),
    ("eagle3 5/4/8", 8, 512),
    ("plain", 32, 512),
    ("eagle3 3/1/4", 32, 512),
    ("plain", 1, 8192),
    ("eagle3 3/1/4", 1, 8192),
    ("plain", 8, 8192),
    ("eagle3 3/1/4", 8, 8192),
    ("uno 16/32/32", 1, 512),
    ("uno 8/1/8", 8, 512),
    ("dflash tree 16", 8, 512),
    ("eagle3 5/8/64", 1, 8192),
    ("plain", 4, 512),
    ("eagle3 3/1/4", 4, 512),
)
"""Row, batch, context of the peer suite, the most telling first, for a run that may have to stop early."""


def peer_suite(names: Sequence[str] = (), batches: Sequence[int] = (), contexts: Sequence[int] = ()) -> list[SuiteCase]:
    """The peer table's cases, narrowed to the given rows, batches and contexts.

    Raises ConfigError for a name that is no row.
    """
    unknown = [n for n in names if n not in PEER_ROWS]
    if unknown:
        raise ConfigError(f"{unknown} are no rows of the peer suite; rows: {', '.join(PEER_ROWS)}")
    found = []
    for name, batch, context in PEER_ORDER:
        row = PEER_ROWS[name]
        chosen = (not names or name in names) and (not batches or batch in batches) and (not contexts or context in contexts)
        if chosen:
            found.append(dataclasses.replace(row, case=dataclasses.replace(row.case, batch=batch, context=context)))
    return found


class Weights:
    """Random weights by name, made once and shared by all rows of a run."""

    def __init__(self, target: str, dtype: Any):
        self.dtype = dtype
        self.target: ModelParams = random_model(target, dtype)
        self._drafts: dict[str | None, Any] = {None: None}

    def draft(self, name: str | None) -> Any:
        """The draft of that name for the target."""
        if name not in self._drafts:
            self._drafts[name] = random_draft(name, self.target.config, self.dtype)
        return self._drafts[name]


class Given:
    """One target and one draft that exist already, in the place of `Weights`."""

    def __init__(self, target: ModelParams, draft: Any):
        self.target, self._draft = target, draft

    def draft(self, name: str | None) -> Any:
        """The draft, whatever it is called."""
        del name
        return self._draft


def run_suite(
    cases: Iterable[SuiteCase],
    weights: Weights | Given,
    bandwidth: Bandwidth,
    *,
    budget: float | None = None,
    path: str | Path | None = None,
    kept: Sequence[dict] = (),
    report: Callable[[RoundResult], None] | None = None,
    log: Callable[[str], None] = print,
    **options: Any,
) -> list[RoundResult]:
    """Measures cases one after another; one of several that fails is named and skipped.

    Args:
      cases: in order of importance.
      weights: shared by all.
      bandwidth: of this run.
      budget: seconds; no case is begun that would not be through by then, by the slowest one so far. None: no limit.
      path: JSON file, rewritten after every case.
      kept: rows of earlier runs that stay at its head.
      report: receives every result as it comes.
      log: receives progress and reasons in words.
      **options: of `rounds.measure`.
    """
    begun, slowest = time.perf_counter(), 0.0
    cases, results = list(cases), []
    for i, entry in enumerate(cases):
        start = time.perf_counter()
        left = None if budget is None else budget - (start - begun)
        if left is not None and left < 1.2 * slowest:
            log(f"stopped with {left:.0f} s left of {budget:.0f}: {len(cases) - i} of {len(cases)} cases were not begun")
            break
        case = entry.case
        label = f"{case.name}, batch {case.batch}, context {case.context}"
        try:
            result = measure(case, weights.target, weights.draft(entry.draft), bandwidth, **options)
        except Exception as error:  # a row that fails must not cost the others
            if len(cases) == 1:
                raise
            log(f"{label}: {type(error).__name__}: {str(error)[:600]}")
            continue
        took = time.perf_counter() - start
        slowest = max(slowest, took)
        log(f"{label}: {result.ms:.3f} ms ({took:.0f} s, {result.compile_seconds:.0f} of them compiling)")
        results.append(result)
        if report is not None:
            report(result)
        if path is not None:
            write_rows(path, [*kept, *(r.to_json() for r in results)])
    return results
