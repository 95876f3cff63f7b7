"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): low-rank queries, one latent for keys and values.

The cache holds every head's expanded keys and values, so the paged attention contract of all models serves here too. In
elements per token that is H·(nope + rope + value) instead of the kv_rank + rope of the latent alone.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.config import ModelConfig
from jaxspec.models.layers import dense, rms_norm
from pallas_kernels.layer.api import apply_rope

LATENT_NORM_EPS = 1e-6
"""Both norms on the latents have it, whatever the model's own norms use (the published code passes them no epsilon)."""


def latent_attention_shapes(config: ModelConfig) -> dict:
    """Shapes of one layer's attention: down and up projections with a norm on each latent."""
    mla, E, H = config.mla, config.hidden_size, config.num_heads
    width = H * config.key_head_dim
    query = {"q": {"kernel": (E, width)}}
    if mla.query_rank is not None:
        query = {
            "q_down": {"kernel": (E, mla.query_rank)},
            "q_norm": {"scale": (mla.query_rank,)},
            "q_up": {"kernel": (mla.query_rank, width)},
        }
    return query | {
        "kv_down": {"kernel": (E, mla.kv_rank + mla.rope_head_dim)},
        "kv_norm": {"scale": (mla.kv_rank,)},
        "kv_up": {"kernel": (mla.kv_rank, H * (mla.nope_head_dim + mla.value_head_dim))},
        "out": {"kernel": (H * mla.value_head_dim, E)},
    }


def latent_attention(
    x: Float[Array, "B T E"], params: dict, config: ModelConfig, window: int | None, angles, attend, cache
) -> tuple[Float[Array, "B T E"], Any]:
    """Projections through the latents, rotary embedding of the decoupled part, attention, output projection.

    The rotary key is one for all heads; YaRN's correction of the softmax scale is part of `config.attention_scale`.
    """
    mla, (B, T, _), H = config.mla, x.shape, config.num_heads
    nope = mla.nope_head_dim
    if mla.query_rank is None:
        q = dense(x, params["q"])
    else:
        q = dense(rms_norm(dense(x, params["q_down"]), params["q_norm"], LATENT_NORM_EPS), params["q_up"])
    q = q.reshape(B, T, H, config.key_head_dim)
    latent, k_rope = jnp.split(dense(x, params["kv_down"]), [mla.kv_rank], axis=-1)
    kv = dense(rms_norm(latent, params["kv_norm"], LATENT_NORM_EPS), params["kv_up"])
    k_nope, v = jnp.split(kv.reshape(B, T, H, nope + mla.value_head_dim), [nope], axis=-1)

    interleaved = config.rope.interleaved
    q_rope = apply_rope(q[..., nope:], angles, interleaved)
    k_rope = apply_rope(k_rope[:, :, None], angles, interleaved)
    q = jnp.concatenate([q[..., :nope], q_rope], -1)
    k = jnp.concatenate([k_nope, jnp.broadcast_to(k_rope, (B, T, H, mla.rope_head_dim))], -1)
    out, cache = attend(cache, q, k, v, scale=config.attention_scale, window=window, softcap=config.attention_softcap)
    return dense(out.reshape(B, T, -1), params["out"]), cache
