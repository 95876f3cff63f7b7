"""Write and compaction of a few cache entries alone, per layer."""

from __future__ import annotations

import pathlib
import time

from attention_points import D, K
from timing import Rows


def commit_part(rows: Rows, out: pathlib.Path):
    """Write and compaction of a few entries in big donated pools, per layer."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.cache import api, reference

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
        new = (api.kv_write(*pair, page, slot, k, k) for pair in pairs(pools))
        return [x for pair in new for x in pair]

    def compact_all(pools, page, source, target, compact=api.kv_compact_layers):
        return list(compact(pools, (page, source), (page, target)))

    def scatter_all(*arguments):
        return compact_all(*arguments, compact=reference.kv_compact_layers)

    for B, T in ((1, 1), (1, 16), (8, 4), (8, 64)):
        index = jnp.arange(B * T).reshape(B, T)
        k = jnp.ones((B, T, K, D), jnp.bfloat16)
        rows.run(f"write B={B} T={T}", lambda i=index, k=k: timed(write_all, i // S, i % S, k))
        rows.run(f"compact B={B} T={T}", lambda i=index: timed(compact_all, i // S, i % S, (i + 1) % S))
        rows.run(f"compact by scatter B={B} T={T}", lambda i=index: timed(scatter_all, i // S, i % S, (i + 1) % S))
