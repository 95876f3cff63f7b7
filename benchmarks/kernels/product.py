"""Products of a few rows: XLA's against the tilings of `pallas_kernels.product.mosaic`, and the table that follows from it.

    python benchmarks/kernels/product.py --budget 120 --out DIR                # on the device; again to go on
    python benchmarks/kernels/product.py --table benchmarks/results/h200_products.json   # anywhere: writes the table

DIR/products.json gets a row per (inputs x outputs, rows, variant) after every measurement; a variant that crashes or hangs
costs its row, and rows that are there are not measured again (copy an earlier file there to go on from it). A row's time is
that of one call among many dependent ones inside one jitted loop, over enough different weights that none stays in the L2
cache; each call is followed by one small fusion over all of its result, as in a model, which also adds up partial sums.
Products of gates and values (`GATED`) end in silu(gate) · value. `error` is the relative distance from the product in
float32, `first_row` a checksum of the first row's bits. The tilings that are tried are the best of a crude model of the
chip (`predicted_us`), from 32 rows on also with their results in fewer pieces and with a step begun before the last one is
over. The table takes what beats XLA, from 64 rows on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import time
import zlib

HERE = pathlib.Path(__file__).resolve()
for folder in (HERE.parent, HERE.parents[2]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from timing import Rows, best_time  # noqa: E402

from jaxspec.benchmarking.records import write_rows  # noqa: E402

TABLE = HERE.parents[2] / "pallas_kernels" / "product_table.py"
TARGET = ((4096, 28672), (14336, 4096), (4096, 6144), (4096, 4096), (4096, 128256))  # a Llama-3.1-8B's weights
DRAFTS = ((12288, 4096), (8192, 6144), (4096, 32000), (20480, 4096), (8192, 4096))  # heads of EAGLE-3, DFlash, EAGLE
SMALL = ((2048, 16384), (8192, 2048), (2048, 3072), (2048, 2048))  # a Llama of one billion
POINTS = [
    *((rows, shape) for shape in TARGET for rows in (128, 64, 32)),
    *((rows, shape) for shape in TARGET for rows in (16, 8, 1)),
    *((rows, shape) for shape in DRAFTS for rows in (128, 64, 32, 16, 8, 1)),
    *((rows, shape) for shape in SMALL for rows in (64, 8)),
]
GATED = ((4096, 28672), (2048, 16384))
READ, L2, SM_RATE, TENSOR = 4.5e12, 5.5e12, 60e9, 3.5e12  # bytes per second; multiply-adds per second and multiprocessor
AT_ONCE = {1: 132, 2: 66, 4: 28}
"""Clusters by their size that run at once: of 32 clusters of four some waited for the others to end (down, 128 rows: 58 us)."""
MOST_ERROR = 6e-3  # rounding to bfloat16 alone makes 1.7e-3
LEAST_GAIN, FEWEST_ROWS = 0.5, 64
"""Microseconds that the kernel must win, and rows from which it may. XLA's products begin while the kernel before them ends
(programmatic launches), ours do not: with every win of 2 % in the table a round of plain decoding took 4.29 ms instead of
4.19, one of NGRAM 16 at batch 8 (128 rows) 5.41 instead of 5.52."""


def predicted(tiling, rows: int, K: int, N: int) -> float:
    """Seconds of a product, roughly: the slowest of memory, L2 cache, multiprocessor; then partial sums and a fixed cost."""
    from pallas_kernels.product.mosaic import tokens_of

    tokens, parts = tokens_of(rows), tiling.parts(K, N)
    units = K // tiling.depth * len(parts)
    runs = -(-units // tiling.steps)
    w, x = tiling.depth * tiling.columns * 2, tiling.depth * min(tokens, -(-rows // 8) * 8) * 2
    sums = rows * N * (4 * float(parts.mean()) if parts.max() > 1 else 2)
    from_l2 = units * tiling.cluster * w + units * x + 2 * sums
    one = tiling.steps * max(
        (w + x) / SM_RATE, tiling.depth * tiling.columns * max(tokens, 16) / TENSOR, w * runs * tiling.cluster / READ
    )
    fill = 0.5e-6 * (tiling.stages(tokens) * w < 64 * 1024)  # too little under way
    out = tokens * tiling.columns * 4 / 60e9 * (2 if tiling.consumers == 1 else 1)
    return max(one, from_l2 / L2) + 2 * sums / L2 + out + fill + 3e-6


def choices(rows: int, K: int, N: int, count: int) -> list:
    """The tilings that promise most, one or two of each width and cluster."""
    from pallas_kernels.product.mosaic import Tiling

    found = []
    for columns, consumers in ((64, 1), (128, 2), (192, 3), (256, 2)):
        depth = 128 if columns == 64 else 64  # a stage of 16 KB or more
        for cluster in (1, 2, 4):
            if K % depth or N % (columns * cluster) or (cluster > 1 and rows < 32):
                continue
            deep, tiles = K // depth, N // (columns * cluster)
            most = AT_ONCE[cluster]
            even = -(-deep * tiles // most)
            steps = {even, deep * -(-tiles // most)}  # cut evenly; whole tiles
            steps |= {s for s in range(even, even + 9) if deep % s == 0 or s % deep == 0}  # cut alike
            options = (Tiling(columns, depth, s, consumers, cluster) for s in sorted(steps))
            options = [t for t in options if t.fits(rows, K, N)]
            found += sorted(options, key=lambda t: predicted(t, rows, K, N))[: 2 if cluster == 1 else 1]
    best = sorted(found, key=lambda t: predicted(t, rows, K, N))[:count]
    if (K, N) in GATED:
        best = [t for t in best if t.gates(rows, K, N)]
    if rows >= 32:
        others = [dataclasses.replace(t, chunk=128, begun=begun) for t in best[:2] for begun in (0, 1)]
        best += [t for t in others if t.fits(rows, K, N)]
    return best


def name_of(tiling) -> str:
    """columns/depth/steps/consumers/cluster, and chunk/begun where they are not the usual ones."""
    fields = dataclasses.astuple(tiling)
    return "/".join(map(str, fields[:5] if fields[5:] == (32, 0) else fields))


def variants(rows: int, K: int, N: int, count: int) -> list:
    """(name, product, tiling or None): XLA's, XLA's in parts where the model cuts it, the kernel's."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.product.mosaic import partial_products, skinny_product
    from pallas_kernels.product.reference import gate_values
    from pallas_kernels.tilings import product_parts

    if (K, N) in GATED:
        found = [("xla", lambda x, w: gate_values(x @ w), None)]
        for tiling in choices(rows, K, N, count):
            run = jax.jit(lambda x, w, t=tiling: partial_products(x, w, t, dtype=x.dtype, gated=True)[0])
            found.append((name_of(tiling), run, tiling))
        return found
    found = [("xla", lambda x, w: x @ w, None)]
    parts = product_parts(rows, K, N)
    if parts > 1:

        def in_parts(x, w):
            x, w = x.reshape(rows, parts, K // parts), w.reshape(parts, K // parts, N)
            return jnp.einsum("RSI,SIO->SRO", x, w, preferred_element_type=jnp.float32).sum(0).astype(x.dtype)

        found.append((f"xla in {parts} parts", in_parts, None))
    for tiling in choices(rows, K, N, count):
        found.append((name_of(tiling), jax.jit(lambda x, w, t=tiling: skinny_product(x, w, t)), tiling))
    return found


def fold(y, K: int):
    """[R, N] -> [R, K], of all elements: the small fusion behind a product."""
    import jax.numpy as jnp

    R, N = y.shape
    if N < K:
        return jnp.concatenate([y] * -(-K // N), axis=1)[:, :K]
    return jnp.pad(y, ((0, 0), (0, -N % K))).reshape(R, -1, K).sum(axis=1)


def chain(product, calls: int, repeats: int):
    """`repeats` times `calls` dependent products; also the error and the first row of one."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.product.reference import gate_values

    def f(x, ws, wanted):
        def body(_, x):
            for i in range(calls):
                x = x + fold(product(x, ws[i % len(ws)]), x.shape[1]) * jnp.asarray(1e-30, x.dtype)
            return x

        y = product(x, ws[0])
        wanted = wanted[: x.shape[0]]
        if y.shape != wanted.shape:
            wanted = gate_values(wanted)
        error = jnp.linalg.norm(y.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
        return jax.lax.fori_loop(0, repeats, body, x), error, y[0]

    return jax.jit(f)


class Weights:
    """Weights and rows of one shape, with the exact product of the first; at least 400 MB, so that no cache holds them."""

    def __init__(self):
        self.key = None

    def get(self, K: int, N: int):
        """(x [128, K], weights, x @ first weight in float32)."""
        import jax
        import jax.numpy as jnp

        from jaxspec.benchmarking.shapes import random_tree

        if self.key != (K, N):
            self.value = None
            count = max(2, -(-400_000_000 // (2 * K * N)))
            tree = random_tree({str(i): {"kernel": (K, N)} for i in range(count)}, 0, jnp.bfloat16)
            ws = [layer["kernel"] for layer in tree.values()]
            x = jax.random.normal(jax.random.key(1), (128, K), jnp.bfloat16)
            exact = jax.jit(lambda x, w: jnp.dot(x, w, precision="highest", preferred_element_type=jnp.float32))
            self.key, self.value = (K, N), (x, ws, exact(x.astype(jnp.float32), ws[0].astype(jnp.float32)))
        return self.value


def measure(results: Rows, points: list, count: int) -> None:
    """Compiles all variants of a shape and a few numbers of rows side by side, then times them one by one."""
    import jax
    import numpy as np

    from jaxspec.runtime import compiler_options

    weights, groups = Weights(), {}
    for rows, shape in points:
        for variant in variants(rows, *shape, count):
            name = f"{shape[0]}x{shape[1]} rows={rows} {variant[0]}"
            if name not in results.rows:
                groups.setdefault((shape, rows >= 32), []).append((name, rows, *variant[1:]))
    xla_pool = concurrent.futures.ThreadPoolExecutor(1)  # autotuning runs on the device: one at a time
    pool = concurrent.futures.ThreadPoolExecutor(max(2, min(8, os.cpu_count() or 1)))
    for ((K, N), _), items in groups.items():
        if time.time() > results.stop - 8:
            break
        x, ws, wanted = weights.get(K, N)
        calls = len(ws) * -(-24 // len(ws))
        repeats = max(1, round(0.015 / (calls * (2 * K * N / 4e12 + 3e-6))))

        def compiled(item, x=x, ws=ws, wanted=wanted, calls=calls, repeats=repeats):
            lowered = chain(item[2], calls, repeats).lower(x[: item[1]], ws, wanted)
            return lowered.compile(compiler_options=compiler_options())

        futures = [(item, (xla_pool if item[3] is None else pool).submit(compiled, item)) for item in items]
        concurrent.futures.wait([f for _, f in futures], timeout=max(1.0, results.stop - 3 - time.time()))
        for (name, rows, _, tiling), future in futures:
            if not future.done():
                future.cancel()
                continue

            def timed(future=future, rows=rows, tiling=tiling, K=K, N=N, x=x, ws=ws, wanted=wanted, n=calls * repeats):
                f, x = future.result(), x[:rows]
                _, error, first = jax.block_until_ready(f(x, ws, wanted))
                seconds = best_time(f, x, ws, wanted) / (n + 1)
                row = {
                    "rows": rows,
                    "K": K,
                    "N": N,
                    "us": seconds * 1e6,
                    "gbps": 2 * K * N / seconds / 1e9,
                    "error": float(error),
                    "first_row": zlib.crc32(np.asarray(first).tobytes()),
                }
                if tiling is not None:
                    row |= {"tiling": dataclasses.astuple(tiling), "predicted_us": predicted(tiling, rows, K, N) * 1e6}
                return row

            results.run(name, timed, patience=20.0)
    for each in (xla_pool, pool):
        each.shutdown(wait=False, cancel_futures=True)


def winners(rows: dict) -> dict:
    """(rows, K, N) -> (tiling, its row, XLA's best row) where a correct tiling beats XLA."""
    points: dict = {}
    for row in rows.values():
        if "us" in row and row["error"] <= MOST_ERROR and math.isfinite(row["us"]):
            kind = "kernel" if "tiling" in row else "xla"
            points.setdefault((row["rows"], row["K"], row["N"]), {}).setdefault(kind, []).append(row)
    found = {}
    for key, kinds in sorted(points.items()):
        if len(kinds) == 2:
            kernel, xla = (min(kinds[kind], key=lambda r: r["us"]) for kind in ("kernel", "xla"))
            if key[0] >= FEWEST_ROWS and kernel["us"] < xla["us"] - LEAST_GAIN:
                found[key] = tuple(kernel["tiling"]), kernel, xla
    return found


def table_text(rows: dict) -> str:
    """The table's source."""
    lines = [
        '"""Which products the kernel of `skinny_product` takes, and how: written by `benchmarks/kernels/product.py --table`.',
        "",
        "(compute capability, rows up to which it holds, inputs, outputs) -> a `Tiling`. Where nothing stands",
        "XLA was as fast, or nobody has measured.",
        '"""',
        "",
        "MEASURED: dict[tuple[float, int, int, int], tuple[int, ...]] = {",
    ]
    for (tokens, K, N), (tiling, kernel, xla) in winners(rows).items():
        lines.append(f"    (9.0, {tokens}, {K}, {N}): {tiling},  # {kernel['us']:.1f} us; XLA {xla['us']:.1f}")
    return "\n".join([*lines, "}", ""]) if len(lines) > 7 else "\n".join([*lines[:-1], f"{lines[-1]}}}", ""])


def report(rows: dict) -> None:
    """Prints the points, fastest first, and whether a tiling's first row was the same for all numbers of rows."""
    points: dict = {}
    for name, row in rows.items():
        point, rest = name.split(" rows=")
        count, variant = rest.split(" ", 1)
        points.setdefault((point, int(count)), []).append((variant, row))
    for (point, count), cells in points.items():
        print(f"{point} rows={count}")
        for variant, row in sorted(cells, key=lambda c: c[1].get("us", 1e9)):
            if "us" not in row:
                print(f"   {variant:24s} {row['error'][:100]}")
                continue
            guess = f" predicted {row['predicted_us']:.1f}" if "predicted_us" in row else ""
            wrong = "  WRONG" if not row["error"] <= MOST_ERROR else ""
            print(f"   {variant:24s} {row['us']:7.1f} us {row['gbps']:5.0f} GB/s error {row['error']:.1e}{guess}{wrong}")
    seen: dict = {}
    for row in rows.values():
        if "tiling" in row:
            seen.setdefault((row["K"], row["N"], tuple(row["tiling"])), {})[row["rows"]] = row["first_row"]
    differing = {key: sums for key, sums in seen.items() if len(set(sums.values())) > 1}
    several = sum(len(sums) > 1 for sums in seen.values())
    print(f"first rows alike for all numbers of rows: {several - len(differing)} of {several} tilings", *differing.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=120, help="seconds in all (default: 120)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"), help="folder of products.json")
    parser.add_argument("--tries", type=int, default=5, help="tilings per point (default: 5)")
    parser.add_argument("--shapes", nargs="+", help="INPUTSxOUTPUTS instead of the built-in points")
    parser.add_argument("--rows", nargs="+", type=int, help="numbers of rows instead of the built-in ones")
    parser.add_argument("--table", type=pathlib.Path, metavar="JSON", help="only write the kernel's table from DIR/table.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.table is not None:
        rows = json.loads(args.table.read_text())["rows"]
        TABLE.write_text(table_text(rows))
        report(rows)
        return 0
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes or ()]
    points = [(r, s) for r, s in POINTS if not (shapes and s not in shapes) and not (args.rows and r not in args.rows)]
    points += [(r, s) for s in shapes for r in args.rows or (128, 64, 32, 16, 8, 1) if (r, s) not in POINTS]
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.child:
        results = Rows(out, "products", args.budget)
        measure(results, points, args.tries)
        return 0
    stop = time.time() + args.budget
    for _ in range(8):  # again behind a row that killed the process
        left = stop - time.time()
        if left < 15:
            break
        command = [sys.executable, str(HERE), *sys.argv[1:], "--child", "--out", str(out), "--budget", str(left - 6)]
        try:
            if subprocess.run(command, timeout=left - 2).returncode == 0:
                break
        except subprocess.TimeoutExpired:
            break
    rows = json.loads((out / "products.json").read_text())
    write_rows(out / "table.json", rows)
    report(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
