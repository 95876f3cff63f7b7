"""Attention by several warpgroups and programs, interpreted: prints the errors of a few cases, for `test_tree_attention`.

A process of its own, because interpreted warpgroups that wait for each other each hold a thread of XLA's, which has as many as
the machine has cores unless NPROC says otherwise when it starts.
"""

import json
import os

os.environ["NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from pallas_kernels import tree_attention  # noqa: E402
from pallas_kernels.tilings import Tiling  # noqa: E402
from tests.kernels.attention_cases import Case, build, in_float32, row_error  # noqa: E402

SMALL = dict(K=1, B=1, Dk=32, Dv=128, N=20)
WORKERS = (  # case, splits, readers, cluster
    (Case(**SMALL | {"B": 2}, T=9, lengths=(290, 0)), 1, 2, 1),  # nine tokens: written in place, the last rows of a tile not
    (Case(**SMALL, T=9, lengths=(290,)), 1, 1, 2),
    (Case(**SMALL, T=9, lengths=(290,), window=70, sink=3, missing=9), 1, 2, 2),  # workers with sinks, with a window, idle
    (Case(**SMALL, T=2, lengths=(290,), softcap=9.0), 3, 1, 2),  # clusters, then a merge
    (Case(**SMALL, T=9, lengths=(290,), window=70, sink=3), 4, 2, 1),  # more workers than blocks, window, then a merge
    # Queries regrouped; most workers idle, and rows that see nothing.
    (Case(T=5, H=6, K=2, Dk=32, Dv=32, N=6, lengths=(40, 0), missing=5, tree=False), 1, 2, 4),
)


def main():
    """One JSON line: [[name, error], ...]."""
    errors = []
    for case, splits, readers, cluster in WORKERS:
        arguments, options = build(case, jnp.bfloat16)
        want = jax.jit(lambda *a, o=options: tree_attention(*a, **o, backend="reference"))(*in_float32(arguments))
        tiling = Tiling(0, 64, num_stages=2, readers=readers, cluster=cluster, splits=splits)
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        got = tree_attention(*arguments, **options, backend="mosaic", tiling=tiling, interpret=interpret)
        errors.append((f"{case.name} {tiling}", row_error(got, want)))
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
