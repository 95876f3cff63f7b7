"""The two ways in which a layer attends: over a paged cache, or densely over its own rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.kvcache import LayerKV, Slots, find_slots, write
from jaxspec.models.decoder import Attend
from jaxspec.models.layers import product_and_hidden
from pallas_kernels import groups_queries, tree_attention
from pallas_kernels.attention.fused import Implementation, causal_rows, serves
from pallas_kernels.layer import gated_rope_write, rope_write


@dataclasses.dataclass(frozen=True)
class PagedAttend:
    """Writes the rows' keys and values at `slots`, then runs `pallas_kernels.tree_attention` (its arguments).

    `fresh` says that nothing is committed and all T rows stand in causal order, and which implementation attends then: the
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
    fresh: Implementation | None = None

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
        fresh: Implementation | None = None,
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
                return causal_rows(q, k, v, **options, implementation=self.fresh), layer
        return self.attention(layer, q, **options), layer

    def over_rows(self, dtype, key_dim: int, value_dim: int, *, scale, window: int | None, softcap: float | None) -> bool:
        """Whether the rows attend to their own keys and values as they are, not to the pages."""
        del scale
        if self.fresh is None or self.sink:
            return False
        windowed = window is not None and window < self.positions.shape[1]
        return serves(self.fresh, dtype, key_dim, value_dim, windowed, softcap)

    def attention(self, layer: LayerKV, q: Float[Array, "B T H D"], *, scale, window, softcap) -> Float[Array, "B T H Dv"]:
        """Attention alone."""
        with jax.named_scope("tree_attention"):
            return tree_attention(
                q, layer.k, layer.v, self.page_table, self.length, self.visible, self.positions, self.inflight_positions,
                scale=scale, window=window, sink=self.sink, softcap=softcap,
            )  # fmt: skip

    def fused(
        self, layer: LayerKV, heads: Float[Array, "parts B T K G_plus_2 D"], dtype, angles, **options
    ) -> tuple[Array, LayerKV] | None:
        """The same with the rotary embedding, from a projection before it, in one kernel less; None where that is not served.

        Args:
          layer: the layer's pools.
          heads: per kv head its queries, the key, the value; in parts that are to be added.
          dtype: of their sum.
          angles: from `layers.rope_angles`.
          **options: of `attention`.
        """
        if self.over_rows(dtype, heads.shape[-1], heads.shape[-1], **options):  # wants the keys themselves
            return None
        if not (rope_write.available() and rope_write.serves(heads, angles[0], *layer)):
            return None
        _, B, T, K, width, D = heads.shape
        queries = jax.ShapeDtypeStruct((B, T, K * (width - 2), D), dtype)
        with jax.named_scope("kv_write"):
            q, *pools = rope_write.rope_write(
                heads, *angles, *layer, *self.slots, dtype=dtype,
                by_head=groups_queries(queries, *layer, self.page_table),
            )  # fmt: skip
        layer = LayerKV(*pools)
        return self.attention(layer, q, **options), layer

    def fused_with_adapter(
        self, layer: LayerKV, x: Float[Array, "B T E"], qkv: dict, angles, **options
    ) -> tuple[Array, LayerKV] | None:
        """`fused` behind a projection with an adapter, whose second half is part of the kernel; None: not served.

        Args:
          layer: the layer's pools.
          x: what is projected.
          qkv: the projection, with ``lora``.
          angles: from `layers.rope_angles`.
          **options: of `attention`.
        """
        lora = qkv["lora"]
        scale, gate, blocks = lora["scale"], lora["gate"], lora.get("blocks")
        D = layer.k.shape[-1]
        if self.fresh is not None or not (isinstance(scale, float) and rope_write.available()):
            return None
        if not gated_rope_write.serves(x, lora["b"], blocks, angles[0], *layer):
            return None
        both = product_and_hidden(x, qkv, lora)
        if both is None:
            return None
        queries = jax.ShapeDtypeStruct((*x.shape[:2], lora["b"].shape[1] // D - 2 * layer.k.shape[2], D), x.dtype)
        with jax.named_scope("kv_write"):
            q, *pools = gated_rope_write.gated_rope_write(
                both[None], lora["b"], gate, *angles, *layer, *self.slots, scale=scale, blocks=blocks,
                by_head=groups_queries(queries, *layer, self.page_table),
            )  # fmt: skip
        layer = LayerKV(*pools)
        return self.attention(layer, q, **options), layer


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
