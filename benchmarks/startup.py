"""From the import of jaxspec to the first token: with an empty compile cache, then with the one that the first run left.

    python benchmarks/startup.py --out benchmarks/results/h200_startup.json

Each run is a process of its own. The weights are random and made on the device, in the place of a checkpoint's; their time
is listed apart. A run ends with the first token of a prompt and, in a second program, the first round behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxspec.benchmarking.records import write_rows


def child(target: str, draft: str | None, prompt_length: int) -> dict[str, float]:
    """Seconds since the interpreter started, stage by stage."""
    began = time.perf_counter()
    import jaxspec
    from jaxspec import loading
    from jaxspec.benchmarking import decode, shapes
    from jaxspec.runtime import use_compilation_cache

    def since() -> float:
        return round(time.perf_counter() - began, 2)

    stages = {"imported": since()}
    use_compilation_cache()  # before the weights are made, too
    import jax

    stages["devices"] = since() if jax.devices() else 0.0
    model = shapes.random_model(target, loading.default_dtype())
    head = None if draft is None else shapes.random_draft(draft, model.config, loading.default_dtype())
    jax.block_until_ready(model.tree)
    stages["weights"] = since()
    prompts = decode.random_prompts(model.config.vocab_size, prompt_length, 1)
    how = {"algorithm": "none" if head is None else "auto", "draft": head, "ignore_eos": True}
    jaxspec.generate(model, prompts, max_new_tokens=1, **how)
    stages["first_token"] = since()
    jaxspec.generate(model, prompts, max_new_tokens=16, **how)
    stages["first_rounds"] = since()
    return stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama-3.1-8b")
    parser.add_argument("--draft", default="eagle3", help="a draft shape, or none")
    parser.add_argument("--prompt-length", type=int, default=512)
    parser.add_argument("--budget", type=float, default=200, help="seconds for both runs (default: 200)")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    draft = None if args.draft == "none" else args.draft
    if args.child:
        print(json.dumps(child(args.target, draft, args.prompt_length)))
        return
    end, rows = time.perf_counter() + args.budget, []
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            start = time.perf_counter()
            command = [sys.executable, __file__, "--child", "--target", args.target, "--draft", args.draft]
            try:
                done = subprocess.run(
                    [*command, "--prompt-length", str(args.prompt_length)],
                    env={**os.environ, "JAXSPEC_CACHE": cache},
                    stdout=subprocess.PIPE,
                    text=True,
                    timeout=max(1.0, end - start),
                )
            except subprocess.TimeoutExpired:
                print(f"{name}: not through within the budget of {args.budget:.0f} s", flush=True)
                break
            if done.returncode:
                print(f"{name}: exit status {done.returncode}", flush=True)
                break
            stages = json.loads(done.stdout.splitlines()[-1])
            rows.append(
                {
                    "cache": name,
                    "target": args.target,
                    "draft": args.draft,
                    "prompt_tokens": args.prompt_length,
                    "process_seconds": round(time.perf_counter() - start, 2),
                    "seconds_since_start": stages,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
            if args.out is not None:
                write_rows(args.out, rows)


if __name__ == "__main__":
    main()
