"""Greedy answers with every algorithm against plain decoding, in float32, on whatever device there is.

    python benchmarks/lossless.py [--target llama-3.1-8b] [--tokens 64] [--json FILE]

Random weights of a built-in shape (or a checkpoint), random drafts, a batch of prompts of different lengths. In float32 every
answer must be equal; exit status 1 where one is not. `--dtype bfloat16` reports the first differences, which rounding causes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

import jaxspec
from jaxspec.benchmarking import shapes

RUNS = {
    "ngram 12": ({"algorithm": "ngram"}, None),
    "eagle3 3/1/4": ({"num_steps": 3, "topk": 1, "num_draft_tokens": 4}, "eagle3"),
    "eagle3 5/4/8": ({"num_steps": 5, "topk": 4, "num_draft_tokens": 8}, "eagle3"),
    "eagle 5/4/8": ({"num_steps": 5, "topk": 4, "num_draft_tokens": 8}, "eagle"),
    "standalone 3/1/4": ({"num_steps": 3, "topk": 1, "num_draft_tokens": 4}, "llama-1b"),
    "dflash 16": ({}, "dflash"),
    "dflash tree 16": ({"topk": 4, "num_draft_tokens": 16}, "dflash"),
    "uno 8/1/8": ({"num_steps": 1, "topk": 1, "num_draft_tokens": 8}, "uno"),
    "self 3/4/16": ({"num_steps": 3, "topk": 4, "num_draft_tokens": 16}, "self"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama-3.1-8b")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    built_in = args.target in shapes.MODELS
    target = shapes.random_model(args.target, args.dtype) if built_in else jaxspec.load(args.target, dtype=args.dtype)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, target.config.vocab_size, n).tolist() for n in rng.integers(5, 200, args.batch)]
    options = {"max_new_tokens": args.tokens, "ignore_eos": True}
    plain = jaxspec.generate(target, prompts, algorithm="none", **options)
    rows, failed = [], 0
    for name in args.runs:
        choice, draft = RUNS[name]
        if draft is not None:
            choice = {**choice, "draft": target if draft == "self" else shapes.random_draft(draft, target.config, args.dtype)}
        start = time.perf_counter()
        results = jaxspec.generate(target, prompts, **choice, **options)
        pairs = [(r.tokens, p.tokens) for r, p in zip(results, plain, strict=True)]
        first = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), None) for pair in pairs]
        equal = all(f is None for f in first)
        failed += not equal
        accept = [round(r.stats.accept_length, 3) for r in results]
        rows.append({"name": name, "equal": equal, "first_difference": first, "accept_length": accept})
        print(f"{name:14} {'equal' if equal else f'DIFFERENT at {first}':24} accept length {accept}  "
              f"({time.perf_counter() - start:.0f} s)", flush=True)  # fmt: skip
        del choice
    if args.json:
        report = {
            "target": args.target, "dtype": args.dtype, "tokens": args.tokens, "batch": args.batch, "rows": rows,
            "device": jax.devices()[0].device_kind, "jax": jax.__version__,
            "command": " ".join(["python", *sys.argv]),
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed > 0 and args.dtype == "float32")


if __name__ == "__main__":
    sys.exit(main())
