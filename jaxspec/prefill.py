"""How prompts are taken in: in programs of which sizes, and with which attention."""

from __future__ import annotations

import jax

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.fused_attention import Implementation, serves

BLOCK = {"cpu": 16, "gpu": 64}
"""Prompt positions of a block: a row of a prefill program. A text's blocks stand in one program side by side."""
SIZES = (1, 2, 4, 8, 16, 64)
"""Blocks of a prefill program."""
LONG_SIZES = (2048, 8192)
"""Positions of programs that take in the beginning of one long prompt through a library's attention, over no pages."""
CAPACITIES = (2048, 8192, 32768, 131072, 524288)
"""Positions that the rows of a table have room for: few, so that programs are few."""
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a table; beyond the last one in steps of it."""
ENDS = 16
"""Rows whose prompt may end in one prefill program, which runs the head for so many."""
PREFILL_ATTENTION = ("auto", "paged", "cudnn", "xla")


def platform() -> str:
    """ "cpu" or "gpu"."""
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def buckets_for(rows: int) -> tuple[int, ...]:
    """Table sizes up to the first that holds `rows`."""
    more = range(2 * BUCKETS[-1], rows + BUCKETS[-1], BUCKETS[-1])
    every = (*BUCKETS, *more)
    return every[: next(i for i, size in enumerate(every) if size >= rows) + 1]


def capacity_for(positions: int, most: int) -> int:
    """Positions of a row with room for `positions`, in a model whose context holds `most`."""
    return min(next((c for c in CAPACITIES if c >= positions), most), max(most, positions))


def prefill_attention(config: ModelConfig, dtype, asked: str = "auto") -> Implementation | None:
    """How the beginning of a long prompt attends: through cuDNN or XLA over the chunk alone; None: our kernel over the pages.

    Args:
      config, dtype: the target.
      asked: one of `PREFILL_ATTENTION`.

    Raises:
      ConfigError: no such name, or cuDNN was asked for by name and does not serve this model here.
    """
    if asked not in PREFILL_ATTENTION:
        raise ConfigError(f"prefill_attention={asked!r} must be one of {', '.join(PREFILL_ATTENTION)}")
    if asked in ("paged", "xla"):
        return None if asked == "paged" else "xla"
    windows = {w is not None and w < LONG_SIZES[-1] for w in config.windows}
    kinds = [(dtype, config.key_head_dim, config.value_head_dim, windowed, config.attention_softcap) for windowed in windows]
    if any(serves("cudnn", *kind) for kind in kinds):
        return "cudnn"
    if asked == "cudnn":
        raise ConfigError(
            "prefill_attention='cudnn' needs a GPU with cuDNN, bfloat16 or float16, heads of up to 256 channels and no soft "
            "cap: leave it 'auto'"
        )
    return None
