"""Which products of 512 rows `wide_product` takes, and how: written by `benchmarks/kernels/sustained.py --table`.

(compute capability, rows, inputs, outputs) -> a `wide_product.Tiling`. Where nothing stands XLA took no more energy.
"""

MEASURED: dict[tuple[float, int, int, int], tuple[int, ...]] = {}
