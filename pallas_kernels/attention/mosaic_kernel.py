"""The kernel of tree attention for Pallas' Mosaic GPU back end: what one program does (`attention.mosaic` starts them).

The work is cut into (kv head, row tile, split, sequence). Keys and values arrive by TMA, one copy per page and head, in rings
of `num_stages` blocks; the products are wgmma, a warpgroup's of 64 rows. A warpgroup of its own asks for the copies, each of
which takes a multiprocessor 80 ns, so that the first block is at work while the last ones are asked for; it reads the table
of pages a block ahead. What works on one piece:

* a warpgroup, or two of 128 rows in all that share the blocks (wide trees); or
* W = `splits` * `cluster` * `readers` warpgroups for the same 64 rows: one or two to a program, each with a ring of its own,
  in clusters of programs. They deal the blocks out among them: block i is worker i % W's, whatever the length, so that all
  work on a table that is far longer than its sequence, and a row's result does not depend on the length. Each program of a
  cluster adds up some of the channels of all its programs (`mosaic_merge`).

A worker begins with its last block, the one that may need a mask: while it does, the others arrive. A split that is alone
writes the result to its place; several are merged by a second kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.inflight import last_slot
from pallas_kernels.attention.merge_splits import MASKED
from pallas_kernels.attention.mosaic_mask import Mask
from pallas_kernels.attention.mosaic_merge import LOG2E, WARPGROUP_ROWS, Exchange, divide, give, join, over
from pallas_kernels.tilings import Tiling


class Operands(NamedTuple):
    """What a program reads, in global memory.

    Attributes:
      q: [B, K, rows, Dk], or [B, T, H, Dk] with `Case.tokens`.
      k, v: [P, S, K, Dk] and [P, S, K, Dv].
      table: [B, N].
      length: [B].
      words: [B, A, rows], a bit for each slot in flight.
      used: [B, A], what any row sees.
      position: [B, rows].
      nearest: [B], lowest position of any row.
    """

    q: Any
    k: Any
    v: Any
    table: Any
    length: Any
    words: Any
    used: Any
    position: Any
    nearest: Any


class Results(NamedTuple):
    """What a program writes, in global memory.

    Attributes:
      out: [B, splits, K, rows, Dv] in float32; of a single split [B, T, H, Dv] with `Case.tokens`, else [B, K, rows, Dv] in
        float32.
      lse: [B, splits, K, rows]; None of a single split.
      sums, tops: interpreted clusters exchange their sums here: [B, splits, tiles, K, cluster, 64, Dv] in float32, and
        [B, splits, tiles, K, cluster, 64]; None elsewhere.
    """

    out: Any
    lse: Any
    sums: Any
    tops: Any


class Scratch(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
      q: the queries of each warpgroup.
      ring_or_sums: one memory for two times: (keys, values), then (what a reader gives, results, a cluster's sums, tops).
      weights: of each warpgroup, where interpreted; else None.
      q_ready: queries are there.
      k_ready, v_ready: a block is there.
      k_free, v_free: all have read a block.
      clean: of a shared block nothing is left that nobody sees.
      drained: all blocks are read.
      joined: one reader has given its sums to the other.
      shown, taken: a cluster's sums are there, and are read.
    """

    q: Any
    ring_or_sums: tuple
    weights: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    clean: Any
    drained: Any
    joined: Any
    shown: Any
    taken: Any


@dataclasses.dataclass(frozen=True)
class Case:
    """What a call is like, beside its tiling.

    Attributes:
      T: tokens.
      G: query heads of a kv head.
      num_inflight: M, entries in flight.
      causal: rows see the entries up to their own; no tree.
      tokens: of a warpgroup, where queries and results lie by token (`mosaic.tile_tokens`); None: they lie by kv head.
      sharing: warpgroups, of different rows, that share the blocks.
      interpreted: on a CPU: neither operands in registers nor a neighbour's memory.
      scale, window, sink, softcap: see `reference.tree_attention`.
    """

    T: int
    G: int
    num_inflight: int
    causal: bool
    tokens: int | None
    sharing: int
    interpreted: bool
    scale: float
    window: int | None
    sink: int
    softcap: float | None


