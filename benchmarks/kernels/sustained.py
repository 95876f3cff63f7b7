"""What a verify pass of many rows costs a chip at its power limit: each product run without pause, in ms, watts and joules.

    CUDA_VISIBLE_DEVICES=0 python benchmarks/kernels/sustained.py --rows 512 --budget 150 --out DIR
    python benchmarks/kernels/sustained.py --table benchmarks/results/h200_sustained.json   # anywhere: writes the table

The products are those of a Llama-3.1-8B: qkv, out, gate_up with silu(gate) · up behind it, down, head (float32 results), over
the weights of all layers, so that each is read from memory. Ways of computing them: `xla`, as XLA chooses by itself
(autotuned); `cublas`, its Triton products switched off; `kernel`, the tilings of `pallas_kernels.wide_product` that fit; `mix`,
each product the way that took the fewest joules. Every way has a process of its own, as XLA keeps what autotuning found as
long as a process lives.

A row runs for 0.7 s before it is measured for 1.5 s (`--warm`, `--seconds`); `burst` is the time at the start, after a pause,
at full clock. "round" is what one verify pass multiplies: the products of all layers in order, their sums added to the
residual stream, and the head once; "zeros" the same by XLA on zeros, which shows what switching bits costs (no remedy).
DIR/sustained.json gets every row at once; rows that are there are not measured again.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve()
for folder in (HERE.parent, HERE.parents[2]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from timing import Rows  # noqa: E402

TABLE = HERE.parents[2] / "pallas_kernels" / "wide_table.py"
LAYERS, HEADS = 32, 2
SHAPES = {"qkv": (4096, 6144), "out": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096), "head": (4096, 128256)}
LAYER = ("qkv", "out", "gate_up", "down")
WAYS = ("xla", "kernel", "cublas", "mix")
NO_TRITON = "--xla_gpu_enable_triton_gemm=false"
TILINGS = {
    "qkv": [(192,), (192, 64, 1, 1)],
    "out": [(128,), (256, 64, 2, 2, 32)],
    "gate_up": [(224, 64, 1, 2, 112), (256,), (256, 64, 1, 4), (224, 64, 1, 2, 224)],
    "down": [(128,), (256, 64, 2, 2, 32)],
    "head": [(256, 64, 1, 2, 32)],
}
"""Fields of `wide_product.Tiling`; those that can gate end in gate_up's activation."""
MOST_ERROR = 6e-3  # rounding to bfloat16 alone makes 1.7e-3
IN_FLIGHT, BURST = 6, 0.015
QUERY = "power.draw.instant,clocks.sm,clocks.mem"


