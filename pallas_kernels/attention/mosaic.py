"""Tree attention for Pallas' Mosaic GPU back end (Hopper, jax 0.11.2 and later): shapes, shared memory and grid of the kernel.

What a program does stands in `mosaic_kernel`; a second kernel merges what several splits leave (`merge_splits`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.attention.inflight import inflight_words, last_slot
from pallas_kernels.attention.merge_splits import merge_splits
from pallas_kernels.attention.mosaic_kernel import Case, attention
from pallas_kernels.attention.mosaic_merge import WARPGROUP_ROWS
from pallas_kernels.shaped import Shaped
from pallas_kernels.tilings import Tiling

AVAILABLE = hasattr(plgpu, "InterpretGPUParams") and hasattr(plgpu, "cluster_ref")  # the API as of jax 0.11.2
REDUCTION_BYTES = 0  # a row lies within one warp; Mosaic's 2 KB would keep programs of three stages from sharing an SM


def serves(q: Shaped, k_pages: Shaped, v_pages: Shaped) -> bool:
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
    """The contract of `pallas_kernels.attention.reference.tree_attention`, for the cases that `serves` accepts.

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

    case = Case(
        T=T,
        G=G,
        num_inflight=M,
        causal=causal,
        tokens=tokens,
        sharing=sharing,
        interpreted=bool(interpret),
        scale=scale,
        window=window,
        sink=sink,
        softcap=softcap,
    )

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
        functools.partial(attention, tiling=tiling, case=case),
        out_type=(jax.ShapeDtypeStruct(out_shape, out_dtype), lse_type, sums_type, tops_type),
        grid=(B, splits, tiles, K),  # heads fastest: the programs that share a page run together
        grid_names=("batch", "split", "tile", "kv_head"),
        scratch_types=(
            _tiled((sharing, WARPGROUP_ROWS, Dk), q.dtype),
            plgpu.RefUnion(
                (_tiled((readers * stages, block, Dk), q.dtype), _tiled((readers * stages, block, Dv), q.dtype)),
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
    return merge_splits(sums, lse, length, positions, q.dtype, H=H, row=row, written=written, interpret=bool(interpret))
