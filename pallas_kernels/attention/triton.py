"""Tree attention for Pallas' Triton back end: flash decoding over pages, split along the cache.

One program per (kv head, row tile, split, sequence). A row tile stacks query rows and the query heads of one kv head; a
split is a run of slots whose boundaries are multiples of `Tiling.split`, whatever the sequence's length. Blocks that lie
wholly in the committed prefix need no mask and take a loop of their own. A second kernel merges the splits that were
written (Dao et al., Flash-Decoding). Only live blocks are read: trip counts follow the length, page by page.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.attention.inflight import WORD, inflight_words, last_slot
from pallas_kernels.attention.merge_splits import MASKED, channel_chunks, merge_splits
from pallas_kernels.shaped import Shaped
from pallas_kernels.tilings import Tiling
from pallas_kernels.triton_blocks import whole

LOG2E = 1.4426950408889634


def serves(q: Shaped, k_pages: Shaped, v_pages: Shaped) -> bool:
    """Whether this kernel takes the case: head sizes in multiples of 16 and floating caches of 2 or 4 bytes."""
    sizes = k_pages.shape[-1] % 16 == 0 and v_pages.shape[-1] % 16 == 0
    kinds = all(x.dtype in (jnp.float32, jnp.bfloat16, jnp.float16) for x in (q, k_pages, v_pages))
    return sizes and kinds and k_pages.dtype == v_pages.dtype


def _dot(a, b, *, trans_b=False):
    """A product with float32 sums; float32 operands are multiplied as such, not as tf32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plt.dot(a, b, trans_b=trans_b, precision=precision)


def _divide(x, by: int):
    return lax.div(x, jnp.asarray(by, x.dtype))


