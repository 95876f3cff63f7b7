"""Mixtures of experts: softmax routing (Qwen3-MoE), DeepSeek's routing within groups, shared experts.

Every expert runs and unchosen ones weigh 0, so a row's result does not depend on which other rows share the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig, MoEConfig
from jaxspec.models.layers import activation, dense, gated_mlp


def moe_shapes(config: ModelConfig) -> dict:
    """Shapes of a mixture of experts: experts stacked in front (X), gate and up fused."""
    moe, E = config.moe, config.hidden_size
    X, F, shared = moe.num_experts, moe.ffn_size, moe.shared_ffn_size
    router = {"kernel": (E, X)}
    if moe.scoring == "sigmoid":
        router["correction_bias"] = (X,)
    shapes = {"router": router, "experts": {"gate_up": {"kernel": (X, E, 2 * F)}, "down": {"kernel": (X, F, E)}}}
    if shared:
        shapes["shared"] = {"gate_up": {"kernel": (E, 2 * shared)}, "down": {"kernel": (shared, E)}}
    if moe.shared_gate:
        shapes["shared_gate"] = {"kernel": (E, 1)}
    return shapes


def mixture_of_experts(x: Float[Array, "B T E"], params: dict, config: ModelConfig) -> Float[Array, "B T E"]:
    """The chosen experts' outputs, weighted, plus the shared experts' (with a sigmoid gate in Qwen3-Next)."""
    chosen, weights = route(x, params["router"], config.moe)
    combine = jnp.sum(jax.nn.one_hot(chosen, config.moe.num_experts) * weights[..., None], axis=-2).astype(x.dtype)
    out = run_experts(x, params["experts"], combine, config.activation)
    if "shared" in params:
        shared = gated_mlp(x, params["shared"], config.activation)
        if "shared_gate" in params:
            shared = shared * jax.nn.sigmoid(dense(x, params["shared_gate"]))
        out = out + shared
    return out


def route(x: Float[Array, "B T E"], router: dict, moe: MoEConfig) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
    """Which experts a row takes and with which weights, in float32.

    With groups only experts of the best `num_groups_per_token` groups can be chosen; a group counts as its best expert
    (DeepSeek-V2, section 2.2.2) or as the sum of its two best (DeepSeek-V3, section 2.1.2). V3's correction bias takes
    part in choosing but not in weighing.
    """
    sigmoid = moe.scoring == "sigmoid"
    # DeepSeek-V3 routes in float32: its scores lie close together.
    logits = dense(x.astype(jnp.float32) if sigmoid else x, {"kernel": router["kernel"]}).astype(jnp.float32)
    scores = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits, axis=-1)
    choice = scores + router["correction_bias"].astype(jnp.float32) if sigmoid else scores
    if moe.num_groups > 1:
        grouped = choice.reshape(*choice.shape[:-1], moe.num_groups, -1)
        best = jax.lax.top_k(grouped, 1 if moe.group_score == "max" else 2)[0].sum(-1)
        groups = jax.lax.top_k(best, moe.num_groups_per_token)[1]
        allowed = jax.nn.one_hot(groups, moe.num_groups, dtype=bool).any(-2)
        choice = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)
    chosen = jax.lax.top_k(choice, moe.num_experts_per_token)[1]
    weights = jnp.take_along_axis(scores, chosen, -1)
    if moe.normalize_weights:
        weights = weights / weights.sum(-1, keepdims=True)
    return chosen, weights * moe.routed_scale


def run_experts(x: Float[Array, "B T E"], experts: dict, combine: Float[Array, "B T X"], act: str) -> Float[Array, "B T E"]:
    """Σ over experts of their weight times their gated MLP."""
    gate, up = jnp.split(jnp.einsum("BTE,XEF->BTXF", x, experts["gate_up"]["kernel"].astype(x.dtype)), 2, axis=-1)
    hidden = activation(act, gate) * up * combine[..., None]
    return jnp.einsum("BTXF,XFE->BTE", hidden, experts["down"]["kernel"].astype(x.dtype))
