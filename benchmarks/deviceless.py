"""One round compiled for an H200 on a machine without a GPU: CUDA graphs, kernels and memory, read from the compiled program.

    JAX_PLATFORMS=cpu python benchmarks/deviceless.py --json benchmarks/results/deviceless_round.json

By hand: needs ``jax[cuda13]`` (4.4 GB of wheels), no driver. Nothing is autotuned without a device, so which library or
tile a product takes may differ on the chip; graphs, fusions, aliasing and buffer sizes are the real thing. The weights are
shapes only.
"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
DUMP = tempfile.mkdtemp(prefix="deviceless-")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={DUMP}".strip()

import argparse  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402

from jaxspec.benchmarking import rounds, suites  # noqa: E402
from jaxspec.benchmarking.records import read_rows, write_rows  # noqa: E402
from jaxspec.benchmarking.shapes import random_draft, random_model  # noqa: E402
from jaxspec.round import run_rounds  # noqa: E402
from jaxspec.runtime import XLA_OPTIONS  # noqa: E402

# Public device facts, as a stream_executor.GpuTargetConfigProto text proto.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  name: "NVIDIA H200"
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  clock_rate_ghz: 1.98
  l2_cache_size: 52428800
  memory_bandwidth: 4800000000000
  device_memory_size: 150754820096
  device_address_bits: 64
  pcie_bandwidth: 34359738368
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.20.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 20 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def lower_round(row: str, target_name: str, batch: int, context: int):
    """The lowered `run_rounds` of a row of the peer suite."""
    # The attention kernel asks the default device what it is; here the answer is the device that is compiled for.
    sys.modules["pallas_kernels.device"].capability = lambda: 9.0
    entry = suites.PEER_ROWS[row]
    case = rounds.RoundCase(row, entry.case.algorithm, entry.case.spec, batch, context)
    target = jax.eval_shape(lambda: random_model(target_name, jnp.bfloat16))
    draft = None
    if entry.draft is not None:
        draft = jax.eval_shape(lambda: random_draft(entry.draft, target.config, jnp.bfloat16))
    batch = rounds.prepare(case, target, draft, 36)
    topology = topologies.get_topology_desc(platform="cuda", topology_name="h200", target_config=H200, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = (target.tree, batch.draft_tree, batch.state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # the kernels' lowering asks the context which GPU this is
        return run_rounds.trace(*shapes, program=batch.program).lower(lowering_platforms=("cuda",))


def compile_round(row: str, target_name: str, batch: int, context: int):
    """The compiled `run_rounds` of a row of the peer suite, and the seconds that tracing and compiling took."""
    start = time.perf_counter()
    return lower_round(row, target_name, batch, context).compile(compiler_options=XLA_OPTIONS), time.perf_counter() - start


def thunks_of_a_round() -> dict:
    """Graphs and operations inside the loop's body, from XLA's list of what it launches (the newest dump)."""
    after = sorted(Path(DUMP).glob("*run_rounds.thunk_sequence_after_thunk_passes.txt"), key=lambda p: p.stat().st_mtime)
    plain = sorted(Path(DUMP).glob("*run_rounds.thunk_sequence.txt"), key=lambda p: p.stat().st_mtime)
    lines = [(len(text) - len(text.lstrip()), text) for text in (after or plain)[-1].read_text().splitlines()]
    body = next(i for i, (_, text) in enumerate(lines) if text.strip() == "body:")
    margin = lines[body + 1][0]
    thunks = [(depth, re.match(r"\s*\d+: (k\w+)\s*\[[^\]]*\]\s*(\S*)", text)) for depth, text in lines]
    loop = next(i for i in range(body, -1, -1) if thunks[i][1] and thunks[i][1][1] == "kWhile")
    around = [t[1] for depth, t in thunks[:loop] if t and depth < lines[loop][0]]
    found = []
    for depth, thunk in thunks[body + 1 :]:
        if thunk and depth < margin:
            break
        if thunk:
            found.append((depth, thunk[1], thunk[2]))
    launched = Counter(kind for depth, kind, _ in found if depth == margin)
    whole = "kCommandBuffer" in around  # the device runs the loop by itself
    inside = [(kind, name) for depth, kind, name in found if whole or depth > margin]
    kernels = Counter(re.sub(r"[_.]\d+$", "", name) for _, name in inside)
    return {
        "loop_is_one_cuda_graph": whole,
        "launched_by_the_host_per_round": {} if whole else dict(launched),
        "cuda_graphs_launched_per_round": 0 if whole else launched["kCommandBuffer"],
        "operations_in_graphs_per_round": len(inside),
        "kinds_in_graphs": dict(Counter(kind for kind, _ in inside)),
        "most_common_kernels": dict(kernels.most_common(20)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["plain", "eagle3 3/1/4", "eagle3 5/4/8"])
    parser.add_argument("--target", default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    if args.json is not None and args.json.exists():  # rows of this run take the place of earlier ones
        held = read_rows(args.json)
        mine = [(row, args.target, args.batch, args.context) for row in args.rows]
        results = [r for r in held if (r["name"], r["target"], r["batch"], r["context"]) not in mine]
    for row in args.rows:
        compiled, seconds = compile_round(row, args.target, args.batch, args.context)
        memory = compiled.memory_analysis()
        results.append(
            {
                "name": row,
                "target": args.target,
                "batch": args.batch,
                "context": args.context,
                **thunks_of_a_round(),
                "temporary_bytes": memory.temp_size_in_bytes,
                "alias_bytes": memory.alias_size_in_bytes,
                "argument_bytes": memory.argument_size_in_bytes,
                "output_bytes": memory.output_size_in_bytes,
                "compile_seconds_here": round(seconds, 1),
                "xla_options": XLA_OPTIONS,
            }
        )
        print(json.dumps(results[-1], indent=1), flush=True)
        if args.json is not None:
            write_rows(args.json, results, device="an H200, compiled for without one")


if __name__ == "__main__":
    main()
