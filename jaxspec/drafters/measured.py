"""What was measured of a draft: from it follow the automatic tree and the choice among several drafts, for each platform.

The figures come from ``benchmarks/accept_lengths.py``, which writes them next to the heads that ship with jaxspec. A draft
without figures is treated by the general rules of its algorithm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxspec.config import SpecConfig
from jaxspec.drafters.options import DraftOptions

TREE = ("num_steps", "topk", "num_draft_tokens")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One tree of one draft on one platform.

    Attributes:
      platform: JAX's name of it: "cpu", "gpu".
      num_steps, topk, num_draft_tokens: the tree as it was asked for.
      accept_length: tokens a round.
      speedup: tokens per second over those of plain decoding, one sequence at a time.
    """

    platform: str
    num_steps: int | None
    topk: int | None
    num_draft_tokens: int | None
    accept_length: float
    speedup: float

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Measurement:
        """Of a row of the table; further keys (device, prompts, …) are for the reader."""
        return cls(**{field.name: row.get(field.name) for field in dataclasses.fields(cls)})


def best(rows: Iterable[Measurement], platform: str | None = None) -> Measurement | None:
    """The fastest of them on a platform (None: JAX's default one); None when it was not measured there."""
    platform = jax.default_backend() if platform is None else platform
    return max((r for r in rows if r.platform == platform), key=lambda r: r.speedup, default=None)


def preference(draft: Any) -> tuple[float, float]:
    """Sorts drafts: by the best speed-up on this platform, then by the best accept length anywhere; (0, 0) without figures."""
    rows = getattr(draft, "measured", ())
    found = best(rows)
    return 0.0 if found is None else found.speedup, max((r.accept_length for r in rows), default=0.0)


def with_measured_tree(spec: SpecConfig, draft: Any) -> SpecConfig:
    """Fills in the tree that was fastest with this draft here, unless the user chose one or asks for what only chains do.

    Args:
      spec: its `options` are an instance of the algorithm's, or None.
      draft: anything; only one with figures changes the spec.
    """
    found = best(getattr(draft, "measured", ()))
    options = DraftOptions() if spec.options is None else spec.options
    chosen = options.settles_tree or any(getattr(spec, name) is not None for name in TREE)
    if found is None or chosen:
        return spec
    chains_only = spec.verification != "target_only" or options.chains_only
    if chains_only and found.topk not in (None, 1):
        return spec
    return dataclasses.replace(spec, **{name: getattr(found, name) for name in TREE})
