"""Chains drawn from the draft's own distribution q, which rejection sampling and block verification need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.sampling import DRAFT, SamplingState, tagged
from jaxspec.trees.tree import DraftTree, chain

# (level, token [B], aux) -> (logits over the draft vocabulary [B,Vd], aux)
Extend = Callable[[int, Array, Any], tuple[Array, Any]]


def draw(
    logits: Float[Array, "B Vd"], keys: Key[Array, " B"], sampling: SamplingState
) -> tuple[Float[Array, "B Vd"], Int[Array, " B"]]:
    """q and one draw from it: softmax(logits / temperature), neither top_k nor top_p; greedy rows are one-hot.

    Args:
      logits: the draft's.
      keys: one per sequence, used for this draw only.
      sampling: the requests' temperatures.
    """
    logits = logits.astype(jnp.float32) / sampling.temperature[:, None]
    best = jnp.argmax(logits, -1)
    drawn = jax.vmap(jax.random.categorical)(keys, logits)
    one_hot = jax.nn.one_hot(best, logits.shape[-1])
    q = jnp.where(sampling.greedy[:, None], one_hot, jax.nn.softmax(logits, -1))
    return q, jnp.where(sampling.greedy, best, drawn).astype(jnp.int32)


def sampled_chain(
    root: Int[Array, " B"],
    first: Float[Array, "B Vd"],
    extend: Extend,
    aux: Any,
    keys: Key[Array, " B"],
    sampling: SamplingState,
    *,
    num_steps: int,
    vocab_size: int,
    target_ids: Int[Array, " Vd"] | None = None,
) -> tuple[DraftTree, Any]:
    """A chain of `num_steps` draws, with q over the target's vocabulary in ``draft_probs``.

    Args:
      root: the bonus token.
      first: draft logits behind it.
      extend: the draft behind one more token; not called for the last one.
      aux: the drafter's own state, threaded through.
      keys: the round's keys, one per sequence.
      sampling: the requests' parameters.
      num_steps: drafts.
      vocab_size: the target's vocabulary.
      target_ids: target id of every draft id, None where they are the same: q is scattered, other tokens have q = 0.
    """
    batch = root.shape[0]
    keys = tagged(keys, DRAFT)
    tokens, probs, logits = [root], [jnp.zeros((batch, vocab_size))], first
    for level in range(num_steps):
        q, token = draw(logits, jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, level), sampling)
        if target_ids is not None:
            token = target_ids[token]
            q = jnp.zeros((batch, vocab_size)).at[:, target_ids].set(q)
        tokens.append(token)
        probs.append(q)
        if level < num_steps - 1:
            logits, aux = extend(level, token, aux)
    return dataclasses.replace(chain(jnp.stack(tokens, 1)), draft_probs=jnp.stack(probs, 1)), aux
