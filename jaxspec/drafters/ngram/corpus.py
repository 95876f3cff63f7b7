"""External corpora: text to copy from, indexed by what stands before every position.

The end positions of a corpus are sorted by the text before them, read backwards. All places where a given suffix ends are then
one interval, found by bisection, however large the corpus is; a suffix automaton's states are these intervals. NumPy
builds this in seconds for millions of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.drafters.ngram.config import NgramConfig
from jaxspec.drafters.ngram.trie import MatchTree, grow

SEPARATOR = -(2**31)
"""Stands between documents; no token is equal to it, so that no match crosses a border."""


class CorpusError(ConfigError):
    """An external corpus that cannot be used; the message names the file and the line."""


def read_jsonl(path: str | Path) -> Iterator[str]:
    """The documents of a JSONL corpus: one JSON string a line; blank lines are passed over."""
    path = Path(path)
    if not path.is_file():
        raise CorpusError(f"external corpus {path} is not a file")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise CorpusError(f"{path}, line {number}: not UTF-8 (byte {error.start})") from error
            except json.JSONDecodeError as error:
                raise CorpusError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
            except (RecursionError, ValueError) as error:  # nested too deeply, or a number of too many digits
                raise CorpusError(
                    f"{path}, line {number}: no document ({type(error).__name__}), expected one string"
                ) from error
            if not isinstance(text, str):
                raise CorpusError(
                    f'{path}, line {number}: a JSON {type(text).__name__}, but a document is one string ("...") a line'
                )
            yield text


def tokenize(documents: Iterable[str], encode: Callable[[str], Sequence[int]], max_tokens: int, name: str) -> np.ndarray:
    """Documents as one int32 array, a separator behind each.

    Args:
      documents: texts.
      encode: text to token ids, without special tokens.
      max_tokens: the limit on tokens, separators not counted.
      name: what an error calls the corpus.

    Raises:
      CorpusError: too many tokens, or none.
    """
    parts, total = [], 0
    for document in documents:
        ids = np.asarray(encode(document), np.int32)
        total += ids.size
        if total > max_tokens:
            raise CorpusError(f"corpus {name!r} has more than external_corpus_max_tokens={max_tokens} tokens")
        if ids.size:
            parts += [ids, np.asarray([SEPARATOR], np.int32)]
    if not total:
        raise CorpusError(f"corpus {name!r} is empty: it gives no token")
    return np.concatenate(parts)


def sort_by_context(tokens: np.ndarray, depth: int) -> np.ndarray:
    """End positions in the order of (tokens[p], tokens[p-1], …), at least `depth` tokens deep; later ones first among equals.

    Ranks of contexts of twice the length come from pairs of ranks (Manber & Myers 1990, backwards).
    """
    size = tokens.size
    _, rank = np.unique(tokens, return_inverse=True)
    rank = rank.astype(np.int64) + 1
    width = 1
    while width < depth:
        before = np.zeros(size, np.int64)
        before[width:] = rank[:-width]
        _, rank = np.unique(rank * (size + 1) + before, return_inverse=True)
        rank = rank.astype(np.int64) + 1
        width *= 2
    return np.lexsort((-np.arange(size), rank)).astype(np.int32)


@dataclass(frozen=True)
class Corpus:
    """One indexed corpus; a source of matches as in `ngram_trie.Source`. A state is the array of its end positions."""

    tokens: np.ndarray
    order: np.ndarray
    config: NgramConfig

    @classmethod
    def build(cls, tokens: Sequence[int] | np.ndarray, config: NgramConfig) -> Corpus:
        """Indexes tokens with a `SEPARATOR` wherever a document ends."""
        tokens = np.asarray(tokens, np.int32)
        return cls(tokens, sort_by_context(tokens, config.max_trie_depth), config)

    @property
    def num_tokens(self) -> int:
        """Tokens, separators not counted."""
        return int(np.sum(self.tokens != SEPARATOR))

    def anchors(self, context: Sequence[int]) -> list[tuple[int, np.ndarray]]:
        """See `Source`. Suffixes that end in the same places are one anchor, under the longest length, as in an automaton."""
        low, high = 0, self.order.size
        found: list[tuple[int, np.ndarray]] = []
        for depth in range(1, min(len(context), self.config.max_trie_depth) + 1):
            token = int(context[-depth])
            low, high = (self._bisect(low, high, depth - 1, token, side) for side in ("left", "right"))
            if low == high:
                break
            if found and found[-1][1].size == high - low:
                found.pop()
            found.append((depth, self.order[low:high]))
        return [(depth, ends) for depth, ends in reversed(found) if self.children(ends, 1)]

    def _bisect(self, low: int, high: int, back: int, token: int, side: str) -> int:
        """Where `token` belongs in order[low:high], whose entries are sorted by the token `back` places before them."""
        while low < high:
            middle = (low + high) // 2
            place = int(self.order[middle]) - back
            there = int(self.tokens[place]) if place >= 0 else SEPARATOR - 1
            if there < token or (side == "right" and there == token):
                low = middle + 1
            else:
                high = middle
        return low

    def children(self, state: np.ndarray, limit: int) -> list[tuple[int, np.ndarray, int]]:
        """See `Source`: the latest ones in the corpus for BFS, the most frequent ones for PROB."""
        ends = state[state + 1 < self.tokens.size] + 1
        following = self.tokens[ends]
        ends, following = ends[following != SEPARATOR], following[following != SEPARATOR]
        tokens, group, counts = np.unique(following, return_inverse=True, return_counts=True)
        if self.config.match_type == "BFS":
            latest = np.zeros(tokens.size, np.int64)
            np.maximum.at(latest, group, ends)
            order = np.argsort(-latest, kind="stable")
        else:
            order = np.argsort(-counts, kind="stable")
        return [(int(tokens[i]), ends[group == i], int(counts[i])) for i in order[:limit]]

    def match(self, context: Sequence[int], budget: int) -> MatchTree:
        """The draft tree behind a context; see `grow`."""
        return grow(self, context, self.config, budget)
