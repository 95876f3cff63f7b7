"""Self-synthesis: the target writes dialogues with itself, a large static batch at a time, in one program on the device.

Every row runs in lock-step, one position a step, so that the cache is dense and its writes are one slice. A small state
machine per row says where a token comes from: from a *piece* of given tokens (what the chat template puts between turns, a
prompt), or from sampling, as a user or as an answer. Rows are full: there is no padding.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec import runtime
from jaxspec.config import ConfigError, ModelConfig, check_ids
from jaxspec.models import decoder
from jaxspec.training.data import Data, distinct_share, overlapping
from jaxspec.training.dialogue import OPENERS, Script, script_of

ANSWER, USER = 0, 1

Start = list[tuple[tuple[int, ...], int]]
"""How a row begins: scripted pieces, (token ids, who speaks behind them) each."""


@dataclass(frozen=True)
class SynthesisOptions:
    """How rows are written.

    Attributes:
      tokens: tokens to write, rounded up to whole batches.
      length: tokens in a row.
      rows: rows in a batch.
      seed: of everything random.
      temperatures: one is drawn for each row's answers; 0 is greedy.
      user_temperature: at which the target writes what users say.
      user_min_p: tokens below this share of the best one's probability are not written by users.
      longest_user: tokens of a user's turn at most.
      longest_answer: tokens of an answer at most; the token that then ends it does not count as written.
      opener_share: share of rows whose first user begins with a stock phrase (`dialogue.OPENERS`).
      least_distinct: dialogues that repeat themselves more are dropped (`data.distinct_share`): small models left alone run in
        circles, and a head would learn little else.
      segment: the cache grows by so many positions at a time, and attention reads what is there.
    """

    tokens: int = 8_000_000
    length: int = 768
    rows: int = 1024
    seed: int = 0
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.4, 0.7, 0.9, 1.0)
    user_temperature: float = 1.0
    user_min_p: float = 0.02
    longest_user: int = 160
    longest_answer: int = 256
    opener_share: float = 0.5
    least_distinct: float = 0.5
    segment: int = 256

    def __post_init__(self):
        for name in ("tokens", "length", "rows", "longest_user", "longest_answer", "segment"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.temperatures or min(*self.temperatures, self.user_temperature) < 0:
            raise ConfigError(f"temperatures={self.temperatures} must be one or more numbers of at least 0")


class Pieces(NamedTuple):
    """Given tokens, row by row: piece 0 starts a row, the last two stand behind a user's turn and behind an answer.

    tokens [B, Q, R], length [B, Q], then [B, Q] (who speaks behind a piece), scripted [B] (pieces before the last two).
    """

    tokens: Array
    length: Array
    then: Array
    scripted: Array


class RowState(NamedTuple):
    """Where a row is; all [B]: piece and place in it, who speaks, tokens of the turn so far, next scripted piece."""

    piece: Array
    at: Array
    speaker: Array
    count: Array
    script: Array


def make_pieces(starts: Sequence[Start], script: Script, own: int, width: int) -> Pieces:
    """Pieces of some rows: each row's own, then the script's two.

    Args:
      starts: how each row begins.
      script: what stands between turns.
      own: most pieces of any row, these or others: all batches have one shape, so that one program serves them all.
      width: tokens of the longest piece of any row; what is beyond is cut, so `width` may be a row's length at most.
    """
    after_answer = (script.close[1:], USER) if script.dialogue else (script.close, ANSWER)
    table = [[*row, *[((), ANSWER)] * (own - len(row)), (script.middle[1:], ANSWER), after_answer] for row in starts]
    tokens = np.zeros((len(table), own + 2, width), np.int32)
    for b, row in enumerate(table):
        for q, (ids, _) in enumerate(row):
            tokens[b, q, : len(ids)] = ids[:width]
    sizes = np.array([[len(ids) for ids, _ in row] for row in table], np.int32)
    then = np.array([[speaker for _, speaker in row] for row in table], np.int32)
    return Pieces(tokens, sizes, then, np.array([len(row) for row in starts], np.int32))


def widths(plan: Sequence[Sequence[Start]], script: Script, length: int) -> tuple[int, int]:
    """(most pieces of a row, tokens of the longest piece as far as a row holds them): what `make_pieces` wants to know.

    Raises ConfigError when a row begins with more tokens than it holds.
    """
    starts = [start for batch in plan for start in batch]
    first = max(len(start[0][0]) for start in starts)
    if first >= length:
        raise ConfigError(f"a row of {length} tokens has no room behind the {first} that it begins with: use a larger length")
    longest = max(len(ids) for start in starts for ids, _ in start)
    return max(map(len, starts)), max(1, min(length, max(longest, len(script.middle) - 1, len(script.close))))


def advance(
    state: RowState, sampled: Int[Array, " B"], pieces: Pieces, script: Script, options: SynthesisOptions
) -> tuple[RowState, Int[Array, " B"], Bool[Array, " B"]]:
    """One step of all rows: the state behind it, the token that stands in the row, and whether it is the target's answer."""
    row = jnp.arange(sampled.shape[0])
    own = pieces.tokens.shape[1] - 2
    given = state.at < pieces.length[row, state.piece]
    user = state.speaker == USER
    token = jnp.where(given, pieces.tokens[row, state.piece, jnp.minimum(state.at, pieces.tokens.shape[2] - 1)], sampled)
    longest = jnp.where(user, options.longest_user, options.longest_answer)
    cut = ~given & (state.count >= longest - 1) if script.dialogue else jnp.zeros_like(given)
    is_end = jnp.zeros_like(given)
    for end in script.ends:
        is_end |= token == end
    if script.dialogue:
        is_end = ~given & (is_end | cut | (user & (token == script.middle[0])))
        token = jnp.where(is_end & user, script.middle[0], jnp.where(cut, script.close[0], token))
    else:
        is_end &= ~given
    next_script = jnp.where(state.script < pieces.scripted, state.script, own + 1)
    piece = jnp.where(is_end, jnp.where(user, own, next_script), state.piece)
    at = jnp.where(is_end, 0, state.at + given)
    through = (given | is_end) & (at >= pieces.length[row, piece])
    speaker = jnp.where(through, pieces.then[row, piece], state.speaker)
    count = jnp.where(through | is_end, 0, state.count + ~given)
    moved = state.script + (is_end & ~user & (state.script < pieces.scripted))
    return RowState(piece, at, speaker, count, moved), token, ~given & ~user & ~cut


