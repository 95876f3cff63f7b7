"""What corrects a block's logits by the token before, and what estimates their acceptance: DSpark's heads, DFlash2's selector.

A block's base logits do not know what stands in the slots before. These heads add it, slot by slot, for any number of
predecessors at once, so that the same code drafts a chain and the levels of a tree.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.drafters.dflash.config import DFlashConfig
from jaxspec.models.layers import dense
from pallas_kernels.vocabulary.api import top_k


class Step(NamedTuple):
    """Continuations of K tokens at one slot.

    Attributes:
      logits: over the C candidates.
      ids: target ids of the candidates; None where they are draft ids in order.
      state: the recurrent head's state behind each token; [B, K, 0] for all others.
    """

    logits: Float[Array, "B K C"]
    ids: Int[Array, "B K C"] | None
    state: Float[Array, "B K r"]


def initial_state(config: DFlashConfig, batch: int) -> Float[Array, "B 1 r"]:
    """The state before the first slot."""
    return jnp.zeros((batch, 1, config.markov_rank if config.markov == "rnn" else 0))


def step(
    params: dict,
    config: DFlashConfig,
    hidden: Float[Array, "B E"],
    base: Float[Array, "B Vd"],
    previous: Int[Array, "B K"],
    state: Float[Array, "B K r"],
) -> Step:
    """What follows each of K tokens at the next slot.

    Args:
      params, config: the draft.
      hidden: the slot's output.
      base: its base logits (`dflash_model.logits`).
      previous: target ids of the tokens in the slot before.
      state: from `initial_state`, or of the step before, one for each token.
    """
    if config.markov is not None:
        bias, state = markov_bias(params["markov"], config.markov, hidden, previous, state)
        return Step(base[:, None] + bias, None, state)
    if config.selector_rank:
        return select(params["selector"], config.selector_top_k, hidden, base, previous, state)
    return Step(jnp.broadcast_to(base[:, None], (*previous.shape, base.shape[-1])), None, state)


def markov_bias(
    head: dict, kind: str, hidden: Float[Array, "B E"], previous: Int[Array, "B K"], state: Float[Array, "B K r"]
) -> tuple[Float[Array, "B K Vd"], Float[Array, "B K r"]]:
    """DSpark's correction (arXiv 2607.05147): a low-rank function of the token before, gated by the slot or recurrent."""
    x = head["predecessor"]["embedding"][previous].astype(hidden.dtype)
    slot = jnp.broadcast_to(hidden[:, None], (*previous.shape, hidden.shape[-1]))
    if kind == "gated":
        x = jax.nn.sigmoid(dense(jnp.concatenate([slot, x], -1), head["gate"])) * x
    elif kind == "rnn":
        joint = dense(jnp.concatenate([state.astype(x.dtype), x, slot], -1), head["joint"])
        gate, candidate, out = jnp.split(joint, 3, axis=-1)
        keep = jax.nn.sigmoid(gate)
        new = keep * state.astype(x.dtype) + (1 - keep) * jnp.tanh(candidate)
        x, state = jnp.tanh(out), new.astype(state.dtype)
    return dense(x, head["out"]).astype(jnp.float32), state


def select(
    head: dict,
    count: int,
    hidden: Float[Array, "B E"],
    base: Float[Array, "B V"],
    previous: Int[Array, "B K"],
    state: Float[Array, "B K r"],
) -> Step:
    """DFlash2's selector: the `count` best tokens of a slot, each scored with its predecessor. In the order of their ids."""
    _, ids = top_k(base, count)
    ids = jnp.sort(ids, axis=-1)
    unary = jnp.take_along_axis(base, ids, -1)
    query = head["predecessor"]["embedding"][previous].astype(hidden.dtype) * dense(hidden, head["hidden"])[:, None]
    keys = head["successor"]["embedding"][ids].astype(hidden.dtype)
    edges = jnp.einsum("BKr,BCr->BKC", query, keys).astype(jnp.float32)
    return Step(unary[:, None] + edges, jnp.broadcast_to(ids[:, None], edges.shape), state)


def confidence(
    params: dict, config: DFlashConfig, hidden: Float[Array, "B T E"], previous: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """The logit of DSpark's estimate that a draft is accepted, given that all before it were.

    Args:
      params, config: a draft with a confidence head.
      hidden: the outputs of the predicting slots.
      previous: the token before each draft.
    """
    x = hidden
    if config.confidence == "markov":
        table = params["markov"]["predecessor"]["embedding"]
        x = jnp.concatenate([x, table[previous].astype(x.dtype)], -1)
    return dense(x, params["confidence"])[..., 0].astype(jnp.float32)
