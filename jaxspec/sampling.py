"""Sampling: the parameters of a batch, the one logits pipeline, target probabilities and seeded random numbers.

The pipeline is the same for the last position of a prefill, for plain decoding and for every node of a draft tree: a
node sees the penalties that it would see if its drafted ancestors had been emitted one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, Key, UInt32

from jaxspec.config import ConfigError
from jaxspec.pytree import pytree
from jaxspec.sampling_params import CLASSES, FULL, GREEDY, SamplingParams, sampling_class
from jaxspec.trees.tree import DraftTree, unpack_bits

FLOOR = -1e30
"""Takes the place of NaN and -inf in raw logits: no mass beside any sound logit, yet above a banned token's -inf, so that
a row of NaN still yields a token that the grammar allows."""

DRAFT, ACCEPT, FINAL, NOISE = 1, 2, 3, 4
"""Tags folded into a round's key: drawing drafts, the verifier's coins, the correction or bonus draw, UNO's noise."""


MAX_STOP_IDS = 16
"""Stop ids that a request may have: their array has this width in every program."""
MAX_BIASES = 512
"""Entries that a request's logit_bias may have."""


@pytree(static=("of_class",))
class SamplingState:
    """The sampling parameters of a batch, one row per sequence; see `SamplingParams` for their meaning.

    Attributes:
      top_k: -1 where all tokens stay.
      temperature: 1 in greedy rows, which ignore it.
      bias_ids, bias_values: logit_bias as pairs; id -1 where there is none.
      stop_ids: padded with -1.
      ignore_eos: rows that stop ids do not end.
      of_class: static, one of `CLASSES`: what a program that gets this state computes.
    """

    temperature: Float[Array, " B"]
    top_k: Int32[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    presence_penalty: Float[Array, " B"]
    frequency_penalty: Float[Array, " B"]
    min_new_tokens: Int32[Array, " B"]
    greedy: Bool[Array, " B"]
    bias_ids: Int32[Array, "B biases"]
    bias_values: Float[Array, "B biases"]
    stop_ids: Int32[Array, "B stops"]
    ignore_eos: Bool[Array, " B"]
    of_class: str = FULL

    @property
    def any_sampled(self) -> bool:
        """Whether rows may sample; False lets a program leave that out."""
        return self.of_class != GREEDY

    @property
    def is_full(self) -> bool:
        """Whether rows may have penalties, biases or min_new_tokens."""
        return self.of_class == FULL

    def at_class(self, of_class: str) -> SamplingState:
        """The same rows for a program of another class."""
        return dataclasses.replace(self, of_class=of_class)


def largest_class(classes: Iterable[str]) -> str:
    """The class that serves all of these; greedy for none."""
    return max(classes, key=CLASSES.index, default=GREEDY)


def check_request(params: SamplingParams, vocab_size: int, stop_ids: Sequence[int]) -> None:
    """Raises ConfigError for what a request's row has no room for, or ids outside the vocabulary."""
    if len(params.logit_bias) > MAX_BIASES:
        raise ConfigError(f"logit_bias has {len(params.logit_bias)} entries; at most {MAX_BIASES} are possible")
    for token, _ in params.logit_bias:
        if token >= vocab_size:
            raise ConfigError(f"logit_bias names token id {token}, but the vocabulary has {vocab_size} tokens")
    if len(stop_ids) > MAX_STOP_IDS:
        raise ConfigError(f"{len(stop_ids)} stop ids (the model's own included) are given; at most {MAX_STOP_IDS} are possible")


def sampling_arrays(
    params: Sequence[SamplingParams], vocab_size: int, stop_ids: Sequence[Sequence[int]], ignore_eos: Sequence[bool]
) -> dict[str, np.ndarray]:
    """The fields of `SamplingState` as NumPy arrays; arguments and errors as for `sampling_state`."""
    rows = len(params)
    stops = np.full((rows, MAX_STOP_IDS), -1, np.int32)
    ids, values = np.full((rows, MAX_BIASES), -1, np.int32), np.zeros((rows, MAX_BIASES), np.float32)
    for i, (p, own) in enumerate(zip(params, stop_ids, strict=True)):
        check_request(p, vocab_size, own)
        stops[i, : len(own)] = own
        for j, (token, value) in enumerate(p.logit_bias):
            ids[i, j], values[i, j] = token, value

    def column(name: str, dtype) -> np.ndarray:
        return np.array([getattr(p, name) for p in params], dtype)

    return {
        "temperature": np.array([1.0 if p.is_greedy else p.temperature for p in params], np.float32),
        "top_k": np.array([min(p.top_k, vocab_size) for p in params], np.int32),
        "top_p": column("top_p", np.float32),
        "min_p": column("min_p", np.float32),
        "repetition_penalty": column("repetition_penalty", np.float32),
        "presence_penalty": column("presence_penalty", np.float32),
        "frequency_penalty": column("frequency_penalty", np.float32),
        "min_new_tokens": column("min_new_tokens", np.int32),
        "greedy": np.array([p.is_greedy for p in params], bool),
        "bias_ids": ids,
        "bias_values": values,
        "stop_ids": stops,
        "ignore_eos": np.array(ignore_eos, bool),
    }


def sampling_state(
    params: Sequence[SamplingParams], vocab_size: int, stop_ids: Sequence[Sequence[int]], ignore_eos: Sequence[bool]
) -> SamplingState:
    """Gathers the parameters of a batch into arrays (host code), for a program of the smallest class that serves them.

    Args:
      params: one per sequence.
      vocab_size: the target's; bounds the ids in logit_bias.
      stop_ids: the stop token ids of every sequence, at most `MAX_STOP_IDS` each.
      ignore_eos: whether a sequence runs on past them.

    Raises:
      ConfigError: an id in logit_bias is outside the vocabulary, or there are too many biases or stop ids.
    """
    arrays = sampling_arrays(params, vocab_size, stop_ids, ignore_eos)
    of_class = largest_class(map(sampling_class, params))
    return SamplingState(**{name: jnp.asarray(x) for name, x in arrays.items()}, of_class=of_class)


def row_keys(seeds: Sequence[int]) -> Key[Array, " B"]:
    """One random key per sequence from its seed alone (host code; all 64 bits of a seed count).

    The generator is always threefry: a counter-based one, whose numbers for a row do not depend on the other rows.
    """
    words = np.array([[(int(s) >> 32) & 0xFFFFFFFF, int(s) & 0xFFFFFFFF] for s in seeds], np.uint32).reshape(-1, 2)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def round_keys(keys: Key[Array, " B"], length: Int[Array, " B"]) -> Key[Array, " B"]:
    """The keys of one round: a function of (seed, committed length) only, never of the batch or of earlier rounds."""
    return jax.vmap(jax.random.fold_in)(keys, length.astype(jnp.uint32))


def tagged(keys: Key[Array, " B"], tag: int) -> Key[Array, " B"]:
    """Separates the uses of a round's keys; `tag` is DRAFT, ACCEPT, FINAL or NOISE."""
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, tag)