def growing_attend(position: Int[Array, ""]) -> decoder.Attend:
    """One query per row against dense caches [B, K, L, D], whose entry `position` is written first."""

    def attend(cache, q, k, v, *, scale, window, softcap):
        B, _, H, D = q.shape
        keys, values = (
            jax.lax.dynamic_update_slice(old, new.swapaxes(1, 2).astype(old.dtype), (0, 0, position, 0))
            for old, new in zip(cache, (k, v), strict=True)
        )
        K, L = keys.shape[1:3]
        grouped = q.reshape(B, K, H // K, D)
        scores = jnp.einsum("BKGD,BKLD->BKGL", grouped, keys, preferred_element_type=jnp.float32) * scale
        scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
        distance = position - jnp.arange(L)
        seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(values.dtype)
        out = jnp.einsum("BKGL,BKLD->BKGD", weights, values)
        return out.reshape(B, 1, H, -1), (keys, values)

    return attend


def sample(logits, key, speaker, count, temperature, script: Script, options: SynthesisOptions) -> Int[Array, " B"]:
    """The next token of each row: Gumbel's trick, with as much noise as the row's temperature says."""
    user = (speaker == USER)[:, None]
    heat = jnp.where(user[:, 0], options.user_temperature, temperature)[:, None]
    if script.dialogue:
        early = user & (count < 3)[:, None]  # users say something
        ids = jnp.arange(logits.shape[-1])
        for end in {*script.ends, script.middle[0]}:
            logits = jnp.where(early & (ids == end), -jnp.inf, logits)
        if options.user_min_p > 0:
            floor = jnp.max(logits, axis=-1, keepdims=True) + heat * np.log(options.user_min_p)
            logits = jnp.where(user & (logits < floor), -jnp.inf, logits)
    return jnp.argmax(logits + heat * jax.random.gumbel(key, logits.shape), axis=-1).astype(jnp.int32)


@partial(jax.jit, static_argnames=("config", "script", "options"))
def write_rows(tree, pieces: Pieces, temperature, key, *, config: ModelConfig, script: Script, options: SynthesisOptions):
    """Full rows: (tokens [B, length], supervised [B, length])."""
    B, T = temperature.shape[0], options.length
    zeros = jnp.zeros(B, jnp.int32)
    state = RowState(zeros, zeros, jnp.full(B, ANSWER), zeros, zeros + 1)
    state, first, _ = advance(state, zeros, pieces, script, options)
    tokens = jnp.zeros((T, B), jnp.int32).at[0].set(first)
    supervised = jnp.zeros((T, B), bool)
    heads = config.num_kv_heads if config.mla is None else config.num_heads
    dtype = jax.tree.leaves(tree["embedder"])[0].dtype
    shapes = [(B, heads, 0, width) for width in (config.key_head_dim, config.value_head_dim)]
    caches = tuple(tuple(jnp.zeros(shape, dtype) for shape in shapes) for _ in range(config.num_layers))

    def step(t, carry):
        caches, tokens, supervised, state, token = carry
        x = decoder.embed(tree, config, token[:, None])
        positions = jnp.broadcast_to(t, (B, 1))
        out = decoder.decode(tree, config, x, positions, growing_attend(t), caches)
        logits = decoder.unembed(tree, config, out.hidden[:, 0])
        drawn = sample(logits, jax.random.fold_in(key, t), state.speaker, state.count, temperature, script, options)
        state, token, counts = advance(state, drawn, pieces, script, options)
        return out.layers, tokens.at[t + 1].set(token), supervised.at[t + 1].set(counts), state, token

    carry = (caches, tokens, supervised, state, first)
    with decoder.full_precision(tree):
        for start in range(0, T - 1, options.segment):
            size = start + options.segment
            grown = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[2]), (0, 0))), carry[0])  # noqa: B023
            carry = jax.lax.fori_loop(start, min(size, T - 1), step, (grown, *carry[1:]))
    return carry[1].T, carry[2].T


