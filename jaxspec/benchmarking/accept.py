"""Accept length and speed-up of drafts on prompt sets.

Accept lengths come from large batches, in which greedy and sampled copies of all prompts run side by side in one program: a
row's tokens do not depend on its neighbours. Speed comes from one prompt at a time, plain and speculative decoding by
turns, over fewer prompts. Every prompt ends at the model's own stop token or after `new_tokens`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxspec.benchmarking.turns import Turns
from jaxspec.config import ConfigError, SpecConfig
from jaxspec.generation import generate
from jaxspec.params import ModelParams
from jaxspec.results import GenerationResult

FIRST_SEED = 1000
SAVE_SECONDS = 10.0
"""Between two savings of the timings."""
PLAIN = "none"


@dataclasses.dataclass(frozen=True)
class Row:
    """What is measured: a draft and a tree.

    Attributes:
      head: a name in ``ModelParams.drafts``, or an algorithm that needs no draft ("none", "ngram").
      num_steps, topk, num_draft_tokens: as asked for; None leaves it to the algorithm's general rules.
    """

    head: str
    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None

    @classmethod
    def parse(cls, text: str) -> Row:
        """``eagle3 5/4/8``, ``ngram 12`` (num_draft_tokens alone), ``dflash 7/-/-``, or a head's name for its own tree.

        Raises ConfigError for anything else.
        """
        head, _, tree = text.strip().partition(" ")
        parts = tree.split("/") if tree else []
        parts = ["-", "-", *parts] if len(parts) == 1 else parts or ["-"] * 3
        try:
            if len(parts) != 3:
                raise ValueError
            numbers = [None if part == "-" else int(part) for part in parts]
            return cls(head.lower(), *numbers)
        except ValueError:
            raise ConfigError(f"row {text!r} must read 'head', 'head N' or 'head S/k/N', a number or - each") from None

    @property
    def tree(self) -> tuple[int | None, int | None, int | None]:
        """The three parameters."""
        return self.num_steps, self.topk, self.num_draft_tokens

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        if self.tree == (None, None, None):
            return self.head
        if self.tree[:2] == (None, None):
            return f"{self.head} {self.num_draft_tokens}"
        return f"{self.head} {'/'.join('-' if n is None else str(n) for n in self.tree)}"


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """Prompts as token ids, chat template applied."""

    name: str
    prompts: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
      temperatures: each with its own figures.
      timed_temperatures: those of them whose speed is measured.
      new_tokens: most tokens of an answer.
      batch: requests at once for accept lengths.
      timed: prompts of each set for speed; 0 measures no speed.
      repeats: timings of a prompt, of which the median counts.
      prompts: prompts of each set for accept lengths; 0 takes them from the timed answers.
      share: (i, n): of those prompts every n-th from the i-th on, where n processes share the work.
      threads: programs that are compiled at once.
    """

    temperatures: tuple[float, ...] = (0.0, 1.0)
    timed_temperatures: tuple[float, ...] = (0.0, 1.0)
    new_tokens: int = 256
    batch: int = 32
    timed: int = 8
    repeats: int = 1
    prompts: int = 80
    share: tuple[int, int] = (0, 1)
    threads: int = 8


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt of a set at one temperature."""

    set: str
    index: int
    temperature: float
    ids: tuple[int, ...]


def answer(
    params: ModelParams, row: Row, requests: Sequence[Request], settings: Settings, new_tokens: int | None = None
) -> list[GenerationResult]:
    """A batch's answers, of at most `new_tokens` (else the settings') tokens.

    Raises ConfigError for a head that the model does not have, or a tree that it cannot draft.
    """
    draft = params.drafts.get(row.head)
    if draft is None and row.head not in (PLAIN, "ngram"):
        raise ConfigError(f"row {row.name!r}: no such head; the model has {', '.join(params.drafts) or 'none'}")
    return generate(
        params,
        [list(r.ids) for r in requests],
        draft=draft,
        algorithm="auto" if draft is not None else row.head,
        spec=SpecConfig(*row.tree),
        temperature=[r.temperature for r in requests],
        seed=[FIRST_SEED + r.index for r in requests],
        max_new_tokens=settings.new_tokens if new_tokens is None else new_tokens,
    )


def warm(params: ModelParams, row: Row, requests: Sequence[Request], settings: Settings) -> None:
    """Compiles what a batch needs and runs one round."""
    answer(params, row, requests, settings, new_tokens=2)


def requests_of(
    sets: Sequence[PromptSet], temperatures: Sequence[float], count: int, share: tuple[int, int] = (0, 1)
) -> list[Request]:
    """The first prompts of all sets at all temperatures; of them every n-th from the i-th on for a share (i, n)."""
    first, step = share
    return [
        Request(s.name, i, t, s.prompts[i])
        for s in sets
        for i in range(first, min(count, len(s.prompts)), step)
        for t in temperatures
    ]


def batched(requests: Sequence[Request], size: int, temperatures: Sequence[float]) -> list[list[Request]]:
    """Batches of `size`, the last one filled up with the first requests.

    Whether any row samples is part of the program: each batch has all temperatures, as requests come in that order.
    """
    count = len(requests)
    size = -(-min(size, count) // len(temperatures)) * len(temperatures)
    return [[requests[(i + j) % count] for j in range(size)] for i in range(0, count, size)]


@dataclasses.dataclass
class Tally:
    """What is known of one row on one set at one temperature."""

    answers: list[GenerationResult] = dataclasses.field(default_factory=list)
    plain: list[list[GenerationResult]] = dataclasses.field(default_factory=list)
    timed: list[list[GenerationResult]] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The figures, in JSON's types."""
        answers = self.answers or [times[0] for times in self.timed]
        rounds = sum(r.stats.rounds for r in answers)
        depth = max(len(r.stats.accept_by_depth) for r in answers)
        shares = [np.pad(r.stats.accept_by_depth, (0, depth - len(r.stats.accept_by_depth))) for r in answers]
        weights = [max(r.stats.rounds, 1e-9) for r in answers]
        found: dict[str, Any] = {
            "algorithm": answers[0].stats.algorithm,
            "resolved": [answers[0].stats.num_steps, answers[0].stats.topk, answers[0].stats.num_draft_tokens],
            "prompts": len(answers),
            "completion_tokens": sum(r.stats.completion_tokens for r in answers),
            "rounds": rounds,
            "accept_length": emitted(answers) / rounds if rounds else 1.0,
            "accept_length_by_prompt_mean": statistics.mean(r.stats.accept_length for r in answers),
            "tokens_per_pass": sum(r.stats.tokens_per_pass * r.stats.rounds for r in answers) / rounds if rounds else 1.0,
            "accept_by_depth": np.average(shares, axis=0, weights=weights).tolist() if depth else [],
        }
        if self.timed:
            timed = by_prompt(self.plain, self.timed)
            same = sum(a[0].tokens == b[0].tokens for a, b in zip(self.plain, self.timed, strict=True))
            found |= {**speed(timed), "repeats": len(self.timed[0]), "same_tokens": same, "by_prompt": timed}
        return found