def _attention(
    q_ref,  # [B, T, H, Dk]
    k_ref,  # [P, S, K, Dk]
    v_ref,  # [P, S, K, Dv]
    table_ref,  # [B, N]
    length_ref,  # [B]
    words_ref,  # [B, T, A]
    position_ref,  # [B, T]
    out_ref,  # [B, T, H, Dv], or with splits [B, splits, T, H, Dv] in float32
    lse_ref=None,  # [B, splits, T, H], log2 of the sum of weights
    *,
    rows: int,
    block: int,
    split: int,
    causal: bool,
    num_inflight: int,
    scale: float,
    window: int | None,
    sink: int,
    softcap: float | None,
):
    head, tile, part, b = (pl.program_id(i) for i in range(4))
    T, H, Dk = q_ref.shape[1:]
    S, K, Dv = v_ref.shape[1:]
    G, A = H // K, words_ref.shape[2]
    N = table_ref.shape[1]
    num_slots = N * S
    one_page = block <= S and S % block == 0
    common = jnp.promote_types(q_ref.dtype, k_ref.dtype)

    row = tile * rows + jnp.arange(rows)
    row_live = row < T * G
    t_out = _divide(row, G)  # past T for rows that do not exist: interpreted stores must drop them, not collide
    t = jnp.minimum(t_out, T - 1)
    h = head * G + lax.rem(row, jnp.asarray(G, row.dtype))
    length = length_ref[b]
    row_end = jnp.minimum(_divide((tile + 1) * rows + G - 1, G), T)
    stop = last_slot(length, row_end, causal=causal, M=num_inflight, T=T, num_slots=num_slots)
    start = part * split
    stop = jnp.minimum(stop, start + split)

    def channels(chunk):
        offset, size = chunk
        return offset + jnp.arange(size)[None]

    def pages_of(first):
        """Pages of a block: one, or one per slot. Loaded a step ahead, so that no key waits for its page."""
        if one_page:
            return table_ref[b, jnp.minimum(_divide(first, S), N - 1)]
        return plt.load(table_ref.at[b, jnp.minimum(_divide(first + jnp.arange(block), S), N - 1)])

    # Before the branch on the length, which these loads would otherwise wait for.
    page_at_start = pages_of(start) if window is None else None
    qs = [
        plt.load(q_ref.at[b, t[:, None], h[:, None], channels(c)], mask=row_live[:, None], other=0.0).astype(common)
        for c in channel_chunks(Dk)
    ]
    position = None if window is None else plt.load(position_ref.at[b, t])

    def written():
        def attend(first, following, carry, masked):
            accs, m, total, page = carry
            slot = first + jnp.arange(block)
            inside = lax.rem(first, S) + jnp.arange(block) if one_page else lax.rem(slot, jnp.asarray(S, slot.dtype))
            inside = inside[:, None]
            ahead = pages_of(following)
            page = page if one_page else page[:, None]
            if masked:  # the mask's words first: they arrive while keys do
                bits = jnp.zeros((rows, block), jnp.int32)
                in_block = slot - first
                for w in range(block // WORD):
                    index = _divide(first, WORD) + w - _divide(length, WORD)
                    wanted = row_live & (index >= 0) & (index < A)
                    word = plt.load(words_ref.at[b, t, jnp.broadcast_to(index, (rows,))], mask=wanted, other=0)
                    bits = jnp.where((_divide(in_block, WORD) == w)[None], word[:, None], bits)
            live = {"mask": (slot < stop)[:, None], "other": 0.0} if masked else {}
            keys = [plt.load(k_ref.at[page, inside, head, channels(c)], **live) for c in channel_chunks(Dk)]
            values = [plt.load(v_ref.at[page, inside, head, channels(c)], **live) for c in channel_chunks(Dv)]

            scores = sum(_dot(qc, kc.astype(common), trans_b=True) for qc, kc in zip(qs, keys, strict=True))
            scores = scores * (scale * LOG2E) if softcap is None else softcap * LOG2E * jnp.tanh(scores * (scale / softcap))
            if masked:
                seen = (lax.shift_right_logical(bits, jnp.broadcast_to((in_block & 31)[None], bits.shape)) & 1) != 0
                prefix = (slot < length)[None]
                if window is not None:
                    prefix = prefix & ((position[:, None] - slot[None] < window) | (slot < sink)[None])
                prefix = prefix & row_live[:, None]
                allowed = prefix | ((slot >= length)[None] & seen)
                scores = jnp.where(allowed, scores, MASKED)
                used = allowed.astype(jnp.int32).max(axis=0) != 0
                values = [jnp.where(used[:, None], vc, 0.0).astype(vc.dtype) for vc in values]
            m_new = jnp.maximum(m, scores.max(axis=1))
            p = jnp.exp2(scores - m_new[:, None])
            if masked:
                p = jnp.where(allowed, p, 0.0)
            alpha = jnp.exp2(m - m_new)
            weights = p.astype(v_ref.dtype)  # and their sum normalises what is really multiplied
            accs = tuple(acc * alpha[:, None] + _dot(weights, vc) for acc, vc in zip(accs, values, strict=True))
            return accs, m_new, total * alpha + weights.astype(jnp.float32).sum(axis=1), ahead

        def loop(lower, upper, carry, *, masked, first_of):
            return lax.fori_loop(lower, upper, lambda i, c: attend(first_of(i), first_of(i + 1), c, masked), carry)

        carry = (
            tuple(jnp.zeros((rows, size), jnp.float32) for _, size in channel_chunks(Dv)),
            jnp.full((rows,), MASKED, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
        )
        blocks = _divide(jnp.maximum(stop - start, 0) + block - 1, block)
        if window is None:
            full = jnp.minimum(_divide(jnp.maximum(length - start, 0), block), blocks)
            at = lambda i: start + i * block  # noqa: E731
            carry = loop(0, full, (*carry, page_at_start), masked=False, first_of=at)
            carry = loop(full, blocks, carry, masked=True, first_of=at)
        else:  # the blocks with sinks, then those from the first key in any row's window on
            lowest = jnp.where(row_live, position, jnp.iinfo(jnp.int32).max).min()
            near = jnp.minimum(jnp.maximum(lowest - (window - 1), 0), length)
            near = jnp.minimum(_divide(jnp.maximum(near - start, 0), block), blocks)
            sinks = jnp.minimum(_divide(jnp.maximum(min(sink, num_slots) - start, 0) + block - 1, block), near)
            at = lambda i: start + jnp.where(i < sinks, i, near + i - sinks) * block  # noqa: E731
            carry = loop(0, sinks + blocks - near, (*carry, pages_of(at(0))), masked=True, first_of=at)
        accs, m, total, _ = carry

        empty = total == 0.0
        total = jnp.where(empty, 1.0, total)
        place = (b, *(() if lse_ref is None else (part,)), t_out[:, None], h[:, None])
        for chunk, acc in zip(channel_chunks(Dv), accs, strict=True):
            value = (acc / total[:, None]).astype(out_ref.dtype)
            plt.store(out_ref.at[(*place, channels(chunk))], value, mask=row_live[:, None])
        if lse_ref is not None:
            plt.store(lse_ref.at[b, part, t_out, h], jnp.where(empty, MASKED, m + jnp.log2(total)), mask=row_live)

    if lse_ref is None:
        written()
    else:
        pl.when(start < stop)(written)


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
    interpret: bool = False,
) -> Float[Array, "B T H Dv"]:
    """The contract of `pallas_kernels.attention.reference.tree_attention`, for the cases that `serves` accepts."""
    B, T, H, Dk = q.shape
    _, S, K, Dv = v_pages.shape
    N, M = page_table.shape[1], inflight_positions.shape[1]
    G = H // K
    num_slots = N * S
    block = tiling.block
    rows = min(tiling.rows, max(16, pl.next_power_of_2(T * G)))  # a product wants 16 rows at least
    split = tiling.split or pl.cdiv(num_slots, block) * block
    splits = pl.cdiv(num_slots, split)
    tiles = pl.cdiv(T * G, rows)
    words = inflight_words(length, visible, positions, inflight_positions, window=window, sink=sink)
    limits = {"causal": visible is None, "num_inflight": M, "window": window, "sink": sink, "split": split}

    direct = splits == 1
    shapes = [jax.ShapeDtypeStruct((B, T, H, Dv), q.dtype)]
    if not direct:
        shapes = [
            jax.ShapeDtypeStruct((B, splits, T, H, Dv), jnp.float32),
            jax.ShapeDtypeStruct((B, splits, T, H), jnp.float32),
        ]
    inputs = (q, k_pages, v_pages, page_table, length, words, positions)
    results = pl.pallas_call(
        functools.partial(_attention, rows=rows, block=block, scale=scale, softcap=softcap, **limits),
        grid=(K, tiles, splits, B),  # heads fastest: the programs that share a page run together
        in_specs=[whole(x) for x in inputs],
        out_specs=[whole(x) for x in shapes],
        out_shape=shapes,
        compiler_params=plt.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="tree_attention",
    )(*inputs)
    if direct:
        return results[0]

    def written(s, t, length, position):
        stop = last_slot(length, t + 1, causal=visible is None, M=M, T=T, num_slots=num_slots)
        live = s < _divide(stop + split - 1, split)
        if window is not None:
            near = jnp.minimum(jnp.maximum(position - (window - 1), 0), length)
            live = live & ((s >= _divide(near, split)) | (s < -(-sink // split)))
        return live

    sums, lse = (x.reshape(B, splits, T * H, *x.shape[4:]) for x in results)
    return merge_splits(
        sums, lse, length, positions, q.dtype, H=H, row=lambda t, h: t * H + h, written=written, interpret=interpret
    )