class Sampler:
    """Power and clocks of the first visible GPU, asked for every 20 ms in the background; empty without nvidia-smi."""

    def __init__(self):
        self.seen: list[tuple[float, float, float, float]] = []
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
        command = ["nvidia-smi", "-i", visible, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-lms", "20"]
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            self.process = None
            return
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            try:
                watts, sm, memory = map(float, line.split(","))
            except ValueError:  # not available, or an error message
                continue
            self.seen.append((time.perf_counter(), watts, sm, memory))

    def between(self, start: float, stop: float) -> dict:
        """Means of what was seen between two moments."""
        rows = [row[1:] for row in list(self.seen) if start <= row[0] <= stop]
        if not rows:
            return {}
        watts, sm, memory = (statistics.mean(column) for column in zip(*rows, strict=True))
        return {"watts": round(watts, 1), "sm_mhz": round(sm), "memory_mhz": round(memory), "samples": len(rows)}

    def close(self):
        """Ends nvidia-smi."""
        if self.process is not None:
            self.process.terminate()


@dataclasses.dataclass(frozen=True)
class Way:
    """How a product is computed: by XLA, or by the kernel with these fields of a tiling, which may end in the activation."""

    tiling: tuple[int, ...] | None = None
    gated: bool = False

    @property
    def name(self) -> str:
        if self.tiling is None:
            return "xla"
        return "/".join(map(str, self.tiling)) + (" gated" if self.gated else "")

    def product(self, name: str):
        """(x [R, K], w [K, N]) -> what lies behind the product: [R, N], [R, N / 2] behind gate_up."""
        import jax.numpy as jnp

        from jaxspec.models.layers import gate_values

        dtype = jnp.float32 if name == "head" else jnp.bfloat16
        if self.tiling is None:
            run = functools.partial(jnp.matmul, preferred_element_type=dtype)
        else:
            run = functools.partial(_by_kernel, tiling=self.tiling, dtype=dtype, gated=self.gated)
        if name != "gate_up" or self.gated:
            return run
        return lambda x, w: gate_values(run(x, w), "silu")


def _by_kernel(x, w, *, tiling, dtype, gated):
    import jax.numpy as jnp

    from pallas_kernels import wide_product

    tiling = wide_product.Tiling(*tiling)
    p = wide_product.partial_products(x, w, tiling, dtype=dtype if tiling.cuts == 1 else jnp.float32, gated=gated)
    return wide_product.add_parts(p, tiling, w.shape[0]).astype(dtype)


def random_weights() -> dict:
    """name -> arrays [K, N] of all layers, as the benchmark of rounds makes them."""
    import jax.numpy as jnp

    from jaxspec.benchmarking.shapes import random_tree

    shapes = {n: {f"{i:02d}": {"kernel": s} for i in range(HEADS if n == "head" else LAYERS)} for n, s in SHAPES.items()}
    tree = random_tree(shapes, 0, jnp.bfloat16)
    return {name: [layer["kernel"] for layer in layers.values()] for name, layers in tree.items()}


def one_product(name: str, way: Way):
    """Every layer's product of one name, one behind the other, with the same rows: a few of each one's numbers, the first one.

    The barriers keep XLA from computing only what is returned, and from multiplying all layers' weights at once.
    """
    import jax

    product = way.product(name)

    def f(x, ws):
        results = []
        for w in ws[name]:
            x, y = jax.lax.optimization_barrier((x, product(x, w)))
            results.append(y)
        return sum(y[:1, :8] for y in results), results[0]

    return f


def verify_pass(ways: dict[str, Way]):
    """The products of all layers in order and the head's; the first columns of qkv stand for attention's result."""
    products = {name: way.product(name) for name, way in ways.items()}

    def f(x, ws):
        h = x
        for layer in range(LAYERS):
            for first, second in (("qkv", "out"), ("gate_up", "down")):
                y = products[first](h, ws[first][layer])[:, : SHAPES[second][0]]
                h = x + products[second](y, ws[second][layer])
        return products["head"](h, ws["head"][0])

    return f


def steady(call, sampler: Sampler, warm: float, seconds: float) -> tuple[float, float, dict]:
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
        end = time.perf_counter()
        return start, end, count

    jax.block_until_ready(call())
    time.sleep(0.3)  # so that the clock is up again
    start, end, count = run(BURST, 1)
    burst = (end - start) / count
    run(warm)
    start, end, count = run(seconds)
    return burst, (end - start) / count, sampler.between(start, end)


def distance(found, wanted) -> float:
    """Relative distance of two results."""
    import jax.numpy as jnp

    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))


def candidates(way: str, rows: int) -> dict[str, list[Way]]:
    """name -> the ways of computing it that are measured one by one."""
    if way != "kernel":
        return {name: [Way()] for name in SHAPES} if way in ("xla", "cublas") else {}
    from pallas_kernels.wide_product import Tiling

    found: dict[str, list[Way]] = {}
    for name, fields in TILINGS.items():
        tilings = [t for t in (Tiling(*each) for each in fields) if t.fits(rows, *SHAPES[name])]
        found[name] = [Way(dataclasses.astuple(t), name == "gate_up" and t.gates(rows, *SHAPES[name])) for t in tilings]
    return found


def fewest_joules(rows: dict, ways: tuple[str, ...]) -> dict[str, dict]:
    """name -> the correct row that takes the fewest joules, or the least time where no power was seen."""
    best: dict[str, dict] = {}
    for row in rows.values():
        if row.get("way") in ways and row["product"] in SHAPES and row.get("error", 0) <= MOST_ERROR:
            held = best.setdefault(row["product"], row)
            best[row["product"]] = min(held, row, key=lambda r: r.get("joules", r["ms"]))
    return best


