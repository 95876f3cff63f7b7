"""Points at which attention is timed, and a call's time among many dependent ones."""

from __future__ import annotations

import concurrent.futures
import math
import os
import pathlib
import time

from timing import Rows, best_time, read_rate

H, K, D = 32, 8, 128
LAYERS = 32  # calls that share a mask
TARGETS = [(1, 8192, 1), (16, 8192, 1), (64, 8192, 1), (1, 32768, 1), (16, 32768, 1), (1, 8192, 8), (16, 8192, 8)]
TARGETS += [(T, 512, B) for B in (1, 8) for T in (1, 16, 64)]

# Choices beside the default, as splits/block/rows/warps/stages/readers/cluster, for Triton slots per split first; the last two
# are 1 if not given.
CHOICES = {
    (16, 8192, 1): "mosaic 16/64/64/4/3/2, 16/64/64/4/3, 16/64/64/4/4, 8/64/64/4/2/2/2, 4/64/64/4/2/2/4",
    (16, 32768, 1): "mosaic 16/64/64/4/3/2, 16/64/64/4/4, 8/64/64/4/2/2/2, 4/64/64/4/2/2/4",
    (16, 8192, 8): "mosaic 1/64/64/4/3/2/2, 2/64/64/4/2/2, 1/64/64/4/2/2/1",
    (16, 512, 8): "mosaic 1/64/64/4/3/2/2, 1/64/64/4/2/2/1; triton 0/128/32/4/3",
    (64, 512, 8): "mosaic 1/64/128/4/2, 1/64/128/4/4; triton 0/64/64/4/3",
    (64, 8192, 1): "mosaic 8/64/128/4/2, 4/64/64/4/2/2/1",
    (16, 512, 1): "mosaic 1/64/64/4/2/2/2, 4/64/64/4/2/2; triton 128/128/16/4/2",
    (64, 512, 1): "mosaic 1/64/64/4/2/2/2, 2/64/64/4/2/2/1; triton 0/128/16/4/3",
    (64, 8192, 8): "mosaic 1/64/128/4/2, 2/64/128/4/3",
    (1, 512, 8): "mosaic 1/64/64/4/2/2/2",
    (1, 8192, 8): "mosaic 1/64/64/4/2/2/2",
    (1, 8192, 1): "mosaic 16/64/64/4/2/2",
}


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

    from pallas_kernels.attention import reference

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
        )

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


def tiling_of(backend: str, text: str):
    """A choice as it stands in `CHOICES`."""
    from pallas_kernels.tilings import Tiling

    first, *others = map(int, text.split("/"))
    return Tiling(0, *others, splits=first) if backend == "mosaic" else Tiling(first, *others)


def default_backend(T: int, L: int, B: int) -> str:
    """What `tree_attention` chooses at a point, for a row's name."""
    import importlib

    import jax
    import jax.numpy as jnp

    from pallas_kernels import device

    entry = importlib.import_module("pallas_kernels.attention.api")
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
    todo = []
    for (T, L, B), text in CHOICES.items():
        for clause in text.split("; "):
            backend, values = clause.split(" ", 1)
            for value in values.split(", "):
                tiling = tiling_of(backend, value)
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


def pick(every: list[dict]) -> list[tuple[float, str]]:
    """Which kind of tiling serves 16 rows best: (geometric mean of the shares of the floor, kind), best first.

    A kind is all of a tiling but its split and the size of its clusters, which are the best ones tried at each point; only
    kinds that were measured at all points of 16 rows and a target share count.
    """
    points = [point for point in TARGETS if point[0] == 16 and point[1] > 512]
    best: dict = {}
    for row in every:
        words = row["name"].split(" ")
        point = row.get("T"), row.get("context"), row.get("batch")
        if "share" in row and point in points and len(words) == 5 and "/" in words[4]:
            numbers = [*words[4].split("/")[1:], *"11"][:6]
            way = "in clusters" if numbers[5] != "1" else "alone"
            shares = best.setdefault(f"{words[3]} -/{'/'.join(numbers[:5])} {way}", {})
            shares[point] = max(shares.get(point, 0.0), row["share"])
    means = [(math.prod(s.values()) ** (1 / len(points)), kind) for kind, s in best.items() if len(s) == len(points)]
    return sorted(means, reverse=True)