def coins(keys: Key[Array, " B"], num_nodes: int) -> tuple[Float[Array, "B T"], Float[Array, " B"]]:
    """Uniform numbers in [0, 1): one per tree node for acceptance, one per sequence for the final draw.

    A node's coin depends on the key and the node's index, not on how many nodes there are.
    """
    per_node = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)), in_axes=(0, None))
    nodes = per_node(tagged(keys, ACCEPT), jnp.arange(num_nodes, dtype=jnp.uint32))
    accept = jax.vmap(jax.vmap(partial(jax.random.uniform, dtype=jnp.float32)))(nodes)
    return accept, jax.vmap(partial(jax.random.uniform, dtype=jnp.float32))(tagged(keys, FINAL))


def process_logits(
    logits: Float[Array, "B T V"],
    sampling: SamplingState,
    tree: DraftTree,
    history: Int[Array, "B max_len"],
    history_length: Int[Array, " B"],
    prompt_length: Int[Array, " B"],
    allowed: UInt32[Array, "B T W"] | None = None,
) -> Float[Array, "B T V"]:
    """Raw target logits to the logits that tokens are chosen from, before temperature.

    In this order: NaN and infinities, presence and frequency penalties (output tokens), repetition penalty (prompt and
    output tokens), logit bias, min_new_tokens, grammar. What a node counts as output includes its drafted ancestors and
    itself, so that speculation gives what plain decoding gives.

    Args:
      logits: row t is what the target says behind node t.
      sampling: parameters of the rows.
      tree: the nodes; plain decoding and prefill pass `tree.root_only`.
      history: prompt and output, the root included.
      history_length: how many entries of `history` are real.
      prompt_length: how many of those are prompt.
      allowed: bit words over the vocabulary, one row per node: tokens that a grammar lets follow.

    Returns:
      float32; banned tokens are -inf, all others finite.
    """
    vocab = logits.shape[-1]
    logits = logits.astype(jnp.float32)
    logits = jnp.where(jnp.isnan(logits), FLOOR, jnp.clip(logits, FLOOR, -FLOOR))
    if sampling.is_full:
        logits = _penalize(logits, sampling, tree, history, history_length, prompt_length)
        inside = jnp.where(sampling.bias_ids >= 0, sampling.bias_ids, vocab)
        row = jnp.arange(logits.shape[0])[:, None]
        bias = jnp.zeros((logits.shape[0], vocab), jnp.float32).at[row, inside].add(sampling.bias_values, mode="drop")
        logits += bias[:, None]
        produced = (history_length - prompt_length)[:, None] + tree.depth
        early = produced < sampling.min_new_tokens[:, None]
        stops = _count(sampling.stop_ids, jnp.ones_like(sampling.stop_ids), vocab) > 0
        logits = jnp.where(early[..., None] & stops[:, None], -jnp.inf, logits)
    if allowed is not None:
        logits = jnp.where(unpack_bits(allowed, vocab), logits, -jnp.inf)
    return logits


