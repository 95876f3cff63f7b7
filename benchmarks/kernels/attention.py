"""Attention alone on a GPU: time, GB/s and share of the KV bytes' floor, for both back ends and several tilings.

    python benchmarks/kernels/attention.py --out DIR --budget 200                 # the points that have a target
    python benchmarks/kernels/attention.py --out DIR --parts bandwidth,targets,choices,more,commit,ncu --budget 400

Each part runs in a process of its own and writes DIR/<part>.json after every row: a kernel that crashes or hangs costs its
row, and a part that is started again goes on behind the rows that it has. DIR/attention.json collects all rows.
A row's time is that of one call among many dependent ones inside one jitted loop, over enough distinct pools that none
stays in the L2 cache. As in a model of 32 layers, 32 calls share one preparation of the mask; rows named "own mask" make
every call prepare its own. Floor: bytes of the live keys and values over the read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

H, K, D = 32, 8, 128
LAYERS = 32  # calls that share a mask
PARTS = {"bandwidth": 25, "targets": 80, "choices": 100, "more": 90, "commit": 30, "ncu": 45}  # seconds at most
TARGETS = [(1, 8192, 1), (16, 8192, 1), (64, 8192, 1), (1, 32768, 1), (16, 32768, 1), (1, 8192, 8), (16, 8192, 8)]
TARGETS += [(T, 512, B) for B in (1, 8) for T in (1, 16, 64)]

# Choices beside the default, as split/block/rows/warps/stages.
CHOICES = {
    (16, 8192, 1): "triton 512/128/64/8/3, 512/128/64/8/2, 512/64/64/8/4, 256/64/64/4/3, 256/128/64/8/2, 512/128/64/4/2; "
                   "mosaic 512/64/64/4/4, 512/128/64/4/2",
    (16, 32768, 1): "triton 2048/128/64/8/3, 2048/128/64/8/2, 1024/64/64/4/3, 1024/128/64/8/2, 2048/64/64/8/4; "
                    "mosaic 1024/128/64/4/2",
    (16, 8192, 8): "triton 2048/128/64/8/3, 2048/128/64/8/2, 1024/64/64/4/3, 2048/64/64/8/4; mosaic 2048/128/64/4/2",
    (16, 512, 1): "triton 128/128/16/4/3, 64/64/16/4/2, 128/64/16/4/2, 128/128/32/4/2, 256/128/16/4/2, 128/128/16/8/2",
    (4, 512, 1): "triton 64/64/16/4/2, 128/64/16/4/2, 256/128/16/4/2, 128/128/16/8/2",
    (16, 512, 8): "triton 0/128/16/4/3, 0/128/32/8/2, 256/128/32/4/2; mosaic 256/64/64/4/2",
    (64, 8192, 1): "triton 1024/128/64/8/3, 1024/64/64/4/3; mosaic 1024/64/64/4/2",
}  # fmt: skip


class Rows:
    """One part's rows on disk after every measurement."""

    def __init__(self, out: pathlib.Path, part: str, limit: float):
        self.path = out / f"{part}.json"
        self.rows = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.stop = time.time() + limit

    def save(self):
        """Writes all rows in one step."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(self.rows, indent=1))
        fresh.replace(self.path)

    def run(self, name, measure, patience=25.0):
        """Adds the row `measure()`; what was tried before, also fatally, is not tried again."""
        if name in self.rows or time.time() > self.stop - 1:
            return
        self.rows[name] = {"error": "killed the process or hung"}
        self.save()
        dog = threading.Timer(patience, os._exit, (8,))
        dog.daemon = True
        dog.start()
        try:
            self.rows[name] = measure()
        except Exception as e:  # a benchmark reports and goes on
            text = f"{type(e).__name__}: {e}"
            print(name, text[:1500], flush=True)
            self.rows[name] = {"error": text[:300]}
            if any(w in text for w in ("CUDA_ERROR", "illegal", "LAUNCH_FAILED", "MISALIGNED")):
                self.save()
                os._exit(7)
        finally:
            dog.cancel()
        self.save()
        print(name, self.rows[name], flush=True)


def best_time(f, *args, target=0.03):
    """Seconds of one call: the best of four batches, each waited for once."""
    import jax

    jax.block_until_ready(f(*args))
    start = time.perf_counter()
    jax.block_until_ready(f(*args))
    once = time.perf_counter() - start
    calls = max(1, min(100, int(target / max(once, 1e-6))))
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(calls):
            out = f(*args)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def bandwidth(rows: Rows):
    """Copy and read rate over gigabytes."""
    import jax
    import jax.numpy as jnp

    words = jax.jit(lambda k: jax.random.bits(k, (2**31,), jnp.uint32))(jax.random.key(0))
    half = words[: 2**30]

    def rate(f, x, moved):
        seconds = best_time(jax.jit(f), x, target=0.1)
        return {"tbps": moved / seconds / 1e12, "ms": seconds * 1e3}

    rows.run("copy", lambda: rate(lambda x: x + 1, half, 2 * half.nbytes))
    rows.run("read, sum", lambda: rate(jnp.sum, words, words.nbytes))
    rows.run("read, max of rows", lambda: rate(lambda x: x.reshape(-1, 2**14).max(axis=1), words, words.nbytes))


def read_rate(out: pathlib.Path) -> float:
    """Best read rate of this run in bytes per second; an H200's as measured before where there is none."""
    path = out / "bandwidth.json"
    rates = [r.get("tbps", 0) for r in json.loads(path.read_text()).values()] if path.exists() else []
    return (max(rates, default=0) or 4.59) * 1e12