def attention(*references: Any, tiling: Tiling, case: Case) -> None:
    """One program, from the references of `Operands`, `Results` and `Scratch`, one after another."""
    read = len(Operands._fields)
    written = read + len(Results._fields)
    program(Operands(*references[:read]), Results(*references[read:written]), Scratch(*references[written:]), tiling, case)


def program(operands: Operands, results: Results, scratch: Scratch, tiling: Tiling, case: Case) -> None:
    """A piece of the rows of a kv head against the blocks of a split."""
    block, stages, readers, cluster = tiling.block, tiling.num_stages, tiling.readers, tiling.cluster
    T, G, tokens, sharing = case.T, case.G, case.tokens, case.sharing
    scale, window, softcap = case.scale, case.window, case.softcap
    direct = tiling.splits == 1
    b, part, tile, head = (lax.axis_index(a) for a in ("batch", "split", "tile", "kv_head"))
    wg = lax.axis_index("wg")
    group, reader = (wg, jnp.int32(0)) if readers == 1 else (jnp.int32(0), wg)
    peer = lax.axis_index("peer") if cluster > 1 else jnp.int32(0)
    workers = tiling.splits * cluster * readers
    (k_smem, v_smem), (spare, stage, sums, tops) = scratch.ring_or_sums
    R, Dv, consumers = WARPGROUP_ROWS, operands.v.shape[-1], sharing * readers
    S, N = operands.k.shape[1], operands.table.shape[1]
    num_slots = N * S
    pieces = max(1, block // S)  # copies a block
    length = operands.length[b]
    row_end = jnp.minimum(divide((tile + 1) * (R * sharing) + (G - 1), G), T)
    stop = last_slot(length, row_end, causal=case.causal, M=case.num_inflight, T=T, num_slots=num_slots)
    blocks = divide(stop + (block - 1), block)
    near = sinks = jnp.int32(0)
    lowest = jnp.int32(0)
    if window is not None:
        lowest = jnp.minimum(jnp.maximum(operands.nearest[b] - (window - 1), 0), length)
        near = jnp.minimum(divide(lowest, block), blocks)
        sinks = jnp.minimum(-(-min(case.sink, num_slots) // block), near)

    def turns(reader):
        """A reader's blocks: (how many of the first n are its own, its number of steps, each step's first slot)."""
        worker = (part * cluster + peer) * readers + reader

        def own(n):
            return n if workers == 1 else divide(n + (workers - 1) - worker, workers)

        its_near, its_sinks = (own(near), own(sinks)) if window is not None else (0, 0)
        steps = its_sinks + own(blocks) - its_near

        def first_slot(i):
            i = steps - 1 - i
            i = i if window is None else jnp.where(i < its_sinks, i, its_near + i - its_sinks)
            return (i * workers + worker) * block

        return own, steps, first_slot

    def in_ring(reader, i):
        slot = lax.rem(i, jnp.int32(stages))
        return slot if readers == 1 else reader * stages + slot

    def fetch_queries():
        for group in range(sharing):
            rows = pl.ds((tile * sharing + group) * R, R)  # may reach beyond the rows of q
            if tokens is None:
                plgpu.copy_gmem_to_smem(operands.q.at[b, head, rows], scratch.q.at[group], scratch.q_ready.at[group])
            for g in range(G) if tokens is not None else ():
                its_tokens = pl.ds((tile * sharing + group) * tokens, tokens)
                there = scratch.q.at[group, pl.ds(g * tokens, tokens)]
                plgpu.copy_gmem_to_smem(operands.q.at[b, its_tokens, head * G + g], there, scratch.q_ready.at[group])

    def produce():
        if not case.interpreted and consumers == 2:
            plgpu.set_max_registers(40, action="decrease")
        all_turns = [turns(reader) for reader in range(readers)]
        size = min(S, block)

        def pages_of(i):
            first = [divide(first_slot(i), S) for _, _, first_slot in all_turns]
            return [[operands.table[b, jnp.clip(f + j, 0, N - 1)] for j in range(pieces)] for f in first]

        def fetch(i, pages):
            following = pages_of(i + 1)
            for reader, (_, steps, first_slot) in enumerate(all_turns):
                slot = in_ring(reader, i)
                inside = pl.ds(0, S) if size == S else pl.ds(lax.rem(first_slot(i), jnp.int32(S)), size)

                @pl.when(i < steps)
                def _(reader=reader, slot=slot, inside=inside):
                    for source, target, ready, free in (
                        (operands.k, k_smem, scratch.k_ready, scratch.k_free),
                        (operands.v, v_smem, scratch.v_ready, scratch.v_free),
                    ):
                        pl.when(i >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                        for j, page in enumerate(pages[reader]):
                            here = target.at[slot, pl.ds(j * size, size)]
                            plgpu.copy_gmem_to_smem(source.at[page, inside, head], here, ready.at[slot])

                if reader == 0:
                    pl.when(i == 0)(fetch_queries)
            return following

        most = functools.reduce(jnp.maximum, [steps for _, steps, _ in all_turns])
        lax.fori_loop(jnp.int32(0), most, fetch, pages_of(jnp.int32(0)))

    def consume():
        if not case.interpreted and consumers == 2:
            plgpu.set_max_registers(232, action="increase")
        leads = group == 0
        own, steps, first_slot = turns(reader)
        rows = pl.ds((tile * sharing + group) * R, R)
        position = None
        if window is not None:
            position = plgpu.load(operands.position.at[b, rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        mask = Mask(operands.words, operands.used, b, rows, length, position, lowest, window, case.sink, block)
        pl.when(steps > 0)(functools.partial(plgpu.barrier_wait, scratch.q_ready.at[group]))

        def attend(i, carry, masked):
            acc, m, total = carry
            slot = in_ring(reader, i)
            first = first_slot(i)
            indices = mask.indices(first)
            words = mask.words_of_rows(indices) if masked else []  # arrive while the products run
            plgpu.barrier_wait(scratch.k_ready.at[slot])

            def product(ref):
                plgpu.wgmma(ref, scratch.q.at[group], k_smem.at[slot].T)
                return ref[...]

            scores = pl.run_scoped(product, plgpu.ACC((R, block), jnp.float32))
            scores = scores * (scale * LOG2E) if softcap is None else softcap * LOG2E * jnp.tanh(scores * (scale / softcap))
            plgpu.barrier_arrive(scratch.k_free.at[slot])
            if masked:
                allowed = mask.by_row(first, words)
                scores = jnp.where(allowed, scores, MASKED)
            m_new = jnp.maximum(m, scores.max(axis=1))
            p = jnp.exp2(scores - over(m_new, block))
            if masked:
                p = jnp.where(allowed, p, 0.0)
            alpha = jnp.exp2(m - m_new)
            # The barrier keeps the rounding in pairs: LLVM would round each number alone, in the unit that also has exp2 to do.
            weights = lax.optimization_barrier(p.astype(operands.v.dtype))
            total = total * alpha + weights.astype(jnp.float32).sum(axis=1)  # normalises what is really multiplied
            acc = acc * over(alpha, Dv)
            plgpu.barrier_wait(scratch.v_ready.at[slot])
            if masked:  # 0 * NaN is NaN: what nobody sees must be zero before the product
                if sharing == 1:
                    scrub(slot, first, indices)
                else:

                    @pl.when(leads)
                    def _():
                        scrub(slot, first, indices)
                        plgpu.barrier_arrive(scratch.clean.at[slot])

                    plgpu.barrier_wait(scratch.clean.at[slot])

            if not case.interpreted:

                def add(ref):
                    plgpu.wgmma(ref, weights, v_smem.at[slot])

                acc = pl.run_state(add)(plgpu.ACC.init(acc))
            else:  # what interpret mode can run
                scratch.weights[wg] = weights
                plgpu.commit_smem()

                def product(ref):
                    plgpu.wgmma(ref, scratch.weights.at[wg], v_smem.at[slot])
                    return ref[...]

                acc = acc + pl.run_scoped(product, plgpu.ACC((R, Dv), jnp.float32))

            plgpu.barrier_arrive(scratch.v_free.at[slot])
            return acc, m_new, total

        def scrub(slot, first, indices):
            kept = mask.by_any(first, indices, Dv)
            value = plgpu.load(v_smem.at[slot], layout=plgpu.Layout.WGMMA, optimized=False)
            v_smem[slot] = jnp.where(kept, value, jnp.zeros_like(value))
            plgpu.commit_smem()

        def per_row(x):
            return plgpu.layout_cast(jnp.full((R,), x, jnp.float32), plgpu.Layout.WGMMA.reduce(1))

        acc = plgpu.layout_cast(jnp.zeros((R, Dv), jnp.float32), plgpu.Layout.WGMMA)
        carry = (acc, per_row(MASKED), per_row(0.0))
        full = jnp.int32(0) if window is not None else own(jnp.minimum(divide(length, block), blocks))
        carry = lax.fori_loop(jnp.int32(0), steps - full, functools.partial(attend, masked=True), carry)
        if window is None:
            carry = lax.fori_loop(steps - full, steps, functools.partial(attend, masked=False), carry)
        acc, m, total = carry

        if workers > 1 or (direct and tokens is not None):  # the ring's memory is used for something else from here on
            plgpu.barrier_arrive(scratch.drained)
            plgpu.barrier_wait(scratch.drained)
        if readers == 1:
            finish(acc, m, total)
        else:
            pl.when(reader == 1)(lambda: give(acc, m, total, spare, scratch.joined))
            pl.when(reader == 0)(lambda: finish(*join(acc, m, total, spare, scratch.joined)))

    def finish(acc, m, total):
        empty = total == 0.0
        safe = jnp.where(empty, 1.0, total)
        acc = acc / over(safe, Dv)
        lse = jnp.where(empty, MASKED, m + jnp.log(safe) * LOG2E)
        width, rows = Dv // cluster, pl.ds((tile * sharing + group) * R, R)
        columns = pl.ds(peer * width, width)
        if cluster > 1:
            at = (b, part, tile, head)
            hbm = (results.sums.at[at], results.tops.at[at]) if case.interpreted else None
            acc, lse = Exchange(sums, tops, hbm, scratch.shown, peer, cluster)(acc, lse)
        acc = acc.astype(results.out.dtype)
        if not direct:
            results.out[b, part, head, rows, columns] = acc

            @pl.when(peer == 0)
            def _():
                results.lse[b, part, head, rows] = lse
        elif tokens is None:
            results.out[b, head, rows, columns] = acc
        else:
            stage[group] = acc
        plgpu.commit_smem()
        if cluster > 1:  # nobody leaves before all have read its sums
            plgpu.barrier_arrive(scratch.taken)
        if direct and tokens is not None:
            its_tokens = pl.ds((tile * sharing + group) * tokens, tokens)  # visibly a multiple of eight
            for g in range(G):
                there = results.out.at[b, its_tokens, head * G + g, columns]
                plgpu.copy_smem_to_gmem(stage.at[group, pl.ds(g * tokens, tokens)], there)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if cluster > 1:
            plgpu.barrier_wait(scratch.taken)

    def body():
        pl.when(wg == consumers)(produce)
        pl.when(wg < consumers)(consume)

    if direct:
        body()
    else:
        pl.when(part * (cluster * readers) < blocks)(body)
