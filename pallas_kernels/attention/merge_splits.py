"""Adding up the splits of tree attention, for both back ends: a Triton kernel behind theirs (Dao et al., Flash-Decoding)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.triton_blocks import whole

MASKED = -1e30  # finite: a row that has seen nothing yet must give exp2(0), not NaN
MOST_SPLITS = 32  # that a program reads at once
EAGER_PROGRAMS = 512  # most programs that do not wait for the length
WARPS = 1  # all of a sum in one thread


def channel_chunks(size: int) -> tuple[tuple[int, int], ...]:
    """A head size as (offset, power of two) pieces: 192 is 128 + 64. Triton's blocks are powers of two."""
    chunks, offset = [], 0
    while offset < size:
        piece = 1 << ((size - offset).bit_length() - 1)
        chunks.append((offset, piece))
        offset += piece
    return tuple(chunks)


def merge_splits(
    part: Float[Array, "B splits R Dv"],
    lse: Float[Array, "B splits R"],
    length: Int[Array, " B"],
    positions: Int[Array, "B T"],
    dtype,
    *,
    H: int,
    row: Callable[[Array, Array], Array],
    written: Callable[..., Bool[Array, "..."]],
    interpret: bool,
) -> Float[Array, "B T H Dv"]:
    """The splits' normalised sums, weighted by their log-sum-exp in base 2.

    Args:
      part, lse: a row of each split for every token and head; `MASKED` where it saw nothing.
      length: committed tokens.
      positions: of the tokens.
      dtype: of the result.
      H: heads.
      row: (token, head) → row.
      written: (split [S], token, length, position) → whether that split has written that token's row; all others may hold
        anything.
      interpret: run on a CPU.
    """
    (B, splits, _, Dv), T = part.shape, positions.shape[1]
    chunk = min(MOST_SPLITS, pl.next_power_of_2(splits))
    # With few programs the wait counts, not the bytes: read before the length is known, drop what nobody wrote afterwards.
    eager = chunk >= splits and B * H * T <= EAGER_PROGRAMS

    def kernel(part_ref, lse_ref, length_ref, position_ref, out_ref):
        h, t, b = (pl.program_id(i) for i in range(3))
        at, length, position = row(t, h), length_ref[b], position_ref[b, t]

        def add(i, carry):
            accs, top, total = carry
            split = i * chunk + jnp.arange(chunk)
            exists = split < splits
            live = exists & written(split, t, length, position)
            wanted, split = exists if eager else live, jnp.minimum(split, splits - 1)
            own = jnp.where(live, plt.load(lse_ref.at[b, split, at], mask=wanted, other=MASKED), MASKED)
            new_top = jnp.maximum(top, own.max())
            weight = jnp.where(own > MASKED, jnp.exp2(own - new_top), 0.0)
            alpha = jnp.exp2(top - new_top)
            sums = []
            for (offset, size), acc in zip(channel_chunks(Dv), accs, strict=True):
                channel = offset + jnp.arange(size)[None]
                value = plt.load(part_ref.at[b, split[:, None], at, channel], mask=wanted[:, None], other=0.0)
                value = jnp.where(live[:, None], value, 0.0)  # what nobody wrote may be NaN
                sums.append(acc * alpha + (weight[:, None] * value).sum(axis=0))
            return tuple(sums), new_top, total * alpha + weight.sum()

        zero = tuple(jnp.zeros((size,), jnp.float32) for _, size in channel_chunks(Dv))
        carry, count = (zero, jnp.float32(MASKED), jnp.float32(0.0)), -(-splits // chunk)
        accs, _, total = add(0, carry) if count == 1 else lax.fori_loop(0, count, add, carry)
        total = jnp.where(total == 0.0, 1.0, total)
        for (offset, size), acc in zip(channel_chunks(Dv), accs, strict=True):
            plt.store(out_ref.at[b, t, h, offset + jnp.arange(size)], (acc / total).astype(dtype))

    arrays, out = (part, lse, length, positions), jax.ShapeDtypeStruct((B, T, H, Dv), dtype)
    return pl.pallas_call(
        kernel,
        grid=(H, T, B),
        in_specs=[whole(x) for x in arrays],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="tree_attention_merge",
    )(*arrays)
