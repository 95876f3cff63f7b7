"""`forward`: logits and every feature of a model over whole sequences, without a cache: for parity work and inspection."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ConfigError
from jaxspec.models.attend import causal_attend
from jaxspec.models.decoder import FINAL_NORM, decode, embed, full_precision, unembed
from jaxspec.runtime import own_settings


class Forward(NamedTuple):
    """What `forward` gives; ``*B`` is empty when the tokens had no batch axis.

    ``hidden_states[0]`` enters layer 0 (embeddings, scaled), ``hidden_states[i]`` leaves layer i - 1: the residual stream.
    """

    logits: Float[Array, "*B T V"]
    hidden_states: Float[Array, "layers_plus_1 *B T E"]
    final_norm: Float[Array, "*B T E"]


@partial(jax.jit, static_argnums=0)
def _forward(config, tree, tokens: Int[Array, "B T"]) -> Forward:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    taps = (*range(config.num_layers + 1), FINAL_NORM)
    x = embed(tree, config, tokens)
    with full_precision(tree):
        out = decode(tree, config, x, positions, causal_attend(positions), (None,) * config.num_layers, taps)
        logits = unembed(tree, config, out.hidden)
    *hidden, final_norm = jnp.split(out.features, len(taps), axis=-1)
    return Forward(logits, jnp.stack(hidden), final_norm)


def forward(params, tokens) -> Forward:
    """Logits and features of every position, each seeing itself and what stands before it.

    Args:
      params: what `jaxspec.load` gives.
      tokens: token ids [T] or [B, T], no padding: all rows have the same length.

    Raises:
      ConfigError: no tokens, more than the model's context, or an id outside its vocabulary.
    """
    ids = jnp.asarray(tokens)
    config = params.config
    if ids.ndim not in (1, 2) or ids.size == 0 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ConfigError(f"tokens must be integer ids [T] or [B, T], not empty; got {ids.dtype} {list(ids.shape)}")
    if ids.shape[-1] > config.max_positions:
        raise ConfigError(f"{ids.shape[-1]} tokens exceed the model's context of {config.max_positions}")
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ConfigError(f"token ids must lie in 0 … {config.vocab_size - 1}; got {int(ids.min())} … {int(ids.max())}")
    with own_settings():
        out = _forward(config, params.tree, jnp.atleast_2d(ids).astype(jnp.int32))
    return out if ids.ndim == 2 else Forward(out.logits[0], out.hidden_states[:, 0], out.final_norm[0])
