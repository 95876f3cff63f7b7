"""Stop strings: where they end an answer, and how much of a growing text can be shown."""

from __future__ import annotations

from collections.abc import Sequence

REPLACEMENT = "\ufffd"


def cut_at_stop_string(tokenizer, tokens: list[int], text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Cuts an answer at the stop string that is complete first.

    Args:
      tokenizer: decodes prefixes, to find the token that completes the string.
      tokens: the answer's tokens (a stop id not included).
      text: their text.
      stop: the strings.

    Returns:
      How many tokens are kept (the completing one included) and the text before the string; None without a match.
    """
    found = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    if not found:
        return None
    _, begin = min(found)
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        prefix = tokenizer.decode(tokens[:middle])
        if any(s in prefix for s in stop):
            high = middle
        else:
            low = middle + 1
    return low, text[:begin]


def stable_text(text: str, stop: Sequence[str]) -> int:
    """How many characters of an unfinished text will not change: no partial character, no possible start of a stop string."""
    ready = len(text.rstrip(REPLACEMENT))
    held = 0
    for s in stop:
        for size in range(min(len(s) - 1, ready), held, -1):
            if text[:ready].endswith(s[:size]):
                held = size
                break
    return ready - held