def emitted(answers: Sequence[GenerationResult]) -> float:
    """Tokens that rounds emitted."""
    return sum(r.stats.accept_length * r.stats.rounds for r in answers)


def by_prompt(plain: Sequence[Sequence[GenerationResult]], spec: Sequence[Sequence[GenerationResult]]) -> dict[str, list]:
    """What was timed, prompt by prompt, plain and speculative: seconds (median of the repeats), tokens of rounds, rounds."""

    def columns(answers: Sequence[Sequence[GenerationResult]], name: str) -> dict[str, list]:
        return {
            f"{name}seconds": [statistics.median(r.stats.decode_seconds for r in times) for times in answers],
            f"{name}tokens": [emitted(times[:1]) for times in answers],
            f"{name}rounds": [times[0].stats.rounds for times in answers],
        }

    return {**columns(plain, "plain_"), **columns(spec, "")}


def speed(timed: dict[str, list]) -> dict[str, Any]:
    """Tokens per second of both, and their ratio over all prompts and by prompt, from the columns of `by_prompt`."""
    columns = {name: np.array(values, float) for name, values in timed.items()}
    plain_seconds, plain_tokens, plain_rounds = (columns[f"plain_{name}"] for name in ("seconds", "tokens", "rounds"))
    seconds, tokens, rounds = (columns[name] for name in ("seconds", "tokens", "rounds"))
    plain_rate, rate = float(plain_tokens.sum() / plain_seconds.sum()), float(tokens.sum() / seconds.sum())
    each = (plain_seconds / np.maximum(plain_tokens, 1)) / (seconds / np.maximum(tokens, 1))
    return {
        "timed_prompts": len(seconds),
        "plain_tokens_per_second": plain_rate,
        "tokens_per_second": rate,
        "speedup": rate / plain_rate,
        "median_speedup": float(np.median(each)),
        "plain_round_ms": float(np.median(plain_seconds / np.maximum(plain_rounds, 1))) * 1e3,
        "round_ms": float(np.median(seconds / np.maximum(rounds, 1))) * 1e3,
        "timed_accept_length": float(tokens.sum() / max(rounds.sum(), 1)),
    }


Figures = dict[tuple[Row, str, float], dict[str, Any]]
"""What was found, by row, set and temperature."""


