"""What one request asks of the sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.plain import plain

GREEDY, SAMPLED, FULL = CLASSES = ("greedy", "sampled", "full")
"""Classes of programs by what they compute: argmax alone; sampling and its filters, too; penalties, biases and
min_new_tokens, too. A program serves every row of its own class and of those before it."""

GREEDY_TEMPERATURE = 1e-6
"""Temperatures below this mean greedy decoding."""


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks of the sampler, under the names of SGLang and vLLM.

    Attributes:
      temperature: divides the logits; below 1e-6 the request is greedy.
      top_k: how many of the largest logits stay (ties of the last one included); -1 for all. 1 is greedy.
      top_p: the smallest set of most probable tokens with at least this mass stays, after top_k.
      min_p: tokens with at least this fraction of the largest probability stay, after top_p.
      repetition_penalty: divides positive and multiplies negative logits of all tokens in prompt and output.
      presence_penalty: subtracted from the logit of every token in the output.
      frequency_penalty: subtracted once per occurrence in the output.
      min_new_tokens: no stop id is emitted before this many tokens.
      logit_bias: (token id, value) pairs added to the logits; a mapping is accepted too.
      seed: any 64-bit integer; None leaves the choice to the caller.

    Raises:
      ConfigError: a value out of its range; the message names parameter, value and bound.
    """

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def __post_init__(self):
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        try:
            pairs = tuple((int(token), float(value)) for token, value in pairs)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"logit_bias={self.logit_bias!r} must hold pairs (token id, value)") from error
        object.__setattr__(self, "logit_bias", pairs)
        for field in fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))

        self._check("temperature", lambda x: x >= 0, "a finite number >= 0 (0 is greedy)")
        self._check("top_k", lambda x: x == -1 or x >= 1, "-1 (all tokens) or a whole number >= 1", whole=True)
        self._check("top_p", lambda x: 0 < x <= 1, "in (0, 1]")
        self._check("min_p", lambda x: 0 <= x <= 1, "in [0, 1]")
        self._check("repetition_penalty", lambda x: 0 < x <= 2, "in (0, 2]")
        self._check("presence_penalty", lambda x: -2 <= x <= 2, "in [-2, 2]")
        self._check("frequency_penalty", lambda x: -2 <= x <= 2, "in [-2, 2]")
        self._check("min_new_tokens", lambda x: x >= 0, "a whole number >= 0", whole=True)
        if self.seed is not None:
            self._check("seed", lambda x: -(2**63) <= x < 2**64, "None or a 64-bit integer", whole=True)
        for token, value in pairs:
            if token < 0 or not math.isfinite(value):
                raise ConfigError(f"logit_bias has the pair ({token}, {value}): ids must be >= 0 and values finite")

    def _check(self, name: str, inside, bound: str, whole: bool = False) -> None:
        value = getattr(self, name)
        kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
        sound = isinstance(value, kinds) and not isinstance(value, bool) and (whole or math.isfinite(value))
        if not sound or not inside(value):
            raise ConfigError(f"{name}={value!r} must be {bound}")

    @property
    def is_greedy(self) -> bool:
        """Whether the request always takes the most probable token."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1


def sampling_class(params: SamplingParams) -> str:
    """The smallest class of programs that serves a request."""
    penalties = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    if penalties or params.logit_bias or params.min_new_tokens:
        return FULL
    return GREEDY if params.is_greedy else SAMPLED
