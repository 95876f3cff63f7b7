"""The product of a weight with an adapter's first matrix beside it: [x @ w | x @ a] in one pass over x.

The narrow matrix alone would be a kernel of 3 to 4 us for 1 us of bytes. Here its columns are further column tiles of the
`skinny_product`, for programs that would otherwise have had none; both results leave in one array, whose reader
(`gated_lora`) adds up the parts. The second matrix and what the next product begins with are fetched into the L2 cache
meanwhile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels import device
from pallas_kernels.gated_lora import COLUMNS
from pallas_kernels.product import AHEAD
from pallas_kernels.product import _kernel as skinny_kernel

MOST_ROWS = 16
TILINGS: dict[tuple[int, int, int], tuple[int, int, int, int, int]] = {
    (4096, 6144, 384): (64, 128, 32, 1, 1),
    (4096, 4096, 128): (64, 128, 32, 1, 1),
    (4096, 28672, 256): (256, 64, 64, 2, 1),
    (14336, 4096, 128): (64, 128, 56, 1, 1),
}
"""(inputs, outputs, rank) -> columns, depth, steps, consumers, cluster on Hopper. Whole column tiles where they keep enough
of the chip busy: the results are then in one part, rounded already, and quick to read. What is not here is left to XLA."""


def tiling_of(x: Array, w: Array, a: Array):
    """The kernel's tiling for x [*R, I], w [I, O], a [I, rank] on the default device, None where it is not served."""
    entry = TILINGS.get((*w.shape, a.shape[1])) if device.capability() == 9.0 and w.ndim == 2 else None
    kernel = skinny_kernel()
    rows = x.size // x.shape[-1]
    if entry is None or kernel is None or rows > MOST_ROWS or not (kernel.serves(x, w) and kernel.serves(x, a)):
        return None
    return kernel.Tiling(*entry)


def adapted_product(
    x: Float[Array, "B T I"],
    w: Float[Array, "I O"],
    a: Float[Array, "I rank"],
    b: Float[Array, "rank O"],
    blocks: np.ndarray | None = None,
    following: tuple[Array, Array] | None = None,
    most: int = AHEAD,
    interpret=None,
) -> Float[Array, "parts B T O_plus_rank"] | None:
    """x @ w and behind it x @ a, in parts that are to be added; None where the kernel does not serve the case.

    Args:
      x: what enters the product.
      w: its weight.
      a, b, blocks: the adapter's matrices and the blocks of b, see `gated_lora`.
      following: w and a of the product that comes next.
      most: bytes of that w that are fetched into the L2 cache.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    tiling = tiling_of(x, w, a)
    if tiling is None:
        return None
    kernel = skinny_kernel()
    outputs = w.shape[1] + a.shape[1]
    parts = tiling.parts(w.shape[0], outputs)
    nexts, ahead = [b], [_ahead(b, blocks)]
    if following is not None:
        nexts.append(following[0])
        ahead.append(_ahead_of_product(x, *following, most))
    p = kernel.partial_products(
        x.reshape(-1, x.shape[-1]), w, tiling, dtype=x.dtype if parts.max() == 1 else jnp.float32, beside=a,
        following=tuple(nexts), ahead=tuple(ahead), interpret=interpret,
    )  # fmt: skip
    return p.reshape(-1, *x.shape[:-1], outputs)


def _ahead_of_product(x: Array, w: Array, a: Array, most: int):
    """The first steps of every program of a product of as many rows as x has; None: nothing."""
    tiling = tiling_of(jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[0]), x.dtype), w, a)
    if tiling is None:
        return None
    programs = -(-w.size // (tiling.columns * tiling.depth * tiling.steps))
    units = min(most // (2 * tiling.columns * tiling.depth * programs), tiling.steps)
    return skinny_kernel().Ahead(tiling, units) if units else None


def _ahead(b: Array, blocks: np.ndarray | None):
    """What `gated_lora` reads of b, tile by tile; None where that cannot be told by tiles."""
    rank, outputs = b.shape
    tiles = np.zeros(outputs // COLUMNS, int) if blocks is None else blocks.reshape(-1, COLUMNS)[:, 0]
    depth = rank // (int(tiles.max()) + 1)
    if outputs % COLUMNS or depth % 64 or depth > 256 or (blocks is not None and (blocks != np.repeat(tiles, COLUMNS)).any()):
        return None
    kernel = skinny_kernel()
    return kernel.Ahead(kernel.Tiling(COLUMNS, depth, 1), 1, tuple(tiles.tolist()))
