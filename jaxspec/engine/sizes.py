"""How prompts are taken in: in programs of which sizes, and with which attention."""

from __future__ import annotations

from typing import Any

import jax

from jaxspec.config import ConfigError, ModelConfig
from pallas_kernels.attention.rows import Library, library_for_chunks

BLOCK = {"cpu": 16, "gpu": 64}
"""Prompt positions of a block: a row of a prefill program. A text's blocks stand in one program side by side."""
SIZES = {"cpu": (1, 2, 4, 8), "gpu": (2, 4, 8, 16, 32, 64)}
"""Blocks of a prefill program."""
LONG_SIZES = {"cpu": (256, 1024), "gpu": (2048, 8192)}
"""Positions of programs that take in the beginning of one long prompt as one row: on a GPU through a library's attention, over
no pages; on a CPU because each block would gather its keys anew."""
CAPACITIES = (2048, 8192, 32768, 131072, 524288)
"""Positions that the rows of a table have room for: few, so that programs are few."""
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a table; beyond the last one in steps of it."""
ENDS = 16
"""Rows whose prompt may end in one prefill program, which runs the head for so many."""
PREFILL_ATTENTION = ("auto", "paged", "cudnn", "xla")


def program_sizes(long: Library | None, chunk: int | None = None) -> dict[str, Any]:
    """Sizes of the prefill programs, as fields of `engine.messages.Limits`.

    Args:
      long: how the beginning of a long prompt attends, from `prefill_attention`.
      chunk: positions of a row, where the caller wants others.
    """
    over_pages = long is None and platform() == "cpu"
    sizes = LONG_SIZES[platform()] if over_pages or long is not None else ()
    if chunk is not None:
        sizes = () if long is None else (chunk,)
    return {
        "prefill_sizes": SIZES[platform()],
        "block": chunk or BLOCK[platform()],
        "long_sizes": sizes,
        "long_anywhere": over_pages,
        "max_ends": ENDS,
    }


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


def prefill_attention(config: ModelConfig, dtype, asked: str = "auto") -> Library | None:
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
    windows = {w is not None and w < LONG_SIZES["gpu"][-1] for w in config.windows}
    kinds = [(dtype, config.key_head_dim, config.value_head_dim, windowed, config.attention_softcap) for windowed in windows]
    library = library_for_chunks(kinds)
    if library is None and asked == "cudnn":
        raise ConfigError(
            "prefill_attention='cudnn' needs a GPU with cuDNN, bfloat16 or float16, heads of up to 256 channels and no soft "
            "cap: leave it 'auto'"
        )
    return library


def first_attention(config: ModelConfig, dtype, asked: str, length: int) -> Library | None:
    """How the beginning of a prompt of `length` tokens attends when it is alone; arguments as for `prefill_attention`."""
    long, sizes = prefill_attention(config, dtype, asked), SIZES[platform()]
    return long if length > sizes[-1] * BLOCK[platform()] else None
