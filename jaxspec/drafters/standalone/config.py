"""What can be set for a draft model."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxspec.config import ConfigError
from jaxspec.drafters.options import DraftOptions

PAIRINGS = ("ids", "strings")


@dataclasses.dataclass(frozen=True)
class StandaloneOptions(DraftOptions):
    """What can be set for a draft model.

    Attributes:
      pairing: "ids": target and draft have one vocabulary but for padding and a few added tokens; "strings": any two
        tokenizers, whose tokens are paired where they read alike. Only paired tokens are drafted, and the draft reads the
        target's tokens, not the text as its own tokenizer would cut it: the answer stays the target's own, but less is
        accepted.
    """

    flag_prefix: ClassVar[str] = "standalone_"
    pairing: str = "ids"

    def __post_init__(self):
        if self.pairing not in PAIRINGS:
            raise ConfigError(f"standalone_pairing={self.pairing!r} must be one of {', '.join(PAIRINGS)}")
