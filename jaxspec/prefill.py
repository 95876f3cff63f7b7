"""How prompts are taken in: in chunks of which size, and with which attention."""

from __future__ import annotations

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.fused_attention import Implementation, serves

PREFILL_CHUNKS = (16, 32, 64, 128, 256, 512)
FRESH_ROWS = 8192  # prompt tokens, of all sequences together, that one program takes in without reading pages
LATER_ROWS = 2048  # and those behind them, which read pages
PREFILL_ATTENTION = ("auto", "paged", "cudnn", "xla")


def prefill_attention(config: ModelConfig, dtype, longest: int, asked: str = "auto") -> Implementation | None:
    """How a prompt's first chunk attends: through cuDNN or XLA over the chunk alone, or None: our kernel over the pages.

    Args:
      config, dtype: the target.
      longest: tokens of the longest prompt. "auto" leaves those to the kernel that it takes in at one go anyway.
      asked: one of `PREFILL_ATTENTION`.

    Raises:
      ConfigError: no such name, or cuDNN was asked for by name and does not serve this model here.
    """
    if asked not in PREFILL_ATTENTION:
        raise ConfigError(f"prefill_attention={asked!r} must be one of {', '.join(PREFILL_ATTENTION)}")
    if asked in ("paged", "xla"):
        return None if asked == "paged" else "xla"
    if asked == "auto" and longest <= PREFILL_CHUNKS[-1]:
        return None
    windows = {w is not None and w < longest for w in config.windows}
    kinds = [(dtype, config.key_head_dim, config.value_head_dim, windowed, config.attention_softcap) for windowed in windows]
    if any(serves("cudnn", *kind) for kind in kinds):
        return "cudnn"
    if asked == "cudnn":
        raise ConfigError(
            "prefill_attention='cudnn' needs a GPU with cuDNN, bfloat16 or float16, heads of up to 256 channels and no soft "
            "cap: leave it 'auto'"
        )
    return None


def prefill_chunks(longest: int, batch: int, fresh: bool) -> tuple[int, int]:
    """Prompt tokens of the first prefill program and of later ones, of which as many run as the longest prompt needs.

    Without a library's attention all chunks are of one of a few sizes. With it the first is as large as `FRESH_ROWS` allow,
    so that the products run at their best and no page is read; sizes are rounded up to 512s, as the state's are.
    """
    least = PREFILL_CHUNKS[-1]
    if not fresh or longest <= least:
        chunk = next((c for c in PREFILL_CHUNKS if c >= longest), least)
        return chunk, chunk

    def fitting(tokens: int, rows: int) -> int:
        most = max(rows // batch // least * least, least)
        parts = max(1, -(-tokens // most))
        return min(most, -(-tokens // (parts * least)) * least)

    first = min(max(FRESH_ROWS // batch // least * least, least), -(-longest // least) * least)
    return first, fitting(max(longest - first, 1), LATER_ROWS)