def way_of(row: dict) -> Way:
    """How a row's product was computed."""
    return Way(None if row["tiling"] is None else tuple(row["tiling"]), row["gated"])


def measure(results: Rows, way: str, rows: int, warm: float, seconds: float, sampler: Sampler) -> None:
    """All rows of one way, in this process; compiles them first, XLA's one at a time, as it tunes them on the chip."""
    import jax
    import jax.numpy as jnp

    from jaxspec.runtime import use_compilation_cache

    use_compilation_cache()
    x = {name: jax.random.normal(jax.random.key(1), (rows, k), jnp.bfloat16) for name, (k, _) in SHAPES.items()}
    ws = random_weights()
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (x, ws))
    pools = {kernel: concurrent.futures.ThreadPoolExecutor(6 if kernel else 1) for kernel in (False, True)}
    # no graphs: the products do not depend on each other, and a stream runs them in order whatever a graph would do
    options = {"xla_gpu_enable_command_buffer": ""} if jax.default_backend() in ("gpu", "cuda") else {}
    flops = {name: 2 * rows * k * n for name, (k, n) in SHAPES.items()}
    in_all = LAYERS * sum(flops[name] for name in LAYER) + flops["head"]

    def compiled(f, *names):
        return jax.jit(f).lower(*(shapes[0][name] for name in names), shapes[1]).compile(compiler_options=options)

    def timed(run, count, flops, **row):
        burst, long, chip = steady(run, sampler, warm, seconds)
        row |= {"way": way, "rows": rows, "ms": long * 1e3 / count, "burst_ms": burst * 1e3 / count,
                "tflops": flops * count / long / 1e12, **chip}  # fmt: skip
        return row | {"joules": chip["watts"] * long / count} if "watts" in chip else row

    def one(name, choice, run, wanted):
        row = timed(lambda: run(x[name], ws), len(ws[name]), flops[name],
                    product=name, tiling=choice.tiling, gated=choice.gated)  # fmt: skip
        if choice.tiling is not None:
            row["error"] = distance(run(x[name], ws)[1], wanted.result()(x[name], ws))
        return row

    def whole(own, run, ws=ws, x=x["qkv"]):
        by_xla = "cublas" if NO_TRITON in os.environ.get("XLA_FLAGS", "") else "xla"
        chosen = {name: by_xla if choice.tiling is None else choice.name for name, choice in own.items()}
        return timed(lambda: run(x, ws), 1, in_all, product=None, tiling=None, gated=False, ways=chosen)

    if way in ("xla", "cublas"):
        own = {name: Way() for name in SHAPES}
    else:
        own = {name: way_of(row) for name, row in fewest_joules(results.rows, ("xla", "cublas", "kernel")).items()}
    tries = [(name, choice) for name, choices in candidates(way, rows).items() for choice in choices]
    runs = [pools[choice.tiling is not None].submit(compiled, one_product(name, choice), name) for name, choice in tries]
    wanted = {name: pools[False].submit(compiled, lambda x, ws, n=name: Way().product(n)(x, ws[n][0]), name)
              for name in (SHAPES if way == "kernel" else ())}  # fmt: skip
    round_run = None if way == "kernel" else pools[False].submit(compiled, verify_pass(own), "qkv")
    concurrent.futures.wait([f for f in (*runs, *wanted.values(), round_run) if f is not None])
    for (name, choice), run in zip(tries, runs, strict=True):
        label = f"{way} {name}" + (f" {choice.name}" if way == "kernel" else "")
        results.run(label, lambda n=name, c=choice, r=run: one(n, c, r.result(), wanted.get(n)), patience=25.0)
    if way == "kernel":
        own = {name: way_of(row) for name, row in fewest_joules(results.rows, ("kernel",)).items()}
        if len(own) < len(SHAPES):
            return
        round_run = pools[True].submit(compiled, verify_pass(own), "qkv")
    results.run(f"{way} round", lambda: whole(own, round_run.result()), patience=25.0)
    if way == "xla":
        nothing = jax.tree.map(jnp.zeros_like, (ws, x["qkv"]))
        results.run("zeros round", lambda: whole(own, round_run.result(), *nothing) | {"way": "zeros"}, patience=25.0)


