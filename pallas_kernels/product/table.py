"""Which products the kernel of `skinny_product` takes, and how: written by `benchmarks/kernels/product.py --table`.

(compute capability, rows up to which it holds, inputs, outputs) -> a `Tiling`. Where nothing stands
XLA was as fast, or nobody has measured.
"""

MEASURED: dict[tuple[float, int, int, int], tuple[int, ...]] = {
    (9.0, 64, 4096, 4096): (64, 128, 16, 1, 2),  # 13.2 us; XLA 14.8
    (9.0, 64, 14336, 4096): (128, 64, 56, 2, 2),  # 37.5 us; XLA 40.0
    (9.0, 128, 4096, 4096): (64, 128, 16, 1, 2, 128, 1),  # 14.6 us; XLA 16.1
    (9.0, 128, 4096, 6144): (128, 64, 32, 2, 2, 128, 1),  # 21.0 us; XLA 25.0
    (9.0, 128, 4096, 28672): (256, 64, 64, 2, 2, 128, 1),  # 64.4 us; XLA 66.6
    (9.0, 128, 4096, 128256): (256, 64, 256, 2, 1),  # 314.6 us; XLA 482.6
    (9.0, 128, 12288, 4096): (128, 64, 48, 2, 2),  # 34.8 us; XLA 38.8
    (9.0, 128, 14336, 4096): (128, 64, 56, 2, 2, 128, 1),  # 42.2 us; XLA 43.7
}
