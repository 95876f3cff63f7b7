"""The two ways in which a layer attends: over a paged cache, or densely over its own rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.kvcache import LayerKV, Slots, find_slots, write
from jaxspec.models.decoder import Attend
from jaxspec.models.layers import dense, is_plain, split_adapter
from pallas_kernels import groups_queries, tree_attention
from pallas_kernels.attention.rows import Library, attends_over_rows, chunk_attention
from pallas_kernels.layer.api import adapted_rope_write, apply_rope, rope_write, split_qkv
from pallas_kernels.product.api import add_up


@dataclasses.dataclass(frozen=True)
class PagedAttend:
    """Writes the rows' keys and values at `slots`, then runs `pallas_kernels.tree_attention` (its arguments).

    `fresh` says that nothing is committed and all T rows stand in causal order, and which library attends then: the
    rows' own keys and values are all that there is, and the pages are written but not read. Rows that do not exist stand
    behind all others, which therefore do not see them. None: the kernel reads the pages.
    """

    page_table: Int[Array, "B N"]
    length: Int[Array, " B"]
    slots: Slots
    visible: UInt32[Array, "B T W"] | None
    positions: Int[Array, "B T"]
    inflight_positions: Int[Array, "B M"]
    sink: int = 0
    fresh: Library | None = None

    @classmethod
    def behind(
        cls,
        page_table: Int[Array, "B N"],
        base: Int[Array, " B"],
        page_size: int,
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        inflight_positions: Int[Array, "B M"] | None = None,
        visible: UInt32[Array, "B T W"] | None = None,
        *,
        sink: int = 0,
        fresh: Library | None = None,
    ) -> PagedAttend:
        """Rows whose entries are the last T of those in flight, which lie one after another behind the `base` committed ones.

        Args:
          page_table: pages of every sequence.
          base: committed positions that every row sees.
          page_size: S, slots a page.
          positions: logical positions of the rows.
          valid: rows that exist; the others write nothing and their output means nothing.
          inflight_positions: positions of all M >= T entries behind `base`, -1 for entries that do not exist; None when the
            rows are the only ones.
          visible, sink, fresh: see the class.
        """
        if inflight_positions is None:
            inflight_positions = jnp.where(valid, positions, -1)
        T = positions.shape[1]
        index = base[:, None] + inflight_positions.shape[1] - T + jnp.arange(T)
        slots = find_slots(page_table, page_size, index, valid)
        return cls(page_table, base, slots, visible, positions, inflight_positions, sink, fresh)

    def __call__(self, layer: LayerKV, q, k, v, **options) -> tuple[Array, LayerKV]:
        """An `Attend`."""
        with jax.named_scope("kv_write"):
            layer = write(layer, self.slots, k, v)
        if self.over_rows(q.dtype, q.shape[-1], v.shape[-1], **options):
            with jax.named_scope("chunk_attention"):
                options.pop("softcap")
                return chunk_attention(self.fresh, q, k, v, **options), layer
        return self.attention(layer, q, **options), layer

    def projected(self, layer: LayerKV, x: Float[Array, "B T E"], qkv: dict, angles, **options) -> tuple[Array, LayerKV]:
        """`__call__` from what queries, keys and values are projected from: rotary embedding and write may be one kernel.

        Args:
          layer: the layer's pools.
          x: what is projected.
          qkv: the projection (`layers.dense`): per kv head its queries, the key, the value.
          angles: from `layers.rope_angles`.
          **options: of `attention`.
        """
        K, D = layer.k.shape[2:]
        adapter, plain = split_adapter(qkv) if "lora" in qkv else (None, qkv)
        if adapter is not None and is_plain(plain) and self.fresh is None:
            with jax.named_scope("kv_write"):
                by_head = self.groups_queries(layer, x, plain["kernel"].shape[1])
                q, *pools = adapted_rope_write(x, plain["kernel"], adapter, *angles, *layer, *self.slots, by_head=by_head)
        else:
            parts = dense(x, qkv, adder="any")
            if self.over_rows(x.dtype, D, D, **options):  # wants the keys themselves
                q, k, v = split_qkv(add_up(parts, x.dtype), K, D)
                return self(layer, apply_rope(q, angles), apply_rope(k, angles), v, **options)
            with jax.named_scope("kv_write"):
                by_head = self.groups_queries(layer, x, parts.shape[3])
                q, *pools = rope_write(parts, *angles, *layer, *self.slots, dtype=x.dtype, by_head=by_head)
        layer = LayerKV(*pools)
        return self.attention(layer, q, **options), layer

    def groups_queries(self, layer: LayerKV, x: Float[Array, "B T E"], width: int) -> bool:
        """Whether `attention` regroups the queries of a projection of x, `width` channels wide, by kv head."""
        K, D = layer.k.shape[2:]
        queries = jax.ShapeDtypeStruct((*x.shape[:2], width // D - 2 * K, D), x.dtype)
        return groups_queries(queries, *layer, self.page_table)

    def over_rows(self, dtype, key_dim: int, value_dim: int, *, scale, window: int | None, softcap: float | None) -> bool:
        """Whether the rows attend to their own keys and values as they are, not to the pages."""
        del scale
        if self.fresh is None or self.sink:
            return False
        windowed = window is not None and window < self.positions.shape[1]
        return attends_over_rows(self.fresh, dtype, key_dim, value_dim, windowed, softcap)

    def attention(self, layer: LayerKV, q: Float[Array, "B T H D"], *, scale, window, softcap) -> Float[Array, "B T H Dv"]:
        """Attention alone."""
        with jax.named_scope("tree_attention"):
            return tree_attention(
                q,
                layer.k,
                layer.v,
                self.page_table,
                self.length,
                self.visible,
                self.positions,
                self.inflight_positions,
                scale=scale,
                window=window,
                sink=self.sink,
                softcap=softcap,
            )


def causal_attend(positions: Int[Array, "B T"]) -> Attend:
    """Dense causal attention of the rows over themselves, without a cache: for `jaxspec.forward` and training."""

    def attend(layer, q, k, v, *, scale, window, softcap):
        B, T, H, D = q.shape
        K = k.shape[2]
        distance = positions[:, :, None] - positions[:, None, :]
        mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        scores = jnp.einsum("BTKGD,BLKD->BKGTL", q.reshape(B, T, K, H // K, D), k, preferred_element_type=jnp.float32)
        scores = scores * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -jnp.inf), axis=-1).astype(v.dtype)
        return jnp.einsum("BKGTL,BLKD->BTKGD", weights, v).reshape(B, T, H, v.shape[-1]), layer

    return attend
