"""The product of a weight with an adapter's first matrix beside it: [x @ w | x @ a] in one pass over x.

The narrow matrix alone would be a kernel of 3 to 4 us for 1 us of bytes. Here its columns are further column tiles of the
`skinny_product`, for programs that would otherwise have had none; both results leave in one array, whose reader
(`gated_lora`) adds up the parts. The second matrix is fetched into the L2 cache meanwhile.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels import device
from pallas_kernels.gated_lora import COLUMNS
from pallas_kernels.product import _kernel as skinny_kernel
from pallas_kernels.tilings import product_parts

ROWS = (16, 64)
TILINGS: dict[tuple[int, int, int, int], tuple[int, int, int, int, int]] = {
    (16, 4096, 6144, 384): (64, 128, 32, 1, 1),
    (16, 4096, 4096, 128): (64, 128, 32, 1, 1),
    (16, 4096, 28672, 256): (256, 64, 64, 2, 1),
    (16, 14336, 4096, 128): (64, 128, 56, 1, 1),
    (64, 4096, 6144, 384): (128, 64, 32, 2, 1),
    (64, 4096, 4096, 128): (128, 64, 32, 2, 1),
    (64, 4096, 28672, 256): (256, 64, 64, 2, 1),
    (64, 14336, 4096, 128): (128, 64, 56, 2, 1),
}
"""(most rows, inputs, outputs, rank) -> columns, depth, steps, consumers, cluster on Hopper. Whole column tiles where they keep
enough of the chip busy: the results are then in one part, rounded already, and quick to read. The rest is left to XLA."""


def tiling_of(x: Array, w: Array, a: Array):
    """The kernel's tiling for x [*R, I], w [I, O], a [I, rank] on the default device, None where it is not served."""
    most = next((r for r in ROWS if x.size // x.shape[-1] <= r), None)
    entry = TILINGS.get((most, *w.shape, a.shape[1])) if device.capability() == 9.0 and w.ndim == 2 else None
    kernel = skinny_kernel()
    if entry is None or kernel is None or not (kernel.serves(x, w) and kernel.serves(x, a)):
        return None
    return kernel.Tiling(*entry)


def adapted_product(
    x: Float[Array, "B T I"],
    w: Float[Array, "I O"],
    a: Float[Array, "I rank"],
    b: Float[Array, "rank O"],
    blocks: np.ndarray | None = None,
    interpret=None,
) -> Float[Array, "parts B T O_plus_rank"] | None:
    """x @ w and behind it x @ a, in parts that are to be added; None where the kernel does not serve the case.

    Args:
      x: what enters the product.
      w: its weight.
      a, b, blocks: the adapter's matrices and the blocks of b, see `gated_lora`.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    tiling = tiling_of(x, w, a)
    if tiling is None:
        return by_xla(x, w, a) if joins(x, w, a) else None
    kernel = skinny_kernel()
    outputs = w.shape[1] + a.shape[1]
    parts = tiling.parts(w.shape[0], outputs)
    p = kernel.partial_products(
        x.reshape(-1, x.shape[-1]), w, tiling, dtype=x.dtype if parts.max() == 1 else jnp.float32, beside=a,
        following=b, ahead=_ahead(b, blocks), interpret=interpret,
    )  # fmt: skip
    return p.reshape(-1, *x.shape[:-1], outputs)


def joins(x: Array, w: Array, a: Array) -> bool:
    """Whether XLA multiplies both without copying them into one: Triton's products read tiles of either."""
    few = 1 < x.size // x.shape[-1] <= ROWS[-1] and x.dtype == w.dtype == a.dtype and x.dtype.itemsize == 2
    return few and device.capability() is not None and w.shape[1] % 64 == a.shape[1] % 64 == 0


def by_xla(x: Array, w: Array, a: Array) -> Float[Array, "parts B T O_plus_rank"]:
    """The same as one product of XLA's, in parts for few rows (`product_parts`)."""
    parts = product_parts(x.shape[0] * x.shape[1], w.shape[0], w.shape[1] + a.shape[1])
    if parts == 1:
        return (x @ jnp.concatenate([w, a], 1))[None]
    x = x.reshape(*x.shape[:2], parts, -1)
    both = jnp.concatenate([each.reshape(parts, -1, each.shape[1]) for each in (w, a)], 2)
    return jnp.einsum("BTSI,SIO->SBTO", x, both, preferred_element_type=jnp.float32)


def _ahead(b: Array, blocks: np.ndarray | None):
    """What `gated_lora` reads of b, tile by tile; None where that cannot be told by tiles."""
    rank, outputs = b.shape
    tiles = np.zeros(outputs // COLUMNS, int) if blocks is None else blocks.reshape(-1, COLUMNS)[:, 0]
    depth = rank // (int(tiles.max()) + 1)
    if outputs % COLUMNS or depth % 64 or depth > 256 or (blocks is not None and (blocks != np.repeat(tiles, COLUMNS)).any()):
        return None
    kernel = skinny_kernel()
    return kernel.Ahead(kernel.Tiling(COLUMNS, depth, 1), tuple(tiles.tolist()))