def plan_rows(
    script: Script,
    tokenizer,
    config: ModelConfig,
    options: SynthesisOptions,
    prompts: Sequence[Sequence[str]] | None,
    batches: int,
) -> list[list[Start]]:
    """How every row of every batch begins.

    Raises ConfigError when there are no prompts, one does not fit into a row, or has ids beyond the vocabulary.
    """
    if prompts is not None:
        dialogues = [scripted(turns, script, tokenizer) for turns in prompts]
        if not dialogues:
            raise ConfigError("there are no prompts: pass at least one, or none at all for a target that is the user, too")
        for number, start in enumerate(dialogues, 1):
            if len(start[0][0]) >= options.length:
                raise ConfigError(
                    f"prompt {number} takes {len(start[0][0])} tokens with what the template puts around it, and a row of "
                    f"{options.length} has no room behind it: use a larger length, or leave that prompt out"
                )
            check_ids((i for piece, _ in start for i in piece), config.vocab_size, f"prompt {number}")
        rows = [dialogues[i % len(dialogues)] for i in range(batches * options.rows)]
        return [rows[i : i + options.rows] for i in range(0, len(rows), options.rows)]
    openers = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in OPENERS] if script.dialogue else []
    for opener, ids in zip(OPENERS, openers, strict=False):
        check_ids(ids, config.vocab_size, f"the opening {opener!r}")
    size = config.vocab_size if tokenizer is None else min(config.vocab_size, len(tokenizer.vocab))

    def start(random: np.random.Generator) -> Start:
        if script.dialogue:
            opened = random.random() < options.opener_share
            return [(script.prefix + (openers[random.integers(len(openers))] if opened else ()), USER)]
        # random ids: rows that begin alike would be alike, the greedy ones in every token
        prefix = () if tokenizer is None else script.prefix or script.close
        return [(prefix + tuple(random.integers(0, size, 4 if tokenizer is None else 2).tolist()), ANSWER)]

    generators = [np.random.default_rng((options.seed, batch)) for batch in range(batches)]
    return [[start(random) for _ in range(options.rows)] for random in generators]


def scripted(turns: Sequence[str], script: Script, tokenizer) -> Start:
    """A given dialogue's pieces: its users' turns with what the template puts around them."""
    spoken = [tuple(tokenizer.encode(turn, add_special_tokens=False)) for turn in turns]
    first = ((*script.prefix, *spoken[0], *script.middle), ANSWER)
    return [first, *(((*script.close[1:], *words, *script.middle), ANSWER) for words in spoken[1:])]