class Pools:
    """Pools, tables and queries of one (context, batch, page size), made once and kept while they are asked for."""

    def __init__(self):
        self.key = None

    def get(self, L: int, B: int, S: int):
        """(k pools, v pools, table): enough pools for 400 MB in all."""
        import jax
        import jax.numpy as jnp
        import numpy as np

        if self.key != (L, B, S):
            self.value = None
            N = L // S + max(1, 64 // S)
            P = B * N + 1
            size = 2 * P * S * K * D * 2
            draw = jax.jit(lambda k: jax.random.normal(k, (P, S, K, D), jnp.bfloat16))
            count = max(2, min(32, -(-400_000_000 // size)))
            ks, vs = ([draw(jax.random.key(2 * i + j)) for i in range(count)] for j in (0, 1))
            table = np.random.default_rng(0).permutation(np.arange(1, P)).reshape(B, N).astype(np.int32)
            self.key, self.value = (L, B, S), (ks, vs, jnp.asarray(table))
        return self.value


def tree_inputs(T: int, L: int, B: int):
    """Queries and a random tree of T nodes behind L - T committed tokens."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(T)
    seen, depth = np.eye(T, dtype=bool), np.zeros(T, np.int32)
    for i in range(1, T):
        parent = int(rng.integers(0, i))
        seen[i] |= seen[parent]
        depth[i] = depth[parent] + 1
    words = -(-T // 32)
    bits = np.zeros((T, words * 32), np.uint64)
    bits[:, :T] = seen
    packed = (bits.reshape(T, words, 32) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32)
    positions = jnp.broadcast_to(jnp.asarray(L - T + depth), (B, T)).astype(jnp.int32)
    visible = jnp.broadcast_to(jnp.asarray(packed), (B, T, words))
    q = jnp.asarray(rng.standard_normal((B, T, H, D)), jnp.bfloat16)
    return q, jnp.full((B,), L - T, jnp.int32), visible, positions


def calls_of_body(pools: int) -> int:
    """Whole rounds of the pools, one layer's call each."""
    return -(-LAYERS // pools) * pools


def chain(attend, calls: int, own_mask: bool = False):
    """`calls` times 32 calls or more, round the pools, in one program; each result is the next call's queries."""
    import jax

    def f(q, ks, vs, table, length, visible, positions):
        def body(_, q):
            for i in range(calls_of_body(len(ks))):
                k, v = ks[i % len(ks)], vs[i % len(ks)]
                here = positions + (q[0, 0, 0, 0] > 1e30).astype(positions.dtype) if own_mask else positions
                q = attend(q, k, v, table, length, visible, here)
            return q

        return jax.lax.fori_loop(0, calls, body, q)

    return jax.jit(f)


def gather_and_xla(q, k, v, table, length, visible, positions):
    """What a program without a kernel does: gather the pages, then XLA's attention under a mask."""
    import jax

    from pallas_kernels import reference

    L = table.shape[1] * k.shape[1]
    mask = reference.visible_slots(length, visible, positions, positions, L, None)
    k, v = (p[table].reshape(table.shape[0], L, K, D) for p in (k, v))
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])


def attention_call(backend: str | None, tiling=None):
    """The call that a chain repeats."""
    from pallas_kernels import tree_attention

    if backend == "xla":
        return gather_and_xla

    def attend(q, k, v, table, length, visible, positions):
        return tree_attention(
            q, k, v, table, length, visible, positions, positions, scale=D**-0.5, backend=backend, tiling=tiling
        )  # fmt: skip

    return attend


def measure_points(rows: Rows, out: pathlib.Path, todo: list):
    """Compiles all (name, attend, T, L, B, S) of one context and batch in parallel, then times them one by one."""
    rate, pools = read_rate(out), Pools()
    groups: dict = {}
    for item in todo:
        if item[0] not in rows.rows:
            groups.setdefault(item[3:], []).append(item)
    for (L, B, S), items in groups.items():
        if time.time() > rows.stop - 4:
            return
        ks, vs, table = pools.get(L, B, S)
        kv_bytes = 2 * B * L * K * D * 2
        body = calls_of_body(len(ks))
        calls = max(2, int(0.01 / (max(kv_bytes / rate, 5e-6) * 2 * body)))

        def compiled(item, calls=calls, ks=ks, vs=vs, table=table, L=L, B=B):
            q, length, visible, positions = tree_inputs(item[2], L, B)
            arguments = (q, ks, vs, table, length, visible, positions)
            return chain(item[1], calls, item[0].endswith("own mask")).lower(*arguments).compile(), arguments

        with concurrent.futures.ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
            futures = [(item, pool.submit(compiled, item)) for item in items]
            concurrent.futures.wait([f for _, f in futures], timeout=max(1.0, rows.stop - time.time()))
            for (name, _, T, *_), future in futures:

                def measure(future=future, T=T, calls=calls, body=body, L=L, B=B, S=S, kv_bytes=kv_bytes):
                    f, arguments = future.result(timeout=20)
                    seconds = best_time(f, *arguments) / (calls * body)
                    row = {"T": T, "context": L, "batch": B, "page": S, "us": seconds * 1e6}
                    return row | {"gbps": kv_bytes / seconds / 1e9, "share": kv_bytes / rate / seconds}

                rows.run(name, measure)


def label(tiling) -> str:
    """A tiling in few characters: split/block/rows/warps/stages."""
    return f"{tiling.split}/{tiling.block}/{tiling.rows}/{tiling.num_warps}/{tiling.num_stages}"


def default_backend(T: int, L: int, B: int) -> str:
    """What `tree_attention` chooses at a point, for a row's name."""
    import importlib

    import jax
    import jax.numpy as jnp

    from pallas_kernels import device

    entry = importlib.import_module("pallas_kernels.tree_attention")
    q = jax.ShapeDtypeStruct((B, T, H, D), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((1, 16, K, D), jnp.bfloat16)
    return entry.choose_backend(q, pool, pool, L + 64, device.capability())


def targets_part(rows: Rows, out: pathlib.Path):
    """The default choice at every point that has a target, the other back end and, where it is short, XLA beside it."""
    todo = []
    for T, L, B in TARGETS:
        chosen, point = default_backend(T, L, B), f"T={T} L={L} B={B}"
        todo.append((f"{point} default ({chosen})", attention_call(None), T, L, B, 16))
        todo += [(f"{point} {x}", attention_call(x), T, L, B, 16) for x in ("mosaic", "triton") if x != chosen]
        if L == 512 and T < 64:
            todo.append((f"{point} xla", attention_call("xla"), T, L, B, 16))
        if (L, B) == (512, 1):
            todo.append((f"{point} default ({chosen}), own mask", attention_call(None), T, L, B, 16))
    measure_points(rows, out, todo)


def choices_part(rows: Rows, out: pathlib.Path):
    """A few other tilings at the same points."""
    from pallas_kernels.tilings import Tiling

    todo = []
    for (T, L, B), text in CHOICES.items():
        for clause in text.split("; "):
            backend, values = clause.split(" ", 1)
            for value in values.split(", "):
                tiling = Tiling(*map(int, value.split("/")))
                todo.append((f"T={T} L={L} B={B} {backend} {value}", attention_call(backend, tiling), T, L, B, 16))
    measure_points(rows, out, todo)


def more_part(rows: Rows, out: pathlib.Path):
    """Both back ends' own choice at points without a target, and at other page sizes."""
    points = [(T, L, B, 16) for L, B in ((32768, 8), (2048, 1), (2048, 8)) for T in (1, 16, 64)]
    points += [(64, 32768, 1, 16), (64, 8192, 8, 16)] + [(T, 8192, 1, S) for S in (64, 1) for T in (1, 16)]
    todo = []
    for T, L, B, S in points:
        for backend in ("mosaic", "triton")[S == 1 :]:
            todo.append((f"T={T} L={L} B={B} {backend} S={S}", attention_call(backend), T, L, B, S))
    measure_points(rows, out, todo)


def commit_part(rows: Rows, out: pathlib.Path):
    """Write and compaction of a few entries in big donated pools, per layer."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.kv_commit import kv_compact_layers, kv_write

    layers, S, P = 32, 16, 4096
    make = jax.jit(lambda: [jnp.zeros((P, S, K, D), jnp.bfloat16) for _ in range(2 * layers)])

    def timed(step, *arguments):
        def f(pools, *arguments):
            return jax.lax.fori_loop(0, 20, lambda _, p: step(p, *arguments), pools)

        compiled = jax.jit(f, donate_argnums=0).lower(make(), *arguments).compile()
        pools, best = compiled(make(), *arguments), float("inf")
        for _ in range(5):
            jax.block_until_ready(pools)
            start = time.perf_counter()
            pools = jax.block_until_ready(compiled(pools, *arguments))
            best = min(best, time.perf_counter() - start)
        memory = compiled.memory_analysis()
        temp = memory.temp_size_in_bytes
        in_place = memory.alias_size_in_bytes >= 2 * layers * P * S * K * D * 2 and temp < 50e6
        return {"us_per_layer": best / 20 / layers * 1e6, "in_place": bool(in_place), "temp_mb": temp / 1e6}

    def pairs(pools):
        return list(zip(pools[::2], pools[1::2], strict=True))

    def write_all(pools, page, slot, k):
        new = (kv_write(*pair, page, slot, k, k) for pair in pairs(pools))
        return [x for pair in new for x in pair]

    def compact_all(pools, page, source, target, kernel=None):
        return list(kv_compact_layers(pools, (page, source), (page, target), kernel=kernel))

    def scatter_all(*arguments):
        return compact_all(*arguments, kernel=False)

    for B, T in ((1, 1), (1, 16), (8, 4), (8, 64)):
        index = jnp.arange(B * T).reshape(B, T)
        k = jnp.ones((B, T, K, D), jnp.bfloat16)
        rows.run(f"write B={B} T={T}", lambda i=index, k=k: timed(write_all, i // S, i % S, k))
        rows.run(f"compact B={B} T={T}", lambda i=index: timed(compact_all, i // S, i % S, (i + 1) % S))
        rows.run(f"compact by scatter B={B} T={T}", lambda i=index: timed(scatter_all, i // S, i % S, (i + 1) % S))


def ncu_part(rows: Rows, out: pathlib.Path):
    """Run under ncu by the parent: a few single calls whose kernels it times with cold caches."""
    import jax

    for T, L, B in ((1, 8192, 1), (16, 8192, 1), (1, 32768, 1), (16, 8192, 8)):
        ks, vs, table = Pools().get(L, B, 16)
        q, length, visible, positions = tree_inputs(T, L, B)
        for backend in ("mosaic", "triton"):
            call = jax.jit(attention_call(backend))

            def once(call=call, q=q, ks=ks, vs=vs, table=table, length=length, visible=visible, positions=positions):
                jax.block_until_ready(call(q, ks[0], vs[0], table, length, visible, positions))
                return {"launched": 1}

            rows.run(f"T={T} L={L} B={B} {backend}", once)


def child(part: str, out: pathlib.Path, limit: float):
    """Runs one part in this process."""
    warnings.filterwarnings("ignore", ".*Triton.*", DeprecationWarning)
    rows = Rows(out, part, limit)
    if part == "bandwidth":
        bandwidth(rows)
    else:
        parts = {"targets": targets_part, "choices": choices_part, "more": more_part, "commit": commit_part, "ncu": ncu_part}
        parts[part](rows, out)


NCU_METRICS = (
    "gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,launch__registers_per_thread,"
    "launch__shared_mem_per_block_dynamic,sm__warps_active.avg.per_cycle_active,launch__occupancy_limit_shared_mem"
)


def run_part(part: str, out: pathlib.Path, limit: float):
    """A part in its own process, started again a few times behind a row that killed it."""
    stop = time.time() + limit
    for _ in range(6):
        left = stop - time.time()
        if left < 6:
            return
        command = [sys.executable, __file__, "--out", str(out), "--child", part, "--budget", str(left - 3)]
        if part == "ncu":
            names = "regex:tree_attention|_attention|_merge|mosaic|body"
            command = [
                "ncu", "--clock-control", "none", "--csv", "--log-file", str(out / "ncu.csv"), "--metrics", NCU_METRICS,
                "-k", names, *command,
            ]  # fmt: skip
        env = dict(os.environ, XLA_PYTHON_CLIENT_MEM_FRACTION="0.8", TF_CPP_MIN_LOG_LEVEL="2")
        with open(out / f"{part}.log", "a") as log:
            try:
                process = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=left + 2)
                status = process.returncode
            except (subprocess.TimeoutExpired, OSError) as e:
                status = type(e).__name__
        print(f"[{part}] {status}, {limit - (stop - time.time()):.0f} s", flush=True)
        if status in (0, "TimeoutExpired", "FileNotFoundError") or part == "ncu":
            return


def ncu_table(out: pathlib.Path):
    """Kernels in launch order, as ncu saw them."""
    import csv

    path = out / "ncu.csv"
    if not path.exists():
        return
    launches: dict = {}
    for row in csv.DictReader(x for x in path.read_text().splitlines() if x.startswith('"')):
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"][:40]})
        launch[row["Metric Name"]] = f"{row['Metric Value']} {row['Metric Unit']}"
    print("\nncu, cold caches, in launch order:", " ".join(json.loads((out / "ncu.json").read_text())))
    for launch in launches.values():
        print("  ", launch.pop("kernel"), "; ".join(f"{k.split('.')[0].split('__')[-1]} {v}" for k, v in launch.items()))


def table(out: pathlib.Path):
    """Prints all rows, fastest first within a point, and collects them in attention.json."""
    every, points = [], {}
    for part in PARTS:
        path = out / f"{part}.json"
        for name, row in (json.loads(path.read_text()) if path.exists() else {}).items():
            every.append({"part": part, "name": name, **row})
            if part in ("targets", "choices", "more"):
                words = name.split(" ", 3)
                points.setdefault(" ".join(words[:3]), []).append((words[3], row))
            elif part != "ncu":
                print(f"  {name:24s}", " ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    (out / "attention.json").write_text(json.dumps(every, indent=1))
    print(f"\nus, GB/s, share of the floor at {read_rate(out) / 1e12:.2f} TB/s; tilings as split/block/rows/warps/stages")
    for point, cells in points.items():
        print(" ", point)
        for name, row in sorted(cells, key=lambda c: c[1].get("us", 1e9)):
            text = row["error"][:90] if "error" in row else f"{row['us']:8.1f} {row['gbps']:6.0f} {row['share']:5.0%}"
            print(f"     {name:32s} {text}")


def main():
    """Parses the command line; see the module's first lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the JSON files")
    parser.add_argument("--parts", default="bandwidth,targets,choices", help=f"which of {', '.join(PARTS)}, in this order")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds in all")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.child:
        child(options.child, out, options.budget)
        return
    stop = time.time() + options.budget
    for part in options.parts.split(","):
        if part not in PARTS:
            parser.error(f"no part {part!r}; there are {', '.join(PARTS)}")
        run_part(part, out, min(PARTS[part], stop - time.time()))
    ncu_table(out)
    table(out)


if __name__ == "__main__":
    main()
