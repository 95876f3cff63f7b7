"""The two ways in which a layer attends: over a paged cache, or densely over its own rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from jaxspec.kvcache import LayerKV, Slots, write
from jaxspec.models.decoder import Attend
from pallas_kernels import tree_attention


def paged_attend(
    page_table: Int[Array, "B N"],
    length: Int[Array, " B"],
    slots: Slots,
    visible: UInt32[Array, "B T W"] | None,
    positions: Int[Array, "B T"],
    inflight_positions: Int[Array, "B M"],
    sink: int = 0,
) -> Attend:
    """Writes the rows' keys and values at `slots`, then runs `pallas_kernels.tree_attention` (its arguments)."""

    def attend(layer: LayerKV, q, k, v, *, scale, window, softcap):
        with jax.named_scope("kv_write"):
            layer = write(layer, slots, k, v)
        with jax.named_scope("tree_attention"):
            out = tree_attention(
                q, layer.k, layer.v, page_table, length, visible, positions, inflight_positions,
                scale=scale, window=window, sink=sink, softcap=softcap,
            )  # fmt: skip
        return out, layer

    return attend


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
