"""The attention of the whole project behind one function: prefill chunks, plain decoding, draft levels, verify trees.

The contract is `pallas_kernels.attention.reference.tree_attention`; here a back end is chosen, by platform, in one place.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import device, tilings
from pallas_kernels.attention import reference
from pallas_kernels.attention import triton as tree_attention_triton
from pallas_kernels.shaped import Shaped
from pallas_kernels.tilings import Problem, Tiling

Backend = Literal["reference", "triton", "mosaic"]
FEW_SLOTS = 512
"""Slots of a table up to which the jnp path looks at all of them at once."""


@functools.cache
def _mosaic():
    """The Mosaic GPU kernel's module, or None where this jax is too old for it."""
    try:
        from pallas_kernels.attention import mosaic as tree_attention_mosaic
    except ImportError:
        return None
    return tree_attention_mosaic if tree_attention_mosaic.AVAILABLE else None


@functools.cache
def _warn_fallback(case: str) -> None:
    warnings.warn(f"tree_attention: no kernel serves {case}; running the slower jnp reference", stacklevel=4)


def _problem(q: Shaped, k_pages: Shaped, v_pages: Shaped, num_slots: int) -> Problem:
    (B, T, H, Dk), (K, Dv) = q.shape, v_pages.shape[2:]
    return Problem(T * H // K, Dk, Dv, jnp.dtype(k_pages.dtype).itemsize, num_slots, B * K)


def choose_backend(q: Shaped, k_pages: Shaped, v_pages: Shaped, num_slots: int, capability: float | None) -> Backend:
    """The back end for a case, by chip, rows and slots of the table (`benchmarks/kernels/README.md`).

    On Hopper Mosaic serves unless Triton's products of 16 rows are ahead (`tilings.prefers_triton`). No other chip has its
    wgmma.
    """
    if capability is None:
        return "reference"
    triton = capability >= 8.0 and tree_attention_triton.serves(q, k_pages, v_pages)
    if 9.0 <= capability < 10.0 and _mosaic() is not None and _mosaic().serves(q, k_pages, v_pages):
        return "triton" if triton and tilings.prefers_triton(_problem(q, k_pages, v_pages, num_slots)) else "mosaic"
    if triton:
        return "triton"
    _warn_fallback(
        f"head sizes {k_pages.shape[-1]}/{v_pages.shape[-1]}, q {q.dtype}, cache {k_pages.dtype}, "
        f"compute capability {capability}"
    )
    return "reference"


def groups_queries(q: Shaped, k_pages: Shaped, v_pages: Shaped, page_table: Shaped) -> bool:
    """Whether the back end that `tree_attention` takes for these shapes regroups its queries by kv head."""
    num_slots = page_table.shape[1] * k_pages.shape[1]
    if choose_backend(q, k_pages, v_pages, num_slots, device.capability()) != "mosaic":
        return False
    return _mosaic().tile_tokens(q.shape[2] // k_pages.shape[2], v_pages.shape[-1]) is None


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
    backend: Backend | None = None,
    tiling: Tiling | None = None,
    interpret: Any = False,
) -> Float[Array, "B T H Dv"]:
    """Attention of T rows over a committed prefix and M >= T in-flight entries of the same paged cache.

    The arguments up to `softcap` and the result are those of `pallas_kernels.attention.reference.tree_attention`.

    Args:
      backend: None chooses by the default device and the shapes.
      tiling: block sizes of the kernel; None takes them from `pallas_kernels.tilings`.
      interpret: run a kernel on the CPU, slowly: True (Triton) or `plgpu.InterpretGPUParams()` (Mosaic).

    Raises:
      ValueError: a back end was asked for by name that does not serve the case, or not with this jax.
    """
    num_slots = page_table.shape[1] * k_pages.shape[1]
    backend = backend or choose_backend(q, k_pages, v_pages, num_slots, device.capability())
    arguments = (q, k_pages, v_pages, page_table, length, visible, positions, inflight_positions)
    options = {"scale": scale, "window": window, "sink": sink, "softcap": softcap}
    if backend == "reference":
        plain = reference.tree_attention if num_slots <= FEW_SLOTS else reference.blocked_attention
        return plain(*arguments, **options)
    module = {"triton": tree_attention_triton, "mosaic": _mosaic()}.get(backend)
    if module is None or not module.serves(q, k_pages, v_pages):
        raise ValueError(
            f"backend={backend!r} does not serve head sizes {k_pages.shape[-1]}/{v_pages.shape[-1]}, page size "
            f"{k_pages.shape[1]}, q {q.dtype}, cache {k_pages.dtype} with jax {jax.__version__}; leave backend=None"
        )
    if tiling is None:
        table = {"triton": tilings.triton_tiling, "mosaic": tilings.mosaic_tiling}[backend]
        tiling = table(_problem(q, k_pages, v_pages, num_slots))
    return module.tree_attention(*arguments, **options, tiling=tiling, interpret=interpret)