def digest(texts: Any) -> str:
    """A short digest of JSON types."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12]


def synthesise(
    target: Any,
    options: SynthesisOptions,
    *,
    prompts: Sequence[Sequence[str]] | None = None,
    exclude: Sequence[Sequence[int]] = (),
    progress: bool = True,
    log: Callable[[str], None] | None = None,
) -> Data:
    """Rows that the target writes, no two of them equal.

    Args:
      target: its `ModelParams`; without a tokenizer rows begin with random ids, without a chat template they are one text.
      options: see there.
      prompts: dialogues given by their users' turns, of which only the answers are written; None: the target is user, too.
      exclude: token ids of texts with which no row may share `data.NGRAM` consecutive tokens: such rows are dropped.
      progress: show a bar on stderr.
      log: receives compile time and speed in words.

    Raises:
      ConfigError: a row is longer than the target's context, prompts do not fit, or no row is left.
    """
    from tqdm import tqdm

    config, tokenizer = target.config, target.tokenizer
    if options.length > config.max_positions:
        raise ConfigError(
            f"--length {options.length} exceeds the target's context: it must be at most {config.max_positions} positions"
        )
    if prompts is not None and tokenizer is None:
        raise ConfigError("prompts are texts: the target needs a tokenizer")
    script = script_of(tokenizer, config)
    batches = -(-options.tokens // (options.length * options.rows))
    plan = plan_rows(script, tokenizer, config, options, prompts, batches)
    shape = widths(plan, script, options.length)
    parts, seconds, compiling, overlaps, repeating = [], 0.0, 0.0, 0, 0
    with tqdm(
        total=batches * options.rows * options.length, unit="tok", unit_scale=True, desc="data", disable=not progress
    ) as bar:
        for batch, starts in enumerate(plan):
            pieces = make_pieces(starts, script, *shape)
            heat = np.random.default_rng((options.seed, batch, 1)).choice(options.temperatures, options.rows)
            arguments = (target.tree, pieces, heat.astype(np.float32), jax.random.fold_in(jax.random.key(options.seed), batch))
            program, spent = runtime.compiled(write_rows, *arguments, config=config, script=script, options=options)
            compiling += spent
            start = time.perf_counter()
            tokens, supervised = (np.asarray(x) for x in program(*arguments))
            seconds += time.perf_counter() - start
            clear = ~overlapping(tokens, exclude) if exclude else np.ones(len(tokens), bool)
            kept = clear & (distinct_share(tokens) >= options.least_distinct) if script.dialogue else clear
            overlaps += int(np.sum(~clear))
            repeating += int(np.sum(clear & ~kept))
            parts.append((tokens[kept], supervised[kept], heat.astype(np.float32)[kept]))
            bar.update(tokens.size)
    made = batches * options.rows
    arrays = [np.concatenate(part) for part in zip(*parts, strict=True)]
    if not len(arrays[0]):
        raise ConfigError(
            f"none of {made} rows is left: {repeating} repeat themselves (least_distinct={options.least_distinct}), {overlaps} "
            "overlap with the excluded prompts"
        )
    about = {
        "target": target.source,
        "seed": options.seed,
        "temperatures": list(options.temperatures),
        "rows_written": made,
        "rows_dropped_for_overlap": overlaps,
        "rows_dropped_for_repetition": repeating,
        "prompts": "self-synthesised" if prompts is None else "given",
        "options": {k: v for k, v in dataclasses.asdict(options).items() if k not in ("seed", "temperatures")},
    }
    if prompts is not None:
        about["prompts_digest"] = digest([list(turns) for turns in prompts])
    rows = Data(*arrays, about).distinct()
    copies = len(arrays[0]) - len(rows.tokens)
    about |= {"rows_dropped_as_copies": copies, "answers": float(rows.supervised.mean())}
    if log is not None:
        speed = made * options.length / seconds
        log(
            f"data: {rows.num_tokens:,} tokens, {about['answers']:.0%} of them answers, {speed:,.0f} tokens/s, compiled in "
            f"{compiling:.1f} s; of {made} rows dropped: {overlaps} for an overlap with excluded prompts, {repeating} that "
            f"repeat themselves, {copies} that are equal to another one"
        )
    return rows
