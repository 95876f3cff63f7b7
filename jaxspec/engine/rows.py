"""Rows of the round on the device: how they are laid out, filled, moved, granted pages, and reported. Traceable code only.

What the host says reaches the device as one packed int32 array a program, and what it hears comes back as one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec.kvcache import SCRATCH_PAGE, PagedKVCache, put_rows, take_rows
from jaxspec.round import RoundState
from jaxspec.sampling import MAX_BIASES, MAX_STOP_IDS, SamplingState, row_keys, sampling_arrays

NOTHING, DONE, DONE_AND_CLEAR, CLEAR = range(4)
"""What an order does with a row: nothing; end it; end it and take its pages out of its table; only the latter."""

KEEP = -1
"""In an order: the value stays as it is."""

SCALARS = (
    "row",
    "length",
    "prompt_length",
    "fill",
    "resumed",
    "limit",
    "capacity",
    "rounds_left",
    "drafting",
    "seen",
    "rounds",
    "proposed",
    "seed_high",
    "seed_low",
    "top_k",
    "min_new_tokens",
    "greedy",
    "ignore_eos",
)
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
HEADER = ("length", "done", "stopped", "broken", "rounds", "proposed", "count")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of the rows: all that their programs depend on beside the drafter's own leaves.

    Attributes:
      max_len: positions of prompt and output.
      pages: columns of the page table.
      page_size: slots a page.
    """

    max_len: int
    pages: int
    page_size: int


def admission_width(layout: Layout) -> int:
    """int32 words that describe one admitted row."""
    return len(SCALARS) + len(FLOATS) + MAX_STOP_IDS + 2 * MAX_BIASES + layout.pages + layout.max_len


def pack_admissions(layout: Layout, count: int, admissions: list[dict[str, Any]], vocab_size: int) -> np.ndarray:
    """What `admit` takes for at most `count` rows: int32 [count, `admission_width`]; rows beyond the list go nowhere.

    Args:
      admissions: for each row its `SCALARS` but those of sampling, and ``sampling`` (`SamplingParams` with a seed),
        ``stop_ids``, ``ignore_eos``, ``pages``, ``tokens``.
      vocab_size: the target's.
    """
    mail = np.zeros((count, admission_width(layout)), np.int32)
    mail[:, 0] = np.iinfo(np.int32).max
    for line, asked in zip(mail, admissions, strict=False):
        sampling = sampling_arrays([asked["sampling"]], vocab_size, [asked["stop_ids"]], [asked["ignore_eos"]])
        seed = int(asked["sampling"].seed) & 0xFFFFFFFFFFFFFFFF
        scalars = {**asked, **{name: x[0] for name, x in sampling.items()}}
        scalars |= {"seed_high": seed >> 32, "seed_low": seed & 0xFFFFFFFF}
        words = np.array([int(scalars[name]) for name in SCALARS], np.int64).astype(np.uint32).view(np.int32)
        floats = np.array([scalars[name] for name in FLOATS], np.float32).view(np.int32)
        parts = (words, floats, sampling["stop_ids"][0], sampling["bias_ids"][0], sampling["bias_values"][0].view(np.int32))
        start = 0
        for part in parts:
            line[start : start + len(part)] = part
            start += len(part)
        line[start : start + len(asked["pages"])] = asked["pages"]
        start += layout.pages
        line[start : start + len(asked["tokens"])] = asked["tokens"]
    return mail


def unpack_admissions(layout: Layout, mail: Int[Array, "J words"]) -> dict[str, Array]:
    """The parts of `pack_admissions` by name, among them ``table`` and ``tokens``."""
    parts = dict.fromkeys(SCALARS + FLOATS, 1) | {"stop_ids": MAX_STOP_IDS, "bias_ids": MAX_BIASES, "bias_values": MAX_BIASES}
    parts |= {"table": layout.pages, "tokens": layout.max_len}
    found, start = {}, 0
    for name, width in parts.items():
        block = mail[:, start : start + width]
        if name in FLOATS or name == "bias_values":
            block = jax.lax.bitcast_convert_type(block, jnp.float32)
        found[name] = block[:, 0] if name in SCALARS + FLOATS else block
        start += width
    return found


