"""A device without a model: it keeps what every slot holds and fails when a program reads a slot of another text.

A text is a function of its prompt and seed, so every request has one right output, whatever happens to its row. A slot holds
a hash of the tokens up to its position (the target's entry), one that also covers the tokens up to `key_lookahead` behind it
(the draft's entry; junk while these are not known), and which row wrote it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxspec.engine.messages import Admission, Launch, Limits, Prefill, Report, Request, RowReport

VOCABULARY = 61
FACTOR = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
NO_LOG = np.zeros(0, np.int32)
JUNK = np.uint64(0xDEADDEADDEADDEAD)


def powers(base: int, count: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.cumprod(np.concatenate([[1], np.full(count - 1, base, np.uint64)]).astype(np.uint64), dtype=np.uint64)


MOST = 4096
UP, DOWN = powers(FACTOR, MOST), powers(pow(FACTOR, -1, 2**64), MOST)


def prefix_hashes(tokens: np.ndarray) -> np.ndarray:
    """uint64 hash of tokens[: p + 1] at p."""
    with np.errstate(over="ignore"):
        return np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * DOWN[: len(tokens)], dtype=np.uint64) * UP[: len(tokens)]


@dataclass
class Text:
    """The one right text of a request: `tokens` up to its limit, of which it emits those before `end`."""

    tokens: np.ndarray
    hashes: np.ndarray
    prompt: int
    end: int
    stopped: bool

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt : self.end].tolist()


def text_of(request: Request, limits: Limits) -> Text:
    prompt = len(request.ids)
    most = min(limits.max_len, limits.total_pages * limits.page_size - limits.slack)
    limit = min(prompt + request.max_new_tokens, most)
    state = int(prefix_hashes(request.ids)[-1])
    seed = ((request.sampling.seed or 0) + request.choice) * 0x632BE59BD9B4E019
    tokens, stopped, stops = request.ids.tolist(), False, frozenset(request.stop_ids)
    while len(tokens) < limit and not stopped:
        token = ((((state ^ seed) * FACTOR) & MASK) >> 33) % VOCABULARY
        tokens.append(token)
        state = (state * FACTOR + token + 1) & MASK
        stopped = token in stops
    tokens = np.asarray(tokens, np.int32)
    return Text(tokens, prefix_hashes(tokens), prompt, len(tokens), stopped)


def both(target: np.ndarray, draft: np.ndarray) -> np.ndarray:
    """One hash of the target's and the draft's entry."""
    with np.errstate(over="ignore"):
        return target ^ (draft * np.uint64(0xD1B54A32D192ED03))


class ReadError(RuntimeError):
    """A program read or would have written what it must not."""


def require(condition, message: str) -> None:
    if not condition:
        raise ReadError(message)


class FakeFuture:
    def __init__(self, report: Report, delay: int):
        self.report, self.delay = report, delay

    def ready(self) -> bool:
        self.delay -= 1
        return self.delay < 0

    def result(self) -> Report:
        return self.report


class FakeDevice:
    """Executes launches at once; reports are *ready* after up to `most_delay` questions.

    Draws accept counts and stalls from `seed`. `texts` keeps the right text of every request by rid (of those that are not
    in it the device makes them); `fail_at` is a launch number that raises.
    """

    def __init__(self, limits: Limits, seed: int = 0, stall: float = 0.02, most_delay: int = 4):
        self.limits, self.stall, self.most_delay = limits, stall, most_delay
        self.rng = np.random.default_rng(seed)
        self.texts: dict[str, Text] = {}
        self.fail_at: int | None = None
        self.launches: list[Launch] | None = None  # a list here keeps them
        self.reset()

    def reset(self) -> None:
        limits = self.limits
        slots = (limits.total_pages + 1) * limits.page_size
        self.target = np.zeros(slots, np.uint64)
        self.both = np.zeros(slots, np.uint64)
        self.writer = np.zeros(slots, np.int64)
        self.columns = -(-(limits.max_len + limits.slack) // limits.page_size)
        self.width = limits.max_len + limits.slack + limits.key_lookahead + limits.max_accept
        self._uids = getattr(self, "_uids", 0)
        self.rows = self._empty(limits.buckets[0])

    def _empty(self, count: int) -> dict[str, np.ndarray]:
        names = ("length", "count", "fill", "capacity", "end", "uid", "seen", "rounds", "proposed")
        rows = {name: np.zeros(count, np.int64) for name in names}
        rows |= {name: np.zeros(count, bool) for name in ("stopped", "drafting", "ended")}
        rows["text"] = np.zeros((count, self.width), np.int32)
        rows["log"] = np.zeros((count, self.width, 3), np.int32)  # from_draft, round_of, proposed_upto
        rows["hashes"] = np.zeros((count, self.width), np.uint64)
        rows["both"] = np.zeros((count, self.width), np.uint64)
        rows["table"] = np.zeros((count, self.columns), np.int64)
        rows["slots"] = np.zeros((count, self.columns * self.limits.page_size), np.int64)
        rows["ended"][:] = True
        return rows

    # Programs.

    def launch(self, launch: Launch) -> list[FakeFuture]:
        if self.launches is not None:
            self.launches.append(launch)
        if launch.number == self.fail_at:
            raise RuntimeError("the device fell over")
        self._regroup(launch)
        self._orders(launch)
        for admission in launch.admissions:
            self._admit(admission)
        reports = []
        if launch.prefills:
            for program in launch.prefills:
                self._prefill(program)
            reports.append(self._report("prefill"))
        if launch.rounds:
            for _ in range(launch.rounds):
                if not self._round():
                    break
            reports.append(self._report("rounds"))
        require(reports, f"launch {launch.number} does nothing")
        delays = self.rng.integers(0, self.most_delay + 1, len(reports))
        return [FakeFuture(report, int(delay)) for report, delay in zip(reports, delays, strict=True)]

    def _regroup(self, launch: Launch) -> None:
        require(launch.bucket in self.limits.buckets, f"no table has {launch.bucket} rows")
        if launch.moves is not None:
            require(len(launch.moves) == launch.bucket, "moves differ from the bucket")
            empty = self._empty(1)
            moves = np.asarray(launch.moves)
            self.rows = {name: np.concatenate([leaf, empty[name]])[moves] for name, leaf in self.rows.items()}
        require(len(self.rows["length"]) == launch.bucket, "the bucket changed without moves")

    def _orders(self, launch: Launch) -> None:
        rows, size, orders = self.rows, self.limits.page_size, launch.orders
        for row, order in orders.finish.items():
            require(order in (1, 2, 3), f"unknown finish order {order}")
            require(order != 3 or rows["ended"][row], f"row {row} is only cleared, but has not ended")
            if order < 3:
                rows["ended"][row] = True
            if order > 1:
                rows["table"][row] = rows["slots"][row] = rows["capacity"][row] = 0
        if not orders.grants and not launch.admissions:
            return
        table = rows["table"].copy()
        for admission in launch.admissions:
            table[admission.row] = 0
        held = np.bincount(table.ravel(), minlength=self.limits.total_pages + 1)
        granted = [page for _, _, page in orders.grants]
        for admission in launch.admissions:
            granted += admission.pages[admission.cached // size :]
        require(
            all(1 <= page <= self.limits.total_pages for page in granted),
            "the scratch page or one outside the pool was granted",
        )
        require(len(set(granted)) == len(granted), "a page was granted twice")
        if granted:
            require(not held[granted].any(), "a page was granted that stands in another row's table")
        for row, column, page in orders.grants:
            require(rows["table"][row, column] == 0, "a grant overwrites a page")
            rows["table"][row, column] = page
            rows["slots"][row, column * size : (column + 1) * size] = np.arange(page * size, (page + 1) * size)
        for row, capacity in orders.capacity.items():
            require(capacity == size * np.count_nonzero(rows["table"][row]), "the capacity differs from the table")
            rows["capacity"][row] = capacity
        require({row for row, _, _ in orders.grants} == set(orders.capacity), "a grant without its capacity")

    def _admit(self, admission: Admission) -> None:
        rows, at, size, request = self.rows, admission.row, self.limits.page_size, admission.request
        text = self.texts.get(request.rid)
        if text is None:
            text = self.texts[request.rid] = text_of(request, self.limits)
        count = len(admission.tokens)
        require(np.array_equal(admission.tokens, text.tokens[:count]), "an admission with tokens that the text does not have")
        require(admission.resumed == (count > text.prompt), "resumed without output, or not with it")
        require(admission.fill == count - admission.resumed, "fill differs from the tokens")
        require(0 <= admission.cached < admission.fill, "a hit of the whole prompt")
        require(admission.cached % size == 0 and len(admission.pages) <= self.columns, "wrong pages")
        require(len(admission.from_draft) == count - text.prompt, "the log differs from the output")
        self._uids += 1
        for leaf in rows.values():
            leaf[at] = 0
        for name, value in {
            "length": admission.cached,
            "count": count,
            "fill": admission.fill,
            "seen": count,
            "uid": self._uids,
            "capacity": len(admission.pages) * size,
            "end": text.end,
            "stopped": text.stopped,
            "drafting": request.speculation,
            "rounds": admission.rounds,
            "proposed": admission.proposed,
        }.items():
            rows[name][at] = value
        rows["text"][at, : text.end] = text.tokens
        rows["hashes"][at, : text.end] = text.hashes
        logs = (admission.from_draft, admission.round_of, admission.proposed_upto)
        rows["log"][at, text.prompt : count] = np.stack(logs, axis=1)
        ahead = self.limits.key_lookahead
        rows["both"][at, : len(text.hashes[ahead:])] = both(text.hashes[: max(text.end - ahead, 0)], text.hashes[ahead:])
        pages = np.asarray(admission.pages)
        rows["table"][at, : len(pages)] = pages
        rows["slots"][at, : len(pages) * size] = (pages[:, None] * size + np.arange(size)).ravel()

    def _read(self, at: np.ndarray) -> None:
        """Rows read all that they have committed."""
        rows, ahead = self.rows, self.limits.key_lookahead
        length = rows["length"][at][:, None]
        most = int(length.max(initial=0))
        slots, position = rows["slots"][at, :most], np.arange(most)
        final = np.minimum(length, rows["count"][at][:, None] - ahead)
        wrong = (self.both[slots] != rows["both"][at, :most]) & (position < final)
        if wrong.any():
            raise ReadError(self._say("an entry of another text", at, wrong))
        if (final < length).any():
            wrong = (position >= final) & (position < length)
            wrong &= (self.writer[slots] != rows["uid"][at][:, None]) | (self.target[slots] != rows["hashes"][at, :most])
            if wrong.any():
                raise ReadError(self._say("a provisional entry of another row", at, wrong))

    @staticmethod
    def _say(what: str, at: np.ndarray, wrong: np.ndarray) -> str:
        row, position = (int(index[0]) for index in np.nonzero(wrong))
        return f"{what} was read: row {at[row]}, position {position}"

    def _provisional(self, at: np.ndarray) -> np.ndarray:
        """First positions that rows write: the draft's entries that waited for tokens are repaired."""
        return np.maximum(np.minimum(self.rows["length"][at], self.rows["count"][at] - self.limits.key_lookahead), 0)

    def _write(self, at: np.ndarray, first: np.ndarray, length: np.ndarray, count: np.ndarray, width: int) -> None:
        """Rows write positions `first` … length + slack − 1, at most `width`: provisional ones from the new `length` on."""
        rows, ahead = self.rows, self.limits.key_lookahead
        position = first[:, None] + np.arange(width)
        inside = position < np.minimum(length[:, None] + self.limits.slack, rows["capacity"][at][:, None])
        position = np.minimum(position, self.width - 1 - ahead)
        row = at[:, None]
        slots = rows["slots"][row, np.minimum(position, rows["slots"].shape[1] - 1)][inside]
        real = position < length[:, None]
        known = real & (position + ahead < count[:, None])
        self.target[slots] = np.where(real, rows["hashes"][row, position], JUNK)[inside]
        self.both[slots] = np.where(known, rows["both"][row, position], JUNK)[inside]
        self.writer[slots] = np.broadcast_to(rows["uid"][at][:, None], inside.shape)[inside]

    def _prefill(self, program: Prefill) -> None:
        rows, limits = self.rows, self.limits
        sizes = limits.long_sizes if program.long else limits.prefill_sizes
        require(program.size in sizes, f"no program of size {program.size}")
        require(0 < len(program.blocks) <= (1 if program.long else program.size), "blocks differ from the size")
        reach: dict[int, int] = {}
        for block in program.blocks:
            require(0 < block.count <= (program.size if program.long else limits.block), "a block of a wrong length")
            require(limits.separate_blocks or block.row not in reach, "two blocks of a row in one program")
            require(
                block.start == reach.get(block.row, rows["length"][block.row]), "a block does not begin at the row's length"
            )
            reach[block.row] = block.start + block.count
        at = np.asarray(list(reach))
        length = np.asarray(list(reach.values()))
        require(not rows["ended"][at].any(), "prefill of a row that has ended")
        require((length <= rows["fill"][at]).all(), "prefill beyond the prompt")
        require((length + limits.slack <= rows["capacity"][at]).all(), "prefill without pages for its provisional entries")
        ends = at[length == rows["fill"][at]]
        require(len(ends) <= limits.max_ends, "too many prompts end in one program")
        self._read(at)
        begin = self._provisional(at)
        first = ends[(rows["count"][ends] == rows["fill"][ends]) & (rows["end"][ends] > rows["fill"][ends])]
        rows["count"][first] += 1
        self._write(at, begin, length, rows["count"][at], int((length - begin).max()) + limits.slack)
        rows["length"][at] = length
        rows["ended"][ends] = rows["count"][ends] >= rows["end"][ends]

    def _round(self) -> bool:
        rows, limits = self.rows, self.limits
        length = rows["length"]
        ready = ~rows["ended"] & (length >= rows["fill"]) & (length + limits.slack <= rows["capacity"])
        if not ready.any():
            return False
        if self.stall:
            ready &= self.rng.random(len(ready)) >= self.stall
            if not ready.any():
                return True
        at = np.flatnonzero(ready)
        self._read(at)
        length, count = rows["length"][at], rows["count"][at]
        require((length == count - 1).all(), "a row decodes without its bonus token")
        accepted = np.where(rows["drafting"][at], self.rng.integers(1, limits.max_accept + 1, len(at)), 1)
        behind = np.minimum(count + accepted, rows["end"][at])
        first = self._provisional(at)
        self._write(at, first, behind - 1, behind, limits.key_lookahead + limits.max_accept + limits.slack)
        rows["rounds"][at] += 1
        rows["proposed"][at] += np.where(rows["drafting"][at], limits.max_accept - 1, 0)
        position = count[:, None] + np.arange(limits.max_accept)
        log = np.empty((len(at), limits.max_accept, 3), np.int32)
        log[..., 0] = position < (count + accepted)[:, None] - 1
        log[..., 1] = rows["rounds"][at][:, None]
        log[..., 2] = rows["proposed"][at][:, None]
        rows["log"][at[:, None], position] = log  # what lies behind the end is never reported
        rows["count"][at], rows["length"][at] = behind, behind - 1
        rows["ended"][at] = behind >= rows["end"][at]
        return True

    def _report(self, kind: str) -> Report:
        rows = self.rows
        leaves = [rows[name].tolist() for name in ("uid", "length", "ended", "stopped", "seen", "count", "rounds", "proposed")]
        reports = []
        for at, (uid, length, ended, stopped, seen, count, rounds, proposed) in enumerate(zip(*leaves, strict=True)):
            if not uid:
                reports.append(None)
                continue
            if count == seen:
                reports.append(RowReport(length, ended, ended and stopped, [], NO_LOG, NO_LOG, NO_LOG, rounds, proposed))
                continue
            log = rows["log"][at, seen:count].copy()
            tokens = rows["text"][at, seen:count].tolist()
            reports.append(
                RowReport(length, ended, ended and stopped, tokens, log[:, 0], log[:, 1], log[:, 2], rounds, proposed)
            )
        rows["seen"] = rows["count"].copy()
        return Report(kind, reports)