def table_text(rows: dict) -> str:
    """The source of the table that follows from measurements: where the kernel took fewer joules than XLA by either way."""
    lines = []
    for name, row in fewest_joules(rows, ("xla", "cublas", "kernel")).items():
        other = fewest_joules(rows, ("xla", "cublas")).get(name)
        if row["way"] == "kernel" and other is not None:
            cost = "; ".join(f"{r['way']} {r['ms'] * 1e3:.1f} us, {r['joules'] * 1e3:.1f} mJ" for r in (row, other))
            lines.append(f"    (9.0, {row['rows']}, {SHAPES[name][0]}, {SHAPES[name][1]}): {way_of(row).tiling},  # {cost}")
    head, _, _ = TABLE.read_text().partition("= {")
    return head + "= {" + "\n".join(["", *lines, "}"] if lines else ["}"]) + "\n"


def report(rows: dict) -> None:
    """A line for each row."""
    order = [*SHAPES, None]
    found = sorted((r for r in rows.values() if "ms" in r), key=lambda r: (order.index(r["product"]), r.get("joules", r["ms"])))
    print(f"{'':8s} {'way':38s}     ms  burst TFLOP/s     W  SM MHz      J")
    for row in found:
        way = row["way"] if row["tiling"] is None else way_of(row).name
        chip = [row.get(key, math.nan) for key in ("watts", "sm_mhz", "joules")]
        wrong = "  WRONG" if not row.get("error", 0) <= MOST_ERROR else ""
        print(f"{row['product'] or 'round':8s} {way:38s} {row['ms']:6.4f} {row['burst_ms']:6.4f} {row['tflops']:7.0f} "
              f"{chip[0]:5.0f} {chip[1]:7.0f} {chip[2]:6.4f}{wrong}")  # fmt: skip
    for name, row in rows.items():
        if "ms" not in row:
            print(name, row["error"][:200])
        elif "ways" in row:
            print(name, row["ways"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="tokens (default: 512)")
    parser.add_argument("--budget", type=float, default=150, help="seconds in all (default: 150)")
    parser.add_argument("--warm", type=float, default=0.7, help="seconds before a row is measured (default: 0.7)")
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds that it is measured for (default: 1.5)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"), help="folder of sustained.json")
    parser.add_argument("--table", type=pathlib.Path, metavar="JSON", help="only write the table from such a file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.table is not None:
        rows = json.loads(args.table.read_text())
        TABLE.write_text(table_text(rows))
        report(rows)
        return 0
    out, stop = args.out.resolve(), time.time() + args.budget
    out.mkdir(parents=True, exist_ok=True)
    if args.child:
        sampler = Sampler()
        measure(Rows(out, "sustained", args.budget), args.ways[0], args.rows, args.warm, args.seconds, sampler)
        sampler.close()
        return 0
    for way in args.ways:
        for _ in range(3):  # again behind a row that killed the process
            left = stop - time.time()
            if left < 12:
                break
            rows = Rows(out, "sustained", 0).rows
            used = collections.Counter(row["way"] for row in fewest_joules(rows, ("xla", "cublas", "kernel")).values())
            without = way == "cublas" or (way == "mix" and used["cublas"] > used["xla"])
            flags = f"{os.environ.get('XLA_FLAGS', '')} {NO_TRITON if without else ''}".strip()
            command = [sys.executable, str(HERE), "--child", "--ways", way, "--out", str(out), "--budget", str(left - 3)]
            command += ["--rows", str(args.rows), "--warm", str(args.warm), "--seconds", str(args.seconds)]
            try:
                if subprocess.run(command, timeout=left, env={**os.environ, "XLA_FLAGS": flags}).returncode == 0:
                    break
            except subprocess.TimeoutExpired:
                break
    report(Rows(out, "sustained", 0).rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