def state_of(layout: Layout, mail: Int[Array, "J words"], layers: tuple, draft: Any) -> tuple[Int[Array, " J"], RoundState]:
    """Rows as `admit` puts them into the table, and where they go.

    Args:
      layers: the target's pools, or empty ones.
      draft: a drafter's state of as many rows, fresh.
    """
    x = unpack_admissions(layout, mail)
    words = jnp.stack([x["seed_high"], x["seed_low"]], 1)
    keys = jax.random.wrap_key_data(jax.lax.bitcast_convert_type(words, jnp.uint32), impl="threefry2x32")
    rows = mail.shape[0]
    log = jnp.zeros((rows, layout.max_len), jnp.int32)
    sampling = {f.name: x[f.name] for f in dataclasses.fields(SamplingState) if f.name in x}
    sampling |= {name: x[name] != 0 for name in ("greedy", "ignore_eos")}
    state = RoundState(
        cache=PagedKVCache(layers, x["table"], x["length"]),
        draft=draft,
        tokens=x["tokens"],
        from_draft=log.astype(bool),
        round_of=log,
        proposed_upto=log,
        keys=keys,
        done=jnp.zeros(rows, bool),
        stopped=jnp.zeros(rows, bool),
        broken=jnp.zeros(rows, bool),
        prompt_length=x["prompt_length"],
        fill=x["fill"],
        resumed=x["resumed"] != 0,
        limit=x["limit"],
        capacity=x["capacity"],
        rounds_left=x["rounds_left"],
        drafting=x["drafting"] != 0,
        seen=x["seen"],
        rounds=x["rounds"],
        proposed=x["proposed"],
        sampling=SamplingState(**sampling),
    )
    return x["row"], state


def empty_rows(layout: Layout, rows: int, layers: tuple, draft: Any) -> RoundState:
    """A table of rows that are done and own nothing."""
    zeros = jnp.zeros((rows, admission_width(layout)), jnp.int32)
    state = state_of(layout, zeros, layers, draft)[1]
    return dataclasses.replace(state, done=jnp.ones(rows, bool), keys=row_keys([0] * rows))


def admit(layout: Layout, rows: RoundState, mail: Int[Array, "J words"], draft: Any) -> RoundState:
    """Puts new rows into the table: every leaf of theirs is overwritten."""
    at, state = state_of(layout, mail, rows.cache.layers, draft)
    return put_rows(rows, at, state)


def pack_orders(
    batch: int,
    num_grants: int,
    finish: dict[int, int],
    grants: list[tuple[int, int, int]],
    capacity: dict[int, int],
    rounds: int,
) -> np.ndarray:
    """What `obey` takes: int32 [1 + 2 * batch + 3 * num_grants].

    Args:
      finish: row → `DONE`, `DONE_AND_CLEAR` or `CLEAR`.
      grants: (row, column, page), at most `num_grants`.
      capacity: row → slots of the pages in its table.
      rounds: what every row's `rounds_left` becomes; `KEEP` leaves them.
    """
    mail = np.full(1 + 2 * batch + 3 * num_grants, KEEP, np.int32)
    mail[0] = rounds
    mail[1 : 1 + batch] = NOTHING
    for row, kind in finish.items():
        mail[1 + row] = kind
    for row, slots in capacity.items():
        mail[1 + batch + row] = slots
    if grants:
        mail[1 + 2 * batch : 1 + 2 * batch + 3 * len(grants)] = np.asarray(grants, np.int32).ravel()
    return mail


