"""Training rows: what the target wrote, which of it counts, and in which order training reads it."""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config import ConfigError

NGRAM = 13
"""Tokens in common with an evaluation prompt that make a row unfit for training."""


@dataclass(frozen=True, eq=False)
class Data:
    """Rows of equal length.

    Attributes:
      tokens: int32 [rows, length].
      supervised: bool [rows, length]; token i was written by the target as an answer.
      temperatures: float32 [rows], at which a row's answers were sampled.
      about: how it was made (seed, target, …), JSON types.
    """

    tokens: np.ndarray
    supervised: np.ndarray
    temperatures: np.ndarray
    about: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        """Tokens in all rows."""
        return self.tokens.size

    def counts(self, vocab_size: int) -> np.ndarray:
        """How often each token was written as an answer: int32 [vocab_size]."""
        return np.bincount(self.tokens[self.supervised], minlength=vocab_size).astype(np.int32)

    def split(self, held_out: int) -> tuple[Data, Data]:
        """(rows to train on, `held_out` rows to measure on), the latter with greedy answers as far as there are such.

        No two of all these rows are equal: of equal ones the first counts.
        """
        rows = self.distinct()
        if not 0 < held_out < len(rows.tokens):
            raise ConfigError(f"{held_out} rows cannot be held out of {len(rows.tokens)} different ones: use more tokens")
        order = np.argsort(rows.temperatures, kind="stable")
        apart = np.zeros(len(rows.tokens), bool)
        apart[order[:held_out]] = True
        return rows.take(~apart), rows.take(apart)

    def distinct(self) -> Data:
        """The rows without those that are equal to an earlier one."""
        if not self.tokens.size:
            return self
        whole = np.ascontiguousarray(self.tokens).view(np.dtype((np.void, self.tokens.itemsize * self.tokens.shape[1])))
        return self.take(np.sort(np.unique(whole[:, 0], return_index=True)[1]))

    def take(self, rows: np.ndarray) -> Data:
        """Some of the rows."""
        return dataclasses.replace(
            self, tokens=self.tokens[rows], supervised=self.supervised[rows], temperatures=self.temperatures[rows]
        )

    def save(self, file: Path) -> None:
        """Writes one ``.npz`` under a temporary name, then renames it."""
        small = np.uint16 if self.tokens.max(initial=0) < 1 << 16 else np.int32
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}-{os.getpid()}")
        try:
            with temporary.open("wb") as out:
                np.savez(
                    out,
                    tokens=self.tokens.astype(small),
                    supervised=np.packbits(self.supervised, axis=1),
                    temperatures=self.temperatures,
                    about=np.array(json.dumps(self.about)),
                )
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)


def load(file: Path) -> Data:
    """What `Data.save` wrote.

    Raises ConfigError when the file is something else, or damaged.
    """
    try:
        stored = np.load(file, allow_pickle=False)
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array")
        with stored:
            tokens = stored["tokens"].astype(np.int32)
            supervised = np.unpackbits(stored["supervised"], axis=1, count=tokens.shape[1]).astype(bool)
            found = Data(tokens, supervised, stored["temperatures"], json.loads(str(stored["about"])))
        if not (tokens.shape == supervised.shape and found.temperatures.shape == tokens.shape[:1] and tokens.size):
            raise ValueError(f"shapes {tokens.shape}, {supervised.shape}, {found.temperatures.shape} do not fit")
        return found
    except (ValueError, KeyError, IndexError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{file} does not hold training rows as `python -m jaxspec.train data` writes them: {error}"
        ) from None


def batch_rows(num_rows: int, batch: int, seed: int, step: int) -> np.ndarray:
    """Which rows step `step` reads: every epoch is a permutation of all rows, a function of seed and epoch alone."""
    wanted = np.arange(step * batch, (step + 1) * batch)
    rows = np.empty(batch, np.int32)
    for epoch in np.unique(wanted // num_rows):
        here = wanted // num_rows == epoch
        rows[here] = np.random.default_rng((seed, int(epoch))).permutation(num_rows)[wanted[here] % num_rows]
    return rows


def read_jsonl(file: str | Path) -> Iterator[list[str]]:
    """The users' turns of every row of a JSONL file: ``turns`` (a list of texts) or ``prompt`` (one text).

    Raises ConfigError naming the line that has neither.
    """
    text = Path(file).expanduser().read_text(encoding="utf-8")
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: a text may hold U+2028
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{file}:{number} is not JSON: {error}") from None
        turns = row if isinstance(row, str) else row.get("turns", row.get("prompt")) if isinstance(row, dict) else None
        turns = [turns] if isinstance(turns, str) else turns
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise ConfigError(f"{file}:{number} needs a key 'turns' (a list of texts) or 'prompt' (a text)")
        yield turns


def window_hashes(tokens: np.ndarray, size: int = NGRAM) -> np.ndarray:
    """A 64-bit hash of every window of `size` tokens: uint64 [..., length - size + 1]."""
    powers = np.random.default_rng(size).integers(1, 1 << 63, size, dtype=np.uint64) | np.uint64(1)
    count = tokens.shape[-1] - size + 1
    if count <= 0:
        return np.zeros((*tokens.shape[:-1], 0), np.uint64)
    total = np.zeros((*tokens.shape[:-1], count), np.uint64)
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    for j in range(size):
        total += mixed[..., j : j + count] * powers[j]
    return total


def overlapping(tokens: np.ndarray, texts: Iterable[Sequence[int]], size: int = NGRAM) -> np.ndarray:
    """Which rows share `size` consecutive tokens with one of the texts.

    Args:
      tokens: int [rows, length].
      texts: token ids of each text; texts shorter than `size` cannot overlap.
      size: length of a common run that counts.

    Returns:
      bool [rows].
    """
    known = [window_hashes(np.asarray(text, np.int64), size) for text in texts]
    known = np.unique(np.concatenate(known)) if known else np.zeros(0, np.uint64)
    return np.isin(window_hashes(tokens, size), known).any(-1)


def distinct_share(tokens: np.ndarray, size: int = 8) -> np.ndarray:
    """How much of each row is not a repetition: different windows of `size` tokens / windows, float [rows]."""
    hashes = np.sort(window_hashes(tokens, size), axis=-1)
    if hashes.shape[-1] == 0:
        return np.ones(len(tokens))
    return (1 + (hashes[:, 1:] != hashes[:, :-1]).sum(-1)) / hashes.shape[-1]


def exclusion_texts(files: Iterable[str | Path], tokenizer) -> list[list[int]]:
    """Token ids of all turns in JSONL files of evaluation prompts, each as it reads at the start and inside of a text.

    Raises ConfigError without a tokenizer.
    """
    files = list(files)
    if files and tokenizer is None:
        raise ConfigError("prompts can only be excluded for a target that has a tokenizer")
    turns = [turn for file in files for row in read_jsonl(file) for turn in row]
    return [tokenizer.encode(text, add_special_tokens=False) for turn in turns for text in (turn, " " + turn)]
