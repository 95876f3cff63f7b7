"""From tokens to text: what an answer's tokens say, and where a stop string ends it. The core deals in token ids only."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

REPLACEMENT = "\ufffd"
CONTEXT = 6
"""Prompt tokens that the first tokens of an answer are decoded with, if these are whole characters that show (`opening`): a
word's leading space and the rest of a character that the prompt began come out right."""


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

    The text is what prompt and answer together say behind what the prompt says alone, special tokens left out. Stop strings
    are looked for in the text with special tokens kept, so that one of them may be a stop string, or a part of one.

    Attributes:
      tokens: the tokens that count.
      text: their text without the stop; None without a tokenizer. Final once `reason` is set.
      reason: None while it grows, then "stop", "length" or "abort".
      matched_stop: the stop id or string that ended it.
      from_draft, round_of, proposed_upto: the log of each token (`round.RoundState`).
    """

    def __init__(self, tokenizer: Any, prompt: np.ndarray, stop: Sequence[str] = ()):
        """Nothing yet, behind `prompt`. A tokenizer has ``decode`` and, if it hides tokens, ``special_tokens_by_id``."""
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.tokens: list[int] = []
        self.reason: str | None = None
        self.matched_stop: int | str | None = None
        self.text = None if tokenizer is None else ""
        self._log: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        # Tokens count from the first of `_prompt`: the next ones are decoded from `_begun` on, the text up to `_done` is out.
        self._prompt, self._done = ([], 0) if tokenizer is None else opening(tokenizer, prompt)
        self._begun = 0
        self._special: Mapping[int, str] = getattr(tokenizer, "special_tokens_by_id", {}) if self.stop else {}
        self._searched = ""  # the text with special tokens kept, which stop strings are looked for in …
        self._hidden: list[tuple[int, int]] = []  # … and where these stand in it, with their lengths
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
        kept = self._read(len(self.tokens) - len(tokens), reason)
        if kept is not None:
            self.tokens, self.reason = self.tokens[:kept], "stop"
        return kept

    def _read(self, first: int, reason: str | None) -> int | None:
        """Takes the tokens from `first` on into the text. Returns how many tokens stay if a stop string is complete, else None.

        All at once where that is sure to give what one by one would; so the text does not depend on how tokens arrive.
        """
        total = len(self.tokens)
        shown = total - (reason == "stop")  # a stop id is no text
        if not any(t in self._special for t in self.tokens[first:]):
            text, is_whole = self._decode(shown, reason is not None)
            if REPLACEMENT not in text and not self._find(text):
                self._take(text, shown, is_whole)
                return None
        for count in range(first + 1, total + 1) or (total,):
            text, is_whole = self._decode(min(count, shown), reason is not None and count == total)
            special = self._special.get(self.tokens[count - 1], "") if count > first else ""
            if found := self._find(text + special):
                _, begin, self.matched_stop = found
                self.text = (self.text + text)[: self._visible(min(begin, len(self._searched) + len(text)))]
                return count
            self._take(text, min(count, shown), is_whole)
            if special:
                self._hidden.append((len(self._searched), len(special)))
                self._searched += special
        return None

    def _decode(self, shown: int, is_final: bool) -> tuple[str, bool]:
        """The text of the tokens up to `shown` that is not out yet, and whether it ends with a whole character.

        What is out stays as it is. Where later bytes make rubbish of a whole run of bytes (byte fallback decodes all or none
        of it), what is not out yet is decoded alone.
        """
        decode, skip = self.tokenizer.decode, len(self._prompt)
        before = decode(self._ids(self._begun, self._done))
        both = decode(self._ids(self._begun, skip + shown))
        if self._done < skip:  # the prompt began a character: if it comes to nothing, it was the prompt's
            prompt = decode(self._prompt[self._begun :])
            known = len(os.path.commonprefix([prompt, both]))
            text = both[max(known, len(before)) :] if both.startswith(before) else both[known:]
        elif both.startswith(before):
            text = both[len(before) :]
        else:
            text = decode(self._ids(self._done, skip + shown))
        return text, bool(text) and (is_final or not text.endswith(REPLACEMENT))

    def _ids(self, begin: int, end: int) -> list[int]:
        """Tokens of the prompt's end and the answer, counted from the first of `_prompt`."""
        skip = len(self._prompt)
        return self._prompt[begin:end] + self.tokens[max(begin - skip, 0) : max(end - skip, 0)]

    def _take(self, text: str, shown: int, is_whole: bool) -> None:
        """Appends the text of the tokens up to `shown`, but for a character that is not yet whole."""
        if is_whole:
            self.text += text
            self._begun, self._done = self._done, len(self._prompt) + shown
            self._searched += text

    def _find(self, text: str) -> tuple[int, int, str] | None:
        """End, begin and name of the stop string that is complete first once `text` has come; counted in `_searched`."""
        if not self.stop:
            return None
        begin = max(len(self._searched) - max(map(len, self.stop)) + 1, 0)
        tail = self._searched[begin:] + text
        found = [(begin + at + len(s), begin + at, s) for s in self.stop if (at := tail.find(s)) >= 0]
        return min(found, default=None)

    def _visible(self, end: int) -> int:
        """Characters of the text among the first `end` that are searched."""
        return end - sum(min(length, end - at) for at, length in self._hidden if at < end)

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
        """Characters at the end of the text that a stop string may begin with."""
        held = 0
        for s in self.stop:
            for size in range(min(len(s) - 1, len(self._searched)), held, -1):
                if self._searched.endswith(s[:size]):
                    held = size
                    break
        return len(self.text) - self._visible(len(self._searched) - held)


def opening(tokenizer: Any, prompt: np.ndarray) -> tuple[list[int], int]:
    """The prompt tokens that an answer's first tokens are decoded with, and how many of them say something whole.

    They begin and end between two characters: the first ones of a longer prompt are left out, up to three tokens at the end
    may be the beginning of a character that the answer completes.
    """
    total, size = len(prompt), CONTEXT
    while size <= 16 * CONTEXT:
        for end in range(total, max(total - 4, -1), -1):
            for begin in range(max(end - size, 0), max(end - size - 4, -1), -1):
                text = tokenizer.decode(prompt[begin:end].tolist())
                if (text or begin == 0) and not (text.startswith(REPLACEMENT) or text.endswith(REPLACEMENT)):
                    return prompt[begin:].tolist(), end - begin
        size *= 2
    rest = prompt[-CONTEXT:].tolist()
    return rest, len(rest)