def _count(ids: Int[Array, "B n"], weight: Int[Array, "B n"], vocab: int) -> Int[Array, "B V"]:
    """Sums `weight` per token id; ids outside the vocabulary count nowhere."""
    rows = jnp.arange(ids.shape[0])[:, None]
    inside = jnp.where((ids >= 0) & (ids < vocab), ids, vocab)
    return jnp.zeros((ids.shape[0], vocab), jnp.int32).at[rows, inside].add(weight, mode="drop")


def _penalize(logits, sampling, tree, history, history_length, prompt_length) -> Float[Array, "B T V"]:
    batch, nodes, vocab = logits.shape
    index = jnp.arange(history.shape[1])
    real = index < history_length[:, None]
    is_output = real & (index >= prompt_length[:, None])
    output = _count(history, is_output.astype(jnp.int32), vocab)[:, None]
    prompt = _count(history, (real & ~is_output).astype(jnp.int32), vocab)[:, None]
    if nodes > 1:
        # Column 0 is the root, which `history` holds already.
        path = unpack_bits(tree.ancestors, nodes).at[:, :, 0].set(False).astype(jnp.int32)
        ids = jnp.broadcast_to(tree.tokens[:, None], path.shape)
        drafted = _count(ids.reshape(-1, nodes), path.reshape(-1, nodes), vocab).reshape(batch, nodes, vocab)
        output = output + drafted

    def per_row(values):
        return values[:, None, None]

    logits -= per_row(sampling.frequency_penalty) * output + per_row(sampling.presence_penalty) * (output > 0)
    factor = per_row(sampling.repetition_penalty)
    return jnp.where((output + prompt) > 0, jnp.where(logits > 0, logits / factor, logits * factor), logits)


def probabilities(logits: Float[Array, "B T V"], sampling: SamplingState) -> Float[Array, "B T V"]:
    """The distribution that a sampled request draws from: temperature, then top_k, top_p, min_p, each renormalised.

    Cuts are found exactly by bisection on the bit patterns of floats, without sorting the vocabulary. Tokens tied with
    the last one kept are kept too. Greedy rows, and rows in which everything is banned, are one-hot at the argmax.

    Args:
      logits: from `process_logits`.
      sampling: parameters of the rows.

    Returns:
      float32.
    """
    peak = jnp.max(logits, -1, keepdims=True)
    sound = jnp.isfinite(peak)
    one_hot = jnp.arange(logits.shape[-1]) == jnp.argmax(logits, -1)[..., None]

    def per_row(values):
        return values[:, None, None]

    # Distance to the best logit: >= 0, so its bits order like the number itself. The peak goes first: dividing a huge
    # logit by a small temperature would overflow.
    gap = (jnp.where(sound, peak, 0.0) - logits) / per_row(sampling.temperature)
    mass = jnp.exp(-gap)
    if sampling.any_sampled:
        ones = jnp.ones_like(gap)
        top_k = per_row(sampling.top_k)
        active = (top_k > 0) & ~per_row(sampling.greedy)
        kept = _within(gap, ones, jnp.where(active, top_k.astype(jnp.float32), -1.0))
        mass = jnp.where(kept, mass, 0.0)
        active = (per_row(sampling.top_p) < 1) & ~per_row(sampling.greedy)
        needed = per_row(sampling.top_p) * jnp.sum(mass, -1, keepdims=True)
        mass = jnp.where(_within(gap, mass, jnp.where(active, needed, -1.0)), mass, 0.0)
        mass = jnp.where(mass >= per_row(sampling.min_p), mass, 0.0)  # the largest mass is exp(0) = 1
    probs = mass / jnp.sum(mass, -1, keepdims=True)
    return jnp.where(per_row(sampling.greedy) | ~sound, one_hot.astype(jnp.float32), probs)


_INFINITY_BITS = 0x7F800000


def _within(gap: Float[Array, "B T V"], weight: Float[Array, "B T V"], needed: Float[Array, "B _ 1"]) -> Bool[Array, "B T V"]:
    """The smallest ball ``gap <= r`` whose weight reaches `needed`; everything where `needed` is negative.

    Rounding cannot mislead the search: the sum runs in one fixed order and rounding is monotone in every term.
    """
    bits = jax.lax.bitcast_convert_type(gap, jnp.int32)
    needed = jnp.broadcast_to(needed, (*gap.shape[:-1], 1))
    active = needed >= 0

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        enough = jnp.sum(jnp.where(bits <= middle, weight, 0.0), -1, keepdims=True) >= needed
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    low = jnp.zeros(needed.shape, jnp.int32)
    high = jnp.full(needed.shape, _INFINITY_BITS, jnp.int32)
    _, radius = jax.lax.fori_loop(0, jnp.where(jnp.any(active), 31, 0), halve, (low, high))
    return (bits <= radius) | ~active
