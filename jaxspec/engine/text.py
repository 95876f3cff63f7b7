"""From tokens to text: what an answer's tokens say, and where a stop string ends it. The core deals in token ids only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

REPLACEMENT = "\ufffd"
CONTEXT = 6
"""Prompt tokens that the first tokens of an answer are decoded with: a word's leading space and the rest of a character that
the prompt began come out right."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """What came with some tokens.

    Attributes:
      text: new text that will not change any more; None without a tokenizer.
      tokens: the new tokens.
      from_draft: which of them a draft proposed.
    """

    text: str | None
    tokens: list[int]
    from_draft: list[bool]


class Answer:
    """One answer as it grows: its tokens, their text, and the one point at which a stop string cuts both.

    Attributes:
      tokens: the tokens that count.
      text: their text without the stop; None without a tokenizer. Final once `reason` is set.
      reason: None while it grows, then "stop", "length" or "abort".
      matched_stop: the stop id or string that ended it.
      from_draft, round_of, proposed_upto: the log of each token (`round.RoundState`).
    """

    def __init__(self, tokenizer: Any, prompt: np.ndarray, stop: Sequence[str] = ()):
        """Nothing yet, behind `prompt`."""
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.tokens: list[int] = []
        self.reason: str | None = None
        self.matched_stop: int | str | None = None
        self.text = None if tokenizer is None else ""
        self._log: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._prompt = [] if tokenizer is None else np.asarray(prompt)[-CONTEXT:].tolist()
        self._done = self._begun = 0  # tokens whose text is out; tokens before them that the next ones are decoded with
        self._sent = self._sent_tokens = 0  # characters and tokens that `piece` has handed out
        self._from_draft: list[bool] = []

    def add(self, tokens: list[int], from_draft, round_of, proposed_upto, reason: str | None) -> int | None:
        """Takes in new tokens, and how the device says the answer ended.

        Returns:
          How many tokens the answer keeps if a stop string has just ended it, else None.
        """
        if self.reason is not None:
            return None
        self.tokens += tokens
        self._log.append((np.asarray(from_draft, bool), np.asarray(round_of), np.asarray(proposed_upto)))
        self._from_draft += self._log[-1][0].tolist()
        self.reason = reason
        if reason == "stop":
            self.matched_stop = self.tokens[-1]
        if self.tokenizer is None:
            return None
        shown = len(self.tokens) - (reason == "stop")
        searched = max(len(self.text) - max((len(s) for s in self.stop), default=1) + 1, 0)
        self._decode(shown, final=reason is not None)
        found = [(at + len(s), at, s) for s in self.stop if (at := self.text.find(s, searched)) >= 0]
        if not found:
            return None
        _, begin, self.matched_stop = min(found)
        kept = self._tokens_until(shown)
        self.tokens, self.text, self.reason = self.tokens[:kept], self.text[:begin], "stop"
        return kept

    def _decode(self, shown: int, final: bool) -> None:
        """Appends the text of the tokens up to `shown`, but for a character that is not yet whole (unless it is `final`)."""
        skip, begin = len(self._prompt), self._begun
        context = self._prompt[begin:] + self.tokens[max(begin - skip, 0) : shown]
        before = self.tokenizer.decode(context[: skip + self._done - begin])
        both = self.tokenizer.decode(context)
        if len(both) > len(before) and (final or not both.endswith(REPLACEMENT)):
            self.text += both[len(before) :]
            self._begun, self._done = skip + self._done, shown

    def _tokens_until(self, shown: int) -> int:
        """Tokens up to the one that completes a stop string."""
        low, high = 1, shown
        while low < high:
            middle = (low + high) // 2
            other = Answer(self.tokenizer, np.asarray(self._prompt))
            other.tokens = self.tokens[:middle]
            other._decode(middle, final=True)
            if any(s in other.text for s in self.stop):
                high = middle
            else:
                low = middle + 1
        return low

    def log(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """from_draft, round_of and proposed_upto of the tokens that count."""
        empty = (np.zeros(0, bool), np.zeros(0, np.int32), np.zeros(0, np.int32))
        return tuple(np.concatenate(column)[: len(self.tokens)] for column in zip(empty, *self._log, strict=True))

    def piece(self) -> Piece:
        """What is new since the last call: tokens, and text that stays (what a stop string may begin with is held back)."""
        tokens, begin = self.tokens[self._sent_tokens :], self._sent_tokens
        self._sent_tokens = len(self.tokens)
        from_draft = self._from_draft[begin : begin + len(tokens)]
        if self.text is None:
            return Piece(None, tokens, from_draft)
        ready = len(self.text) if self.reason is not None else len(self.text) - self._held()
        text, self._sent = self.text[self._sent : ready], max(ready, self._sent)
        return Piece(text, tokens, from_draft)

    def _held(self) -> int:
        """Characters at the end that a stop string may begin with."""
        held = 0
        for s in self.stop:
            for size in range(min(len(s) - 1, len(self.text)), held, -1):
                if self.text.endswith(s[:size]):
                    held = size
                    break
        return held
