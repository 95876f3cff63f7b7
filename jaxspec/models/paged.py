"""A transformer's forward over a paged cache: prefill chunks, plain decoding, draft levels and verify trees alike."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.config import ModelConfig
from jaxspec.kvcache import LayerKV, find_slots
from jaxspec.models import decoder
from jaxspec.models.attend import paged_attend


def paged_forward(
    params: dict,
    config: ModelConfig,
    x: Float[Array, "B T E"],
    layers: tuple[LayerKV, ...],
    page_table: Int[Array, "B N"],
    base: Int[Array, " B"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    *,
    inflight_positions: Int[Array, "B M"] | None = None,
    visible: UInt32[Array, "B T W"] | None = None,
    taps: tuple[int, ...] = (),
) -> decoder.Output:
    """Runs T rows whose keys and values go to slots behind the `base` committed ones.

    Args:
      params, config: the model.
      x: embeddings of the rows.
      layers, page_table: its cache.
      base: committed positions that every row sees.
      positions: logical positions of the rows.
      valid: rows that exist; the others write to the scratch page and their output means nothing.
      inflight_positions: positions of all M >= T entries behind `base`, the rows being the last T of them, -1 for
        entries that do not exist; None when the rows are the only ones.
      visible: see `pallas_kernels.tree_attention`; None for causal order.
      taps: see `decoder.decode`.
    """
    T = x.shape[1]
    if inflight_positions is None:
        inflight_positions = jnp.where(valid, positions, -1)
    index = base[:, None] + inflight_positions.shape[1] - T + jnp.arange(T)
    slots = find_slots(page_table, layers[0].k.shape[1], index, valid)
    attend = paged_attend(page_table, base, slots, visible, positions, inflight_positions)
    return decoder.decode(params, config, x, positions, attend, layers, taps)
