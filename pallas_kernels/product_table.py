"""Which products the kernel of `skinny_product` takes, and how: written by `benchmarks/kernels/product.py --table`.

(compute capability, rows up to which it holds, inputs, outputs) -> columns, depth, steps, consumers, cluster. Where
nothing stands XLA was as fast, or nobody has measured.
"""

MEASURED: dict[tuple[float, int, int, int], tuple[int, int, int, int, int]] = {
    (9.0, 128, 4096, 6144): (128, 64, 32, 2, 2),  # 21.3 us; XLA 25.0
    (9.0, 128, 12288, 4096): (128, 64, 48, 2, 2),  # 34.8 us; XLA 38.8
}
