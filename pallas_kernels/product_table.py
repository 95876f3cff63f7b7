"""Which products the kernel of `skinny_product` takes, and how: written by `benchmarks/kernels/product.py --table`.

(compute capability, rows up to which it holds, inputs, outputs) -> columns, depth, steps, consumers, cluster. Where
nothing stands XLA was as fast, or nobody has measured.
"""

MEASURED: dict[tuple[float, int, int, int], tuple[int, int, int, int, int]] = {}
