"""What a verify pass of many rows costs a chip at its power limit: each product run without pause, in ms, watts and joules.

    CUDA_VISIBLE_DEVICES=0 python benchmarks/kernels/sustained.py --rows 512 --budget 100 --out DIR

The products are those of a Llama-3.1-8B: qkv, out, gate_up with silu(gate) · up behind it, down, head (float32 results), over
the weights of all layers, so that each is read from memory. Ways of computing them: `xla`, as XLA chooses by itself
(autotuned); `cublas`, its Triton products switched off. Each has a process of its own, as XLA keeps what autotuning found as
long as a process lives.

A row runs for 0.7 s before it is measured for 1.5 s (`--warm`, `--seconds`); `burst` is the time at the start, after a pause,
at full clock. "round" is what one verify pass multiplies: the products of all layers in order, their sums added to a
residual stream, and the head once; "zeros" the same by XLA on zeros, which shows what switching bits costs (no remedy).
DIR/sustained.json gets every row at once; rows that are there are not measured again.
"""

from __future__ import annotations

import argparse
import collections
import math
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve()
for folder in (HERE.parent, HERE.parents[2]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from timing import Rows  # noqa: E402
from watch import Watch  # noqa: E402

from jaxspec.benchmarking.records import write_rows  # noqa: E402

LAYERS, HEADS = 32, 2
SHAPES = {"qkv": (4096, 6144), "out": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096), "head": (4096, 128256)}
IN_PASS = {name: 1 if name == "head" else LAYERS for name in SHAPES}
FLAGS = {"xla": "", "cublas": "--xla_gpu_enable_triton_gemm=false"}
IN_FLIGHT, BURST = 6, 0.015


def random_weights() -> dict:
    """name -> arrays [K, N] of all layers, as the benchmark of rounds makes them."""
    import jax.numpy as jnp

    from jaxspec.benchmarking.shapes import random_tree

    shapes = {n: {f"{i:02d}": {"kernel": s} for i in range(HEADS if n == "head" else LAYERS)} for n, s in SHAPES.items()}
    tree = random_tree(shapes, 0, jnp.bfloat16)
    return {name: [layer["kernel"] for layer in layers.values()] for name, layers in tree.items()}


def product(name: str, x, w):
    """What lies behind the product of x [R, K] and w [K, N]: [R, N], [R, N / 2] behind gate_up."""
    import jax.numpy as jnp

    from pallas_kernels.product.reference import gate_values

    y = jnp.matmul(x, w, preferred_element_type=jnp.float32 if name == "head" else jnp.bfloat16)
    return gate_values(y) if name == "gate_up" else y


def one_product(name: str):
    """Every layer's product of one name, one behind the other, with the same rows: the sum of a few of each one's numbers.

    The barriers keep XLA from computing only what is returned, and from multiplying all layers' weights at once.
    """
    import jax

    def f(x, ws):
        results = []
        for w in ws[name]:
            x, y = jax.lax.optimization_barrier((x, product(name, x, w)))
            results.append(y[:1, :8])
        return sum(results)

    return f


def verify_pass(x, ws):
    """Logits [R, V] behind the products of all layers and the head's; qkv's first columns stand for attention's result.

    The sums are halved in variance where a model has its norms: a stream that grows ends in NaN, which takes less power.
    """
    import jax

    h = x
    for layer in range(len(ws["qkv"])):
        for first, second in (("qkv", "out"), ("gate_up", "down")):
            w = ws[second][layer]
            y = jax.lax.optimization_barrier(product(first, h, ws[first][layer]))[:, : w.shape[0]]  # all of it, then some
            h = (x + product(second, y, w)) * math.sqrt(0.5)
    return product("head", h, ws["head"][0])


def steady(call, watch: Watch, warm: float, seconds: float) -> tuple[float, float, dict]:
    """Seconds of a call at the start and in the long run, and what the chip did meanwhile."""
    import jax

    def run(stop: float, most: int = IN_FLIGHT) -> tuple[float, float, int]:
        start, count, waiting = time.perf_counter(), 0, collections.deque()
        while time.perf_counter() < start + stop or not count:
            waiting.append(call())
            count += 1
            if len(waiting) > most:
                jax.block_until_ready(waiting.popleft())
        jax.block_until_ready(list(waiting))
        return start, time.perf_counter(), count

    jax.block_until_ready(call())
    time.sleep(0.3)  # so that the clock is up again
    start, end, count = run(BURST, 1)
    burst = (end - start) / count
    run(warm)
    start, end, count = run(seconds)
    return burst, (end - start) / count, watch.summary(start, end)


