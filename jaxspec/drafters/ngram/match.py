"""N-gram matching on the device: in a request's own tokens (prompt lookup, Saxena 2023; Yang et al. 2023, LLMA)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels import device

BLOCK = 512
"""Places that are compared at once."""


def suffix_tokens(tokens: Int[Array, "B L"], last: Int[Array, " B"], depth: int) -> Int[Array, "B D"]:
    """The last `depth` tokens up to and including index `last`, newest first; -1 where the text does not reach back."""
    index = last[:, None] - jnp.arange(depth)
    return jnp.where(index >= 0, jnp.take_along_axis(tokens, jnp.maximum(index, 0), 1), -1)


def match_lengths(
    window: Int[Array, "B D_minus_1_plus_W"], suffix: Int[Array, "B D"], alive: Bool[Array, "B W"]
) -> Int[Array, "B W"]:
    """How many tokens that end at each of W places equal the text's last ones, at most D.

    Args:
      window: the tokens at the places, behind the D - 1 before them.
      suffix: the text's last tokens, newest first (`suffix_tokens`).
      alive: places that count; the others give 0.
    """
    depth, places = suffix.shape[1], alive.shape[1]
    count = jnp.zeros(alive.shape, jnp.int32)
    for back in range(depth):
        shifted = jax.lax.slice_in_dim(window, depth - 1 - back, depth - 1 - back + places, axis=1)
        alive &= shifted == suffix[:, back, None]
        count += alive
    return count


def best_place(tokens: Int[Array, "B L"], last: Int[Array, " B"], depth: int) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Where a text already ended most like it ends now: the longest match, the most recent place among equals.

    The table is gone through in blocks up to the end of the longest text, so that a short text in a wide table costs little.
    On a GPU it is compared at once, which takes less than the turns of a loop would: they end its graphs.

    Args:
      tokens: the texts; entries behind `last` may hold anything.
      last: index of the newest token. Only places before it count.
      depth: the longest suffix that is compared.

    Returns:
      The place and the matched length; the table's last index and 0 where nothing matches.
    """
    size, block = tokens.shape[1], max(BLOCK, depth)
    suffix = suffix_tokens(tokens, last, depth)

    def best(window, first, width: int):
        place = first + jnp.arange(width)
        matched = match_lengths(window, suffix, place < last[:, None])
        return jnp.max(matched * size + place, axis=1)

    # A table hardly wider than a block is taken whole, so that the block at its end has `depth` tokens before it.
    width = size if size < block + depth or device.on_gpu() else block
    front = jnp.pad(tokens[:, :width], ((0, 0), (depth - 1, 0)), constant_values=-2)
    score = jnp.maximum(best(front, 0, width), size - 1)
    if width < size:

        def look(i, score):
            first = jnp.minimum(i * block, size - block)
            window = jax.lax.dynamic_slice_in_dim(tokens, first - (depth - 1), depth - 1 + block, axis=1)
            return jnp.maximum(score, best(window, first, block))

        score = jax.lax.fori_loop(1, -(-jnp.max(last) // block), look, score)
    return score % size, score // size


def match_own_tokens(
    tokens: Int[Array, "B L"], length: Int[Array, " B"], *, depth: int, num_drafts: int
) -> tuple[Int[Array, "B M"], Int[Array, " B"]]:
    """What followed the place where a request's text already ended most like it ends now.

    The longest matching suffix wins, the most recent place among equals. One matching token is enough: the tree has a fixed
    size, so that a poor guess costs as much as none (SmolLM2-135M, 15 answers: 1.77 tokens a round, 1.62 if two must
    match; giving a second place a part of the nodes changes it by less than 2 %). Where the continuation reaches the end of
    the text it goes on with what it has just drafted, so that text with a period is continued with this period.

    Args:
      tokens: prompt and output; valid up to and including index `length`, the bonus token. Anything may stand behind.
      length: committed tokens.
      depth: the longest suffix that is compared.
      num_drafts: M, tokens of the continuation.

    Returns:
      The continuation and the matched length, 0 where nothing matches.
    """
    place, matched = best_place(tokens, length, depth)
    period = jnp.maximum(length - place, 1)
    ahead = place[:, None] + 1 + jnp.arange(num_drafts) % period[:, None]
    path = jnp.take_along_axis(tokens, ahead, 1, mode="clip").astype(jnp.int32)
    return path, matched
