"""Tree attention for Pallas' Mosaic GPU back end (Hopper, jax 0.11.2 and later).

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

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.inflight import inflight_words, last_slot
from pallas_kernels.merge_splits import MASKED, merge_splits
from pallas_kernels.mosaic_mask import Mask
from pallas_kernels.mosaic_merge import LOG2E, WARPGROUP_ROWS, Exchange, divide, give, join, over
from pallas_kernels.tilings import Tiling

AVAILABLE = hasattr(plgpu, "InterpretGPUParams") and hasattr(plgpu, "cluster_ref")  # the API as of jax 0.11.2
REDUCTION_BYTES = 0  # a row lies within one warp; Mosaic's 2 KB would keep programs of three stages from sharing an SM


def serves(q: Array, k_pages: Array, v_pages: Array) -> bool:
    """Whether this kernel takes the case: 16-bit floats, head sizes in multiples of 32 up to 256, pages of 8 slots at least."""
    S, Dk, Dv = *k_pages.shape[1::2], v_pages.shape[-1]
    sizes = Dk % 32 == 0 and Dv % 32 == 0 and Dk <= 256 and Dv <= 256
    pages = S % 8 == 0 and (64 % S == 0 or S % 64 == 0)
    return sizes and pages and q.dtype == k_pages.dtype == v_pages.dtype and q.dtype in (jnp.bfloat16, jnp.float16)


def tile_tokens(G: int, Dv: int) -> int | None:
    """Tokens of a warpgroup whose queries are read as they lie, a copy for each of the G heads of a group.

    None: queries are regrouped by kv head first, because a copy must be of whole rows of eight, and the merge of whole rows.
    """
    return WARPGROUP_ROWS // G if WARPGROUP_ROWS % (8 * G) == 0 and Dv % 128 == 0 else None


def _tiled(shape: tuple, dtype):
    """Shared memory for blocks [..., rows, size]: in tiles of eight rows by one span of the swizzle, of 128 bytes at most."""
    bits = jnp.dtype(dtype).itemsize * 8
    span = plgpu.find_swizzle(shape[-1] * bits)
    transforms = (plgpu.TilingTransform((8, span * 8 // bits)), plgpu.SwizzleTransform(span)) if span >= 32 else ()
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _attention(
    q_hbm,  # [B, K, rows, Dk], or [B, T, H, Dk] with `tokens`
    k_hbm,  # [P, S, K, Dk]
    v_hbm,  # [P, S, K, Dv]
    table,  # [B, N]
    length_ref,  # [B]
    words_ref,  # [B, A, rows]
    used_ref,  # [B, A], what any row sees
    position_ref,  # [B, rows]
    nearest_ref,  # [B], lowest position of any row
    out_hbm,  # [B, splits, K, rows, Dv] float32, or direct: [B, T, H, Dv] with `tokens`, else [B, K, rows, Dv] float32
    lse_hbm,  # [B, splits, K, rows], none if direct
    sums_hbm,  # interpreted clusters exchange their sums here: [B, splits, tiles, K, cluster, 64, Dv] float32,
    tops_hbm,  # [B, splits, tiles, K, cluster, 64]
    q_smem,
    ring_or_sums,
    p_smem,
    q_ready,
    k_ready,
    v_ready,
    k_free,
    v_free,
    clean,
    drained,
    joined,
    shown,
    taken,
    *,
    block: int,
    stages: int,
    sharing: int,
    readers: int,
    cluster: int,
    splits: int,
    causal: bool,
    num_inflight: int,
    T: int,
    G: int,
    tokens: int | None,
    scale: float,
    window: int | None,
    sink: int,
    softcap: float | None,
    direct: bool,
    in_registers: bool,
):
    b, part, tile, head = (lax.axis_index(a) for a in ("batch", "split", "tile", "kv_head"))
    wg = lax.axis_index("wg")
    group, reader = (wg, jnp.int32(0)) if readers == 1 else (jnp.int32(0), wg)
    peer = lax.axis_index("peer") if cluster > 1 else jnp.int32(0)
    workers = splits * cluster * readers
    (k_smem, v_smem), (spare, stage, sums, tops) = ring_or_sums
    R, Dv, consumers = WARPGROUP_ROWS, v_hbm.shape[-1], sharing * readers
    S, N = k_hbm.shape[1], table.shape[1]
    num_slots = N * S
    pieces = max(1, block // S)  # copies a block
    length = length_ref[b]
    row_end = jnp.minimum(divide((tile + 1) * (R * sharing) + (G - 1), G), T)
    stop = last_slot(length, row_end, causal=causal, M=num_inflight, T=T, num_slots=num_slots)
    blocks = divide(stop + (block - 1), block)
    near = sinks = jnp.int32(0)
    lowest = jnp.int32(0)
    if window is not None:
        lowest = jnp.minimum(jnp.maximum(nearest_ref[b] - (window - 1), 0), length)
        near = jnp.minimum(divide(lowest, block), blocks)
        sinks = jnp.minimum(-(-min(sink, num_slots) // block), near)

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
                plgpu.copy_gmem_to_smem(q_hbm.at[b, head, rows], q_smem.at[group], q_ready.at[group])
            for g in range(G) if tokens is not None else ():
                its_tokens = pl.ds((tile * sharing + group) * tokens, tokens)
                there = q_smem.at[group, pl.ds(g * tokens, tokens)]
                plgpu.copy_gmem_to_smem(q_hbm.at[b, its_tokens, head * G + g], there, q_ready.at[group])

    def produce():
        if in_registers and consumers == 2:
            plgpu.set_max_registers(40, action="decrease")
        all_turns = [turns(reader) for reader in range(readers)]
        size = min(S, block)

        def pages_of(i):
            first = [divide(first_slot(i), S) for _, _, first_slot in all_turns]
            return [[table[b, jnp.clip(f + j, 0, N - 1)] for j in range(pieces)] for f in first]

        def fetch(i, pages):
            following = pages_of(i + 1)
            for reader, (_, steps, first_slot) in enumerate(all_turns):
                slot = in_ring(reader, i)
                inside = pl.ds(0, S) if size == S else pl.ds(lax.rem(first_slot(i), jnp.int32(S)), size)

                @pl.when(i < steps)
                def _(reader=reader, slot=slot, inside=inside):
                    for source, target, ready, free in ((k_hbm, k_smem, k_ready, k_free), (v_hbm, v_smem, v_ready, v_free)):
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
        if in_registers and consumers == 2:
            plgpu.set_max_registers(232, action="increase")
        leads = group == 0
        own, steps, first_slot = turns(reader)
        rows = pl.ds((tile * sharing + group) * R, R)
        position = None
        if window is not None:
            position = plgpu.load(position_ref.at[b, rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        mask = Mask(words_ref, used_ref, b, rows, length, position, lowest, window, sink, block)
        pl.when(steps > 0)(functools.partial(plgpu.barrier_wait, q_ready.at[group]))

        def attend(i, carry, masked):
            acc, m, total = carry
            slot = in_ring(reader, i)
            first = first_slot(i)
            indices = mask.indices(first)
            words = mask.words_of_rows(indices) if masked else []  # arrive while the products run
            plgpu.barrier_wait(k_ready.at[slot])

            def product(ref):
                plgpu.wgmma(ref, q_smem.at[group], k_smem.at[slot].T)
                return ref[...]

            scores = pl.run_scoped(product, plgpu.ACC((R, block), jnp.float32))
            scores = scores * (scale * LOG2E) if softcap is None else softcap * LOG2E * jnp.tanh(scores * (scale / softcap))
            plgpu.barrier_arrive(k_free.at[slot])
            if masked:
                allowed = mask.by_row(first, words)
                scores = jnp.where(allowed, scores, MASKED)
            m_new = jnp.maximum(m, scores.max(axis=1))
            p = jnp.exp2(scores - over(m_new, block))
            if masked:
                p = jnp.where(allowed, p, 0.0)
            alpha = jnp.exp2(m - m_new)
            # The barrier keeps the rounding in pairs: LLVM would round each number alone, in the unit that also has exp2 to do.
            weights = lax.optimization_barrier(p.astype(v_hbm.dtype))
            total = total * alpha + weights.astype(jnp.float32).sum(axis=1)  # normalises what is really multiplied
            acc = acc * over(alpha, Dv)
            plgpu.barrier_wait(v_ready.at[slot])
            if masked:  # 0 * NaN is NaN: what nobody sees must be zero before the product
                if sharing == 1:
                    scrub(slot, first, indices)
                else:

                    @pl.when(leads)
                    def _():
                        scrub(slot, first, indices)
                        plgpu.barrier_arrive(clean.at[slot])

                    plgpu.barrier_wait(clean.at[slot])

            if in_registers:

                def add(ref):
                    plgpu.wgmma(ref, weights, v_smem.at[slot])

                acc = pl.run_state(add)(plgpu.ACC.init(acc))
            else:  # what interpret mode can run
                p_smem[wg] = weights
                plgpu.commit_smem()

                def product(ref):
                    plgpu.wgmma(ref, p_smem.at[wg], v_smem.at[slot])
                    return ref[...]

                acc = acc + pl.run_scoped(product, plgpu.ACC((R, Dv), jnp.float32))

            plgpu.barrier_arrive(v_free.at[slot])
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
            plgpu.barrier_arrive(drained)
            plgpu.barrier_wait(drained)
        if readers == 1:
            finish(acc, m, total)
        else:
            pl.when(reader == 1)(lambda: give(acc, m, total, spare, joined))
            pl.when(reader == 0)(lambda: finish(*join(acc, m, total, spare, joined)))

    def finish(acc, m, total):
        empty = total == 0.0
        safe = jnp.where(empty, 1.0, total)
        acc = acc / over(safe, Dv)
        lse = jnp.where(empty, MASKED, m + jnp.log(safe) * LOG2E)
        width, rows = Dv // cluster, pl.ds((tile * sharing + group) * R, R)
        columns = pl.ds(peer * width, width)
        if cluster > 1:
            at = (b, part, tile, head)
            hbm = None if in_registers else (sums_hbm.at[at], tops_hbm.at[at])
            acc, lse = Exchange(sums, tops, hbm, shown, peer, cluster)(acc, lse)
        acc = acc.astype(out_hbm.dtype)
        if not direct:
            out_hbm[b, part, head, rows, columns] = acc

            @pl.when(peer == 0)
            def _():
                lse_hbm[b, part, head, rows] = lse
        elif tokens is None:
            out_hbm[b, head, rows, columns] = acc
        else:
            stage[group] = acc
        plgpu.commit_smem()
        if cluster > 1:  # nobody leaves before all have read its sums
            plgpu.barrier_arrive(taken)
        if direct and tokens is not None:
            its_tokens = pl.ds((tile * sharing + group) * tokens, tokens)  # visibly a multiple of eight
            for g in range(G):
                there = out_hbm.at[b, its_tokens, head * G + g, columns]
                plgpu.copy_smem_to_gmem(stage.at[group, pl.ds(g * tokens, tokens)], there)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if cluster > 1:
            plgpu.barrier_wait(taken)

    def body():
        pl.when(wg == consumers)(produce)
        pl.when(wg < consumers)(consume)

    if direct:
        body()
    else:
        pl.when(part * (cluster * readers) < blocks)(body)


@functools.partial(jax.jit, static_argnames=("scale", "window", "sink", "softcap", "tiling", "interpret"))
def tree_attention(
    q: Float[Array, "B T H Dk"],
    k_pages: Float[Array, "P S K Dk"],
    v_pages: Float[Array, "P S K Dv"],
    page_table: Int[Array, "B N"],
    length: Int[Array, " B"],
    visible: UInt32[Array, "B T W"] | None,
    positions: Int[Array, "B T"],
    inflight_positions: Int[Array, "B M"],
    *,
    scale: float,
    window: int | None = None,
    sink: int = 0,
    softcap: float | None = None,
    tiling: Tiling,
    interpret=None,
) -> Float[Array, "B T H Dv"]:
    """The contract of `pallas_kernels.reference.tree_attention`, for the cases that `serves` accepts.

    `interpret` takes `plgpu.InterpretGPUParams()` to run on a CPU; then the weights go through shared memory and a cluster's
    sums through global memory, because interpret mode knows neither wgmma operands in registers nor a neighbour's memory.
    """
    B, T, H, Dk = q.shape
    _, S, K, Dv = v_pages.shape
    N, M = page_table.shape[1], inflight_positions.shape[1]
    G, block, stages = H // K, tiling.block, tiling.num_stages
    num_slots = N * S
    readers, cluster = tiling.readers, tiling.cluster
    sharing = 2 if tiling.rows >= 128 and T * G > WARPGROUP_ROWS and readers * cluster == 1 else 1
    consumers = sharing * readers
    tile_rows = sharing * WARPGROUP_ROWS
    tiles = pl.cdiv(T * G, tile_rows)
    padded = tiles * tile_rows
    splits = tiling.splits
    direct = splits == 1
    causal = visible is None
    tokens = tile_tokens(G, Dv)

    def as_rows(x, fill):  # [B, T, ...] to [B, padded, ...], each token G times
        if tokens is not None:
            x = jnp.pad(x, ((0, 0), (0, padded // G - T), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
            x = jnp.repeat(x.reshape(B, padded // WARPGROUP_ROWS, 1, tokens, *x.shape[2:]), G, axis=2)
            return x.reshape(B, padded, *x.shape[4:])
        x = jnp.repeat(x, G, axis=1)
        return jnp.pad(x, ((0, 0), (0, padded - T * G), *((0, 0),) * (x.ndim - 2)), constant_values=fill)

    words = inflight_words(length, visible, positions, inflight_positions, window=window, sink=sink)
    used = lax.reduce(words, jnp.int32(0), lax.bitwise_or, (1,))
    nearest = positions.min(axis=1)
    words, position = jnp.moveaxis(as_rows(words, 0), 1, 2), as_rows(positions, 0)
    # TMA fills rows beyond the array's with zeros and leaves them out when writing, but cuts the rows in eights: eight or
    # fewer are one piece.
    if tokens is not None:
        grouped = jnp.pad(q, ((0, 0), (0, -T % 8 if T > 8 else 0), (0, 0), (0, 0)))
    else:
        grouped = q.reshape(B, T, K, G, Dk).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, Dk)
        grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, -(T * G) % 8 if T * G > 8 else 0), (0, 0)))

    limits = {"causal": causal, "num_inflight": M, "T": T}
    kernel = functools.partial(
        _attention, block=block, stages=stages, sharing=sharing, readers=readers, cluster=cluster, splits=splits, G=G,
        tokens=tokens, scale=scale, window=window, sink=sink, softcap=softcap, direct=direct, in_registers=not interpret,
        **limits,
    )  # fmt: skip
    f32 = jnp.float32
    if not direct:
        out_shape, lse_type = (B, splits, K, padded, Dv), jax.ShapeDtypeStruct((B, splits, K, padded), f32)
    else:
        out_shape, lse_type = (B, grouped.shape[1], H, Dv) if tokens is not None else (B, K, padded, Dv), None
    sums_type = tops_type = None
    if interpret and cluster > 1:
        sums_type = jax.ShapeDtypeStruct((B, splits, tiles, K, cluster, WARPGROUP_ROWS, Dv), f32)
        tops_type = jax.ShapeDtypeStruct(sums_type.shape[:-1], f32)
    # By TMA in the queries' type; what warps write themselves must fill sectors of 32 bytes (jax 0.12 insists on it): float32.
    out_dtype = q.dtype if direct and tokens is not None else f32
    pieces = max(1, block // S)
    clusters = {"cluster": (cluster,), "cluster_names": ("peer",)} if cluster > 1 else {}
    together_in_cluster = plgpu.ClusterBarrier(collective_axes=("peer",)) if cluster > 1 else None
    rows_type = plgpu.SMEM((WARPGROUP_ROWS,), f32)
    out, lse, *_ = plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct(out_shape, out_dtype), lse_type, sums_type, tops_type),
        grid=(B, splits, tiles, K),  # heads fastest: the programs that share a page run together
        grid_names=("batch", "split", "tile", "kv_head"),
        scratch_types=(
            _tiled((sharing, WARPGROUP_ROWS, Dk), q.dtype),
            plgpu.RefUnion(
                (
                    _tiled((readers * stages, block, Dk), q.dtype),
                    _tiled((readers * stages, block, Dv), q.dtype),
                ),
                (
                    (_tiled((WARPGROUP_ROWS, Dv), f32), rows_type, rows_type) if readers > 1 else (),
                    _tiled((sharing, WARPGROUP_ROWS, Dv // cluster), q.dtype),
                    [_tiled((WARPGROUP_ROWS, Dv // cluster), f32) for _ in range(cluster if cluster > 1 else 0)],
                    rows_type,
                ),
            ),
            _tiled((consumers, WARPGROUP_ROWS, block), q.dtype) if interpret else None,
            plgpu.Barrier(num_arrivals=1 if tokens is None else G, num_barriers=sharing),
            plgpu.Barrier(num_arrivals=pieces, num_barriers=readers * stages),
            plgpu.Barrier(num_arrivals=pieces, num_barriers=readers * stages),
            plgpu.Barrier(num_arrivals=sharing, num_barriers=readers * stages),
            plgpu.Barrier(num_arrivals=sharing, num_barriers=readers * stages),
            plgpu.Barrier(num_barriers=stages) if sharing > 1 else None,
            plgpu.Barrier(num_arrivals=consumers),
            plgpu.Barrier() if readers > 1 else None,
            together_in_cluster,
            together_in_cluster,
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=not interpret,
            reduction_scratch_bytes=REDUCTION_BYTES,
        ),
        interpret=interpret or None,
        num_threads=consumers + 1,
        thread_name="wg",
        **clusters,
    )(grouped, k_pages, v_pages, page_table, length, words, used, position, nearest)

    if direct and tokens is not None:
        return out[:, :T]
    if direct:
        out = out[:, :, : T * G].astype(q.dtype).reshape(B, K, T, G, Dv)
        return out.transpose(0, 2, 1, 3, 4).reshape(B, T, H, Dv)
    turn = block * cluster * readers  # slots that a split takes at once

    def row(t, h):
        head, g = h // G, h % G
        place = t * G + g if tokens is None else t // tokens * WARPGROUP_ROWS + g * tokens + t % tokens
        return head * padded + place

    def written(s, t, length, position):  # a split that had no turn has written nothing
        return s * turn < last_slot(length, t + 1, causal=causal, M=M, T=T, num_slots=num_slots)

    sums, lse = (x.reshape(B, splits, K * padded, *x.shape[4:]) for x in (out, lse))
    return merge_splits(
        sums, lse, length, positions, q.dtype, H=H, row=row, written=written, interpret=bool(interpret)
    )  # fmt: skip
