"""Which products the kernel of `skinny_product` takes, and how: written by `benchmarks/kernels/product.py --table`.

(compute capability, rows up to which it holds, inputs, outputs) -> columns, depth, steps, consumers, cluster. Where
nothing stands XLA was as fast, or nobody has measured.
"""

MEASURED: dict[tuple[float, int, int, int], tuple[int, int, int, int, int]] = {
    (9.0, 1, 4096, 4096): (64, 128, 16, 1, 1),  # 11.1 us; XLA 11.9
    (9.0, 1, 4096, 6144): (192, 64, 16, 3, 1),  # 15.2 us; XLA 16.4
    (9.0, 1, 14336, 4096): (128, 64, 56, 2, 1),  # 30.6 us; XLA 31.8
    (9.0, 8, 4096, 4096): (128, 64, 16, 2, 1),  # 11.6 us; XLA 12.0
    (9.0, 8, 14336, 4096): (64, 128, 56, 1, 1),  # 31.3 us; XLA 32.0
    (9.0, 16, 4096, 4096): (64, 128, 16, 1, 1),  # 11.7 us; XLA 12.6
    (9.0, 16, 14336, 4096): (64, 128, 56, 1, 1),  # 32.1 us; XLA 34.3
    (9.0, 32, 4096, 4096): (64, 128, 16, 1, 2),  # 12.4 us; XLA 13.3
    (9.0, 32, 4096, 6144): (192, 64, 16, 3, 2),  # 17.3 us; XLA 17.8
    (9.0, 32, 14336, 4096): (64, 128, 56, 1, 2),  # 34.1 us; XLA 36.1
    (9.0, 64, 4096, 4096): (64, 128, 16, 1, 2),  # 13.2 us; XLA 14.8
    (9.0, 64, 14336, 4096): (128, 64, 56, 2, 2),  # 37.5 us; XLA 40.0
    (9.0, 128, 4096, 4096): (64, 128, 16, 1, 2),  # 14.6 us; XLA 16.1
    (9.0, 128, 4096, 6144): (128, 64, 32, 2, 2),  # 21.3 us; XLA 25.0
    (9.0, 128, 12288, 4096): (128, 64, 48, 2, 2),  # 34.8 us; XLA 38.8
    (9.0, 128, 14336, 4096): (128, 64, 56, 2, 2),  # 42.4 us; XLA 43.7
}