def figures(tallies: dict[tuple[Row, str, float], Tally]) -> Figures:
    """Those of all tallies that have an answer."""
    return {key: tally.to_json() for key, tally in tallies.items() if tally.answers or tally.timed}


@dataclasses.dataclass
class Group:
    """Rows that are compiled together, share the timings of plain decoding, and are measured one after another.

    Attributes:
      turns: where other processes measure on the same device: one compiles beside others, and times alone.
    """

    params: ModelParams
    rows: Sequence[Row]
    sets: Sequence[PromptSet]
    settings: Settings
    log: Callable[[str], None] = print
    turns: Turns = Turns()

    def __post_init__(self):
        s = self.settings
        self.requests = requests_of(self.sets, s.temperatures, s.prompts, s.share)
        self.batches = batched(self.requests, s.batch, s.temperatures) if self.requests else []
        timed = requests_of(self.sets, s.timed_temperatures, s.timed, s.share)
        self.timed = sorted(timed, key=lambda r: r.index)  # stopped early, all sets have had as many prompts

    def compile(self) -> list[Row]:
        """Compiles all programs, several at once; rows that fail are named and left out."""
        begun = time.perf_counter()
        plain = [Row(PLAIN)] if self.timed and Row(PLAIN) not in self.rows else []
        jobs = [(row, self.batches[0]) for row in self.rows if self.batches]
        for temperature in self.settings.timed_temperatures if self.timed else ():
            one = [next(r for r in self.timed if r.temperature == temperature)]
            jobs += [(row, one) for row in (*plain, *self.rows)]
        left, failed = [], {}
        with concurrent.futures.ThreadPoolExecutor(self.settings.threads) as pool:
            running = {pool.submit(warm, self.params, *job, self.settings): job for job in jobs}
            for done in concurrent.futures.as_completed(running):
                if done.exception() is not None:
                    left.append(running[done])
        for row, batch in left:  # once more, by itself: several compilers at once may have run out of memory
            try:
                warm(self.params, row, batch, self.settings)
            except Exception as error:  # the other rows go on
                failed[row] = error
        for row, error in failed.items():
            if row in plain:
                raise error
            self.log(f"{row.name}: {type(error).__name__}: {str(error)[:600]}")
        took = time.perf_counter() - begun
        self.log(f"{len(jobs)} pairs of programs compiled in {took:.0f} s")
        return [row for row in self.rows if row not in failed]

    def measure(self, save: Callable[[Figures], None] = lambda _: None, until: float | None = None) -> Figures:
        """Figures by (row, set, temperature).

        Args:
          save: called with the figures so far behind the accept lengths and now and then between the timings.
          until: no prompt is timed after this reading of `time.perf_counter`.
        """
        with self.turns.together():
            rows = self.compile()
            tallies = {(row, s.name, t): Tally() for row in rows for s in self.sets for t in self.settings.temperatures}
            for row in rows:
                begun, left = time.perf_counter(), len(self.requests)
                for batch in self.batches:
                    for request, result in zip(batch[:left], answer(self.params, row, batch, self.settings), strict=False):
                        tallies[row, request.set, request.temperature].answers.append(result)
                    left -= len(batch)
                if self.batches:
                    self.log(f"{row.name}: accept lengths of {len(self.requests)} answers, {time.perf_counter() - begun:.0f} s")
                    save(figures(tallies))
        begun = saved = time.perf_counter()
        timed = self.timed if rows else []
        for count, request in enumerate(timed):
            if count and until is not None and time.perf_counter() > until:  # one is timed, however late it is
                self.log(f"no time left: {count} of {len(timed)} prompts timed")
                break
            try:
                with self.turns.alone():
                    self.time(request, rows, tallies)
            except TimeoutError as error:
                self.log(f"{count} of {len(timed)} prompts timed: {error}")
                break
            if time.perf_counter() - saved > SAVE_SECONDS:
                save(figures(tallies))
                saved = time.perf_counter()
        if timed:
            self.log(f"timed with {len(rows)} rows in {time.perf_counter() - begun:.0f} s")
        return figures(tallies)

    def time(self, request: Request, rows: Sequence[Row], tallies: dict) -> None:
        """One prompt by all rows and by plain decoding, in turns."""
        found: dict[Row, list[GenerationResult]] = {row: [] for row in (Row(PLAIN), *rows)}
        for _ in range(self.settings.repeats):
            for row, results in found.items():
                results += answer(self.params, row, [request], self.settings)
        for row in rows:
            tally = tallies[row, request.set, request.temperature]
            tally.plain.append(found[Row(PLAIN)])
            tally.timed.append(found[row])