def measure(results: Rows, way: str, rows: int, warm: float, seconds: float, watch: Watch) -> None:
    """All rows of one way, in this process."""
    import jax
    import jax.numpy as jnp

    from jaxspec.runtime import use_compilation_cache

    use_compilation_cache()
    x = {name: jax.random.normal(jax.random.key(1), (rows, k), jnp.bfloat16) for name, (k, _) in SHAPES.items()}
    ws = random_weights()
    flops = {name: 2 * rows * k * n for name, (k, n) in SHAPES.items()}
    # no graphs: the products do not depend on each other, and a stream runs them in order whatever a graph would do
    options = {"xla_gpu_enable_command_buffer": ""} if jax.default_backend() in ("gpu", "cuda") else {}

    def row(name, f, x, ws, count, flops, way=way):
        run = jax.jit(f).lower(x, ws).compile(compiler_options=options)
        if not jnp.isfinite(run(x, ws)).all():
            raise FloatingPointError(f"{way} {name}: results that are not finite; such numbers take less power")
        burst, long, chip = steady(lambda: run(x, ws), watch, warm, seconds)
        found = {
            "product": name,
            "way": way,
            "rows": rows,
            "ms": long * 1e3 / count,
            "burst_ms": burst * 1e3 / count,
            "tflops": flops * count / long / 1e12,
            **chip,
        }
        return found | {"joules": chip["watts"] * long / count} if "watts" in chip else found

    for name in SHAPES:
        results.run(f"{way} {name}", lambda n=name: row(n, one_product(n), x[n], ws, len(ws[n]), flops[n]), patience=60.0)
    whole = ("round", verify_pass, x["qkv"], ws, 1, sum(IN_PASS[name] * flops[name] for name in SHAPES))
    results.run(f"{way} round", lambda: row(*whole), patience=60.0)
    if way == "xla":
        nothing = jax.tree.map(jnp.zeros_like, whole[2:4])
        results.run("zeros round", lambda: row(*whole[:2], *nothing, *whole[4:], way="zeros"), patience=60.0)


def report(rows: dict) -> None:
    """A line for each row, and for each way what the single products add up to in a round."""
    keys = ("ms", "burst_ms", "tflops", "watts", "sm_mhz", "joules")
    print(f"{'':15s}      ms  burst TFLOP/s     W  SM MHz      J")
    for label, row in rows.items():
        if "ms" not in row:
            print(label, row["error"][:200])
            continue
        ms, burst, tflops, watts, sm, joules = (row.get(key, math.nan) for key in keys)
        print(f"{label:15s} {ms:7.4f} {burst:6.4f} {tflops:7.0f} {watts:5.0f} {sm:7.0f} {joules:6.4f}")
    for way in FLAGS:
        single = {name: rows.get(f"{way} {name}", {}) for name in SHAPES}
        ms, joules = (sum(IN_PASS[n] * row.get(key, math.nan) for n, row in single.items()) for key in ("ms", "joules"))
        print(f"{way}: the single products of a round take {ms:.2f} ms, {joules:.2f} J")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="tokens (default: 512)")
    parser.add_argument("--budget", type=float, default=100, help="seconds in all (default: 100)")
    parser.add_argument("--warm", type=float, default=0.7, help="seconds before a row is measured (default: 0.7)")
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds that it is measured for (default: 1.5)")
    parser.add_argument("--ways", nargs="+", choices=FLAGS, default=list(FLAGS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"), help="folder of sustained.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    out, stop = args.out.resolve(), time.time() + args.budget
    out.mkdir(parents=True, exist_ok=True)
    if args.child:
        with Watch() as watch:
            measure(Rows(out, "sustained", args.budget), args.ways[0], args.rows, args.warm, args.seconds, watch)
        return 0
    for way in args.ways:
        left = stop - time.time()
        if left < 12:
            break
        command = [sys.executable, str(HERE), "--child", "--ways", way, "--out", str(out), "--budget", str(left - 3)]
        command += ["--rows", str(args.rows), "--warm", str(args.warm), "--seconds", str(args.seconds)]
        flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS[way]}".strip()
        try:
            subprocess.run(command, timeout=left, env={**os.environ, "XLA_FLAGS": flags})
        except subprocess.TimeoutExpired:
            break
    rows = Rows(out, "sustained", 0).rows
    write_rows(out / "table.json", rows)
    report(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