def obey(rows: RoundState, mail: Int[Array, " words"]) -> RoundState:
    """Carries orders out: rows end, tables are cleared, pages are granted, in this order."""
    batch, columns = rows.cache.page_table.shape
    rounds, finish, capacity = mail[0], mail[1 : 1 + batch], mail[1 + batch : 1 + 2 * batch]
    grants = mail[1 + 2 * batch :].reshape(-1, 3)
    cleared = finish >= DONE_AND_CLEAR
    table = jnp.where(cleared[:, None], SCRATCH_PAGE, rows.cache.page_table)
    row = jnp.where(grants[:, 0] < 0, batch, grants[:, 0])  # a negative index would count from the end
    table = table.at[row, jnp.clip(grants[:, 1], 0, columns)].set(grants[:, 2], mode="drop")
    capacity = jnp.where(capacity >= 0, capacity, jnp.where(cleared, 0, rows.capacity))
    return dataclasses.replace(
        rows,
        cache=dataclasses.replace(rows.cache, page_table=table),
        done=rows.done | (finish == DONE) | (finish == DONE_AND_CLEAR),
        capacity=capacity,
        rounds_left=jnp.where(rounds >= 0, rounds, rows.rounds_left),
    )


def regroup(rows: RoundState, moves: Int[Array, " R"]) -> RoundState:
    """Another table: row i is what row moves[i] was, or for -1 an empty row, done and without pages."""
    moved = take_rows(rows, jnp.maximum(moves, 0))
    kept = moves >= 0
    table = jnp.where(kept[:, None], moved.cache.page_table, SCRATCH_PAGE)
    return dataclasses.replace(
        moved,
        cache=dataclasses.replace(moved.cache, page_table=table),
        done=moved.done | ~kept,
        capacity=jnp.where(kept, moved.capacity, 0),
    )


def take_blocks(rows: RoundState, blocks: Int[Array, "R 2"]) -> tuple[RoundState, Bool[Array, " R"]]:
    """Rows for `prefill.prefill_step`: for each block (row, first position) a copy of its row that begins there.

    Returns:
      The rows, done where the block's row is -1, and which of them are continued by the next block.
    """
    row, start = blocks[:, 0], blocks[:, 1]
    taken = take_rows(rows, jnp.maximum(row, 0))
    behind = jnp.append(row[1:], -1)
    taken = dataclasses.replace(taken, cache=dataclasses.replace(taken.cache, length=start), done=taken.done | (row < 0))
    return taken, (row >= 0) & (row == behind)


def put_blocks(rows: RoundState, taken: RoundState, blocks: Int[Array, "R 2"], continued: Bool[Array, " R"]) -> RoundState:
    """Puts back what a prefill made of the last block of every row."""
    row = blocks[:, 0]
    batch = rows.done.shape[0]
    return put_rows(rows, jnp.where((row < 0) | continued, batch, row), taken)


def report(rows: RoundState, window: int, rounds: int) -> tuple[RoundState, Int[Array, "B words"]]:
    """What happened to the rows since the last report, and the rows with `seen` moved and `rounds_left` set to `rounds`.

    Returns:
      int32 [B, `HEADER` + 4 * window]: the header's numbers, then tokens, from_draft, round_of and proposed_upto of the
      first `count` <= window tokens that no report has carried yet.
    """
    length, seen = rows.cache.length, rows.seen
    has_output = length >= rows.fill
    end = jnp.where(has_output, jnp.minimum(length + 1, rows.limit), seen)
    count = jnp.clip(end - seen, 0, window)
    at = jnp.minimum(seen[:, None] + jnp.arange(window), rows.tokens.shape[1] - 1)
    logs = [jnp.take_along_axis(x, at, 1) for x in (rows.tokens, rows.from_draft, rows.round_of, rows.proposed_upto)]
    header = (length, rows.done, rows.stopped, rows.broken, rows.rounds, rows.proposed, count)
    packed = [jnp.stack([x.astype(jnp.int32) for x in header], 1), *(x.astype(jnp.int32) for x in logs)]
    left = jnp.full_like(rows.rounds_left, rounds)
    return dataclasses.replace(rows, seen=seen + count, rounds_left=left), jnp.concatenate(packed, 1)
