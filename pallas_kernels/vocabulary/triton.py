"""The few largest of a vocabulary's logits, in two kernels: each program those of a chunk, then one program a row the rest.

XLA's `top_k` sorts, and its argmax, once for each of the k, is two kernels a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.shaped import Shaped
from pallas_kernels.tilings import MULTIPROCESSORS
from pallas_kernels.triton_blocks import whole

MOST = 16  # so many passes over registers
CHUNK = 4096  # values of a program
NONE = 2**31 - 1  # the index of what has been taken


def serves(values: Shaped, k: int) -> bool:
    """Whether the kernels take the case: float32, a few of many."""
    return k <= MOST and values.shape[-1] >= 2048 and values.dtype == jnp.float32


def _largest(values: Array, index: Array, k: int) -> tuple[Array, Array]:
    """The k largest [lanes] and their indices, largest first, ties towards the lower index; lanes behind k hold nothing."""
    lane = jnp.arange(pl.next_power_of_2(k))
    best, where = jnp.full(lane.shape, -jnp.inf), jnp.full(lane.shape, NONE)
    for i in range(k):
        top = jnp.max(values)
        at = jnp.min(jnp.where(values == top, index, NONE))
        best, where = jnp.where(lane == i, top, best), jnp.where(lane == i, at, where)
        taken = index == at
        values, index = jnp.where(taken, -jnp.inf, values), jnp.where(taken, NONE, index)
    return best, where


def top_k(
    values: Float[Array, "R V"], k: int, *, interpret: bool = False
) -> tuple[Float[Array, "R K"], Int[Array, "R K"], Float[Array, " R"]]:
    """The k largest values, their indices, largest first, ties towards the lower index, and what a softmax divides by.

    Args:
      values: in float32; what is not a number has no place in the order.
      k: at most `MOST` and V.
      interpret: run on a CPU.

    Returns:
      Values, indices, and the sum of exp(value - largest value) over a row.
    """
    R, V = values.shape
    chunk = CHUNK if R * -(-V // CHUNK) >= MULTIPROCESSORS else CHUNK // 2
    chunks, wide = -(-V // chunk), pl.next_power_of_2(k)
    candidates = pl.next_power_of_2(chunks * wide)

    def of_chunk(values_ref, best_ref, where_ref, mass_ref):
        row, part = pl.program_id(0), pl.program_id(1)
        index = part * chunk + jnp.arange(chunk)
        found = plt.load(values_ref.at[row, jnp.minimum(index, V - 1)], mask=index < V, other=-jnp.inf)
        best, where = _largest(found, index, k)
        slot = part * wide + jnp.arange(wide)
        plt.store(best_ref.at[row, slot], best)
        plt.store(where_ref.at[row, slot], where)
        top = jnp.max(found)
        mass_ref[row, part] = jnp.sum(jnp.exp(found - jnp.where(top > -jnp.inf, top, 0)))

    def of_row(best_ref, where_ref, mass_ref, top_ref, index_ref, sum_ref):
        row, at = pl.program_id(0), jnp.arange(candidates)
        exists, slot = at < chunks * wide, jnp.minimum(at, chunks * wide - 1)
        found = plt.load(best_ref.at[row, slot], mask=exists, other=-jnp.inf)
        best, where = _largest(found, plt.load(where_ref.at[row, slot], mask=exists, other=NONE), k)
        lane = jnp.arange(wide)
        # Lanes behind k lie outside the arrays: interpreted stores drop these, while masked ones collide.
        plt.store(top_ref.at[row, lane], best, mask=lane < k)
        plt.store(index_ref.at[row, lane], jnp.minimum(where, V - 1), mask=lane < k)
        part = jnp.arange(pl.next_power_of_2(chunks))
        exists, slot = part < chunks, jnp.minimum(part, chunks - 1)
        top = plt.load(best_ref.at[row, slot * wide], mask=exists, other=-jnp.inf)
        mass = plt.load(mass_ref.at[row, slot], mask=exists, other=0)
        sum_ref[row] = jnp.sum(jnp.where(exists, mass * jnp.exp(top - jnp.max(found)), 0))

    def call(kernel, grid, shapes, warps, *inputs):
        shapes = [jax.ShapeDtypeStruct(*s) for s in shapes]
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[whole(x) for x in inputs],
            out_specs=[whole(x) for x in shapes],
            out_shape=shapes,
            compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
            interpret=interpret,
            name="top_k",
        )(*inputs)

    slots = (R, chunks * wide)
    found = call(of_chunk, (R, chunks), [(slots, jnp.float32), (slots, jnp.int32), ((R, chunks), jnp.float32)], 4, values)
    results = [((R, k), jnp.float32), ((R, k), jnp.int32), ((R,), jnp.float32)]
    return tuple(call(of_row, (R,), results, 1 if candidates <= 128 else 4, *found))
