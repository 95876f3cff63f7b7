"""A transformer's forward over a paged cache: prefill chunks, plain decoding, draft levels and verify trees alike."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.config import ModelConfig
from jaxspec.kvcache import LayerKV
from jaxspec.models import decoder
from jaxspec.models.attend import PagedAttend
from jaxspec.trees.tree import num_words
from pallas_kernels import device
from pallas_kernels.attention.rows import Library


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
    fresh: Library | None = None,
    rows: Int[Array, "B R"] | None = None,
) -> decoder.Output:
    """Runs T rows whose keys and values go to slots behind the `base` committed ones.

    Args:
      params, config: the model.
      x: embeddings of the rows.
      layers, page_table: its cache.
      base: committed positions that every row sees.
      positions: logical positions of the rows.
      valid: rows that exist; the others write nothing and their output means nothing.
      inflight_positions: positions of all M >= T entries behind `base`, the rows being the last T of them, -1 for
        entries that do not exist; None when the rows are the only ones.
      visible: see `pallas_kernels.tree_attention`; None for causal order.
      taps: see `decoder.decode`.
      fresh: see `PagedAttend`; for causal rows alone, behind no committed ones.
      rows: see `decoder.decode`.
    """
    alone = is_alone(x)
    if alone:
        x, positions, valid, inflight_positions, visible = beside_nothing(x, positions, valid, inflight_positions, visible)
    page_size = layers[0].k.shape[1]
    attend = PagedAttend.behind(page_table, base, page_size, positions, valid, inflight_positions, visible, fresh=fresh)
    # An adapter's scale is a number that chooses the kernel, which it would no longer be as an argument of a traced layer.
    only_arrays = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params["layers"]))
    out = decoder.decode(params, config, x, positions, attend, layers, taps, rows, traced_once=only_arrays)
    if alone:
        out = out._replace(hidden=out.hidden[:, :1], features=None if out.features is None else out.features[:, :1])
    return out


def is_alone(rows: Array) -> bool:
    """Whether [B, T, ...] holds a single row on a GPU, which is better run `beside_nothing`."""
    return rows.shape[0] * rows.shape[1] == 1 and device.on_gpu()


def beside_nothing(
    x: Float[Array, "1 1 E"], positions: Int[Array, "1 1"], valid: Bool[Array, "1 1"], inflight_positions, visible
) -> tuple[Array, Array, Array, Array, Array | None]:
    """A single row's arguments of `paged_forward` with a second row that does not exist.

    XLA:GPU turns small products of one row into element-wise products and sums, which leave most of the chip idle (25 us a
    layer of a 1B model on an H200), and norms of one row into two kernels.
    """
    if inflight_positions is None:
        inflight_positions = jnp.where(valid, positions, -1)
    if visible is not None:  # one more entry may need one more word
        words = num_words(inflight_positions.shape[1] + 1)
        visible = jnp.pad(visible, ((0, 0), (0, 1), (0, words - visible.shape[2])))
    return (
        jnp.broadcast_to(x, (1, 2, x.shape[2])),
        jnp.broadcast_to(positions, (1, 2)),
        jnp.pad(valid, ((0, 0), (0, 1))),
        jnp.pad(inflight_positions, ((0, 0), (0, 1)), constant_values=-1),
        visible,
    )
