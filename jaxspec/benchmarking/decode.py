"""Real generation measured: tokens per second over a set of prompts, time to first token, speculation on against off."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxspec.config import ConfigError, SpecConfig
from jaxspec.engine.sizes import first_attention
from jaxspec.generation import generate
from jaxspec.results import GenerationResult


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How an algorithm did over all prompts.

    Attributes:
      algorithm: with its tree, e.g. "EAGLE3 3/1/4".
      batch: prompts at once.
      completion_tokens: of all answers.
      tokens_per_second: of the whole batch: tokens emitted by rounds / seconds of all rounds, without compilation.
      accept_length: tokens a round emitted, mean over all rounds of all prompts.
      round_ms: median over batches of decode time / rounds of the longest answer.
      first_token_ms: median time from start to first token, without compilation.
      answers: the results in the order of the prompts.
    """

    algorithm: str
    batch: int
    completion_tokens: int
    tokens_per_second: float
    accept_length: float
    round_ms: float
    first_token_ms: float
    answers: tuple[GenerationResult, ...] = dataclasses.field(repr=False)

    def to_json(self) -> dict:
        """Plain JSON types, without the answers."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "answers"}


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """First turns of a JSONL file: each line an object with ``turns`` (MT-Bench) or ``prompt``, or a string.

    Raises:
      FileNotFoundError: there is no such file.
      ConfigError: a line is none of these, or nothing is left.
    """
    found = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number}: not JSON ({error})") from None
            text = entry
            if isinstance(entry, dict):
                turns = entry.get("turns")
                text = turns[0] if isinstance(turns, list) and turns else entry.get("prompt")
            if not isinstance(text, str) or not text:
                raise ConfigError(f"{path}, line {number}: give a string, or an object with 'turns' (a list) or 'prompt'")
            found.append(text)
    if not found[:limit]:
        raise ConfigError(f"{path} holds no prompts" if not found else f"limit={limit} must be at least 1")
    return found[:limit]


def random_prompts(vocab_size: int, length: int, count: int, seed: int = 0) -> list[list[int]]:
    """Token ids for a model without a tokenizer."""
    return np.random.default_rng(seed).integers(0, vocab_size, (count, length)).tolist()


def batches_of(prompts: Sequence[Any], size: int) -> Iterable[list]:
    """The prompts in batches of `size`; the last one is filled up with its own first prompts, so that one program serves."""
    for begin in range(0, len(prompts), size):
        batch = list(prompts[begin : begin + size])
        yield [batch[i % len(batch)] for i in range(size)]


def measure_decoding(
    params: Any,
    prompts: Sequence[Any],
    *,
    algorithm: str = "auto",
    draft: Any = None,
    spec: SpecConfig | None = None,
    batch: int = 1,
    max_new_tokens: int = 128,
    progress: bool = True,
    **options: Any,
) -> Decoding:
    """Answers all prompts, after a warm-up on the first batch.

    Args:
      params, algorithm, draft, spec, max_new_tokens: as for `jaxspec.generate`, and so are all further options.
      prompts: of any kind that `generate` takes.
      batch: prompts at once.
      progress: whether to show a bar.
    """
    if batch < 1:
        raise ConfigError(f"batch={batch} must be at least 1")
    groups = list(batches_of(prompts, batch))
    options = {
        "algorithm": algorithm,
        "draft": draft,
        "spec": spec,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": True,
        **options,
    }
    generate(params, groups[0], **options)
    answers, seconds, round_ms, first = [], 0.0, [], []
    for group in tqdm(groups, desc=algorithm, unit="batch", disable=not progress):
        results = generate(params, group, **options)
        stats = results[0].stats
        seconds += stats.decode_seconds
        longest = max(r.stats.rounds for r in results)
        round_ms.append(stats.decode_seconds / longest * 1e3 if longest else 0.0)
        first.append(stats.prefill_seconds * 1e3)
        answers += results
    emitted = sum(r.stats.completion_tokens - 1 for r in answers)
    rounds = sum(r.stats.rounds for r in answers)
    stats = answers[0].stats
    tree = "/".join(str(v) for v in (stats.num_steps, stats.topk, stats.num_draft_tokens) if v is not None)
    return Decoding(
        algorithm=f"{stats.algorithm} {tree}".strip(),
        batch=batch,
        completion_tokens=sum(r.stats.completion_tokens for r in answers),
        tokens_per_second=emitted / seconds if seconds else 0.0,
        accept_length=emitted / rounds if rounds else 1.0,
        round_ms=statistics.median(round_ms),
        first_token_ms=statistics.median(first),
        answers=tuple(answers[: len(prompts)]),
    )


def measure_prefill(
    params: Any, lengths: Sequence[int], *, batch: int = 1, repeats: int = 5, attention: str = "auto", **options: Any
) -> list[dict]:
    """Time to first token by prompt length, on random token ids, plain decoding unless `options` say otherwise.

    Args:
      params: the target.
      lengths: of the prompts, in tokens.
      batch: prompts at once.
      repeats: runs whose median counts.
      attention: `prefill_attention` of `jaxspec.generate`.
      **options: of `jaxspec.generate`.

    Returns:
      One {tokens, batch, attention, ms, spread_ms, compile_seconds} for each length; `attention` is the one that ran in the
      first chunk.
    """
    rows, dtype = [], params.tree["embedder"]["embedding"].dtype
    for length in lengths:
        ran = first_attention(params.config, dtype, attention, length) or "paged"
        prompts = random_prompts(params.config.vocab_size, length, batch)
        settings = {"algorithm": "none", "max_new_tokens": 1, "ignore_eos": True, "prefill_attention": attention, **options}
        compile_seconds = generate(params, prompts, **settings)[0].stats.compile_seconds
        ms = []
        for _ in range(repeats):
            ms.append(generate(params, prompts, **settings)[0].stats.prefill_seconds * 1e3)
            jax.block_until_ready(params.tree)
        rows.append(
            {
                "tokens": length,
                "batch": batch,
                "attention": ran,
                "ms": statistics.median(ms),
                "spread_ms": max(ms) - min(ms),
                "compile_seconds": compile_seconds,
            }
        )
    return rows


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token in which two answers differ, None when they are equal."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return i
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
