"""Greedy answers with every algorithm against plain decoding, in float32, on whatever device there is.

    python benchmarks/lossless.py [--target llama-3.1-8b] [--tokens 64] [--json FILE]
    python benchmarks/lossless.py --target smollm2-135m --prompts PROMPTS.jsonl --batch 8

Random weights of a built-in shape with random drafts, or a checkpoint with the heads that ship with it, too; random prompts
of different lengths, or those of a file. In float32 every answer must be equal; exit status 1 where one is not.
`--dtype bfloat16` counts the answers that rounding changes, and the tokens before the first change.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

import jaxspec
from jaxspec.benchmarking import shapes
from jaxspec.benchmarking.decode import read_prompts
from jaxspec.params import ModelParams
from jaxspec.prompts import encode_prompts

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
"""Name → (options of `generate`, the draft: a random one of this shape, the target itself, or none)."""
SHIPPED = {
    "eagle3 shipped 3/1/4": {"algorithm": "eagle3", "num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "eagle3 shipped 5/4/8": {"algorithm": "eagle3", "num_steps": 5, "topk": 4, "num_draft_tokens": 8},
    "eagle3 shipped 5/8/64": {"algorithm": "eagle3", "num_steps": 5, "topk": 8, "num_draft_tokens": 64},
    "eagle shipped 5/4/8": {"algorithm": "eagle", "num_steps": 5, "topk": 4, "num_draft_tokens": 8},
    "mtp shipped 3/1/4": {"algorithm": "mtp", "num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "dspark shipped": {"algorithm": "dspark"},
    "dspark shipped tree": {"algorithm": "dspark", "topk": 4, "num_draft_tokens": 16},
    "dflash shipped tree": {"algorithm": "dflash", "topk": 4, "num_draft_tokens": 16},
    "uno shipped 1/8": {"algorithm": "uno", "topk": 1, "num_draft_tokens": 8},
    "uno shipped 7/4/16": {"algorithm": "uno", "num_steps": 7, "topk": 4, "num_draft_tokens": 16},
}
"""Name → options of `generate` for a head that ships with the target."""


def runs(target: ModelParams, dtype: str, names: list[str] | None) -> Iterator[tuple[str, dict]]:
    """(name, options with the draft) of every run, made one by one: two random drafts need not fit side by side."""
    shipped = {name: options for name, options in SHIPPED.items() if options["algorithm"] in target.drafts}
    for name in names or [*RUNS, *shipped]:
        if name in SHIPPED:
            if name not in shipped:
                raise SystemExit(f"{name!r}: no such head ships with this target (it has {', '.join(target.drafts) or 'none'})")
            yield name, shipped[name]
            continue
        options, draft = RUNS[name]
        if draft == "llama-1b" and shapes.MODELS[draft].vocab_size != target.config.vocab_size:
            continue  # a draft model speaks its target's vocabulary
        if draft is not None:
            options = {**options, "draft": target if draft == "self" else shapes.random_draft(draft, target.config, dtype)}
        yield name, options


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama-3.1-8b")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument(
        "--prompts", type=Path, help="JSONL file; the first turns of its first --batch lines (default: random ids)"
    )
    parser.add_argument("--runs", nargs="+", choices=[*RUNS, *SHIPPED], help="default: all that the target has")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    built_in = args.target in shapes.MODELS and args.prompts is None
    target = shapes.random_model(args.target, args.dtype) if built_in else jaxspec.load(args.target, dtype=args.dtype)
    options = {"max_new_tokens": args.tokens, "ignore_eos": True}
    if args.prompts is not None:
        prompts, _ = encode_prompts(target, read_prompts(args.prompts, args.batch), chat=True)
    else:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, target.config.vocab_size, n).tolist() for n in rng.integers(5, 200, args.batch)]
    plain = jaxspec.generate(target, prompts, algorithm="none", **options)
    rows, failed = [], 0
    for name, choice in runs(target, args.dtype, args.runs):
        start = time.perf_counter()
        results = jaxspec.generate(target, prompts, **choice, **options)
        pairs = [(r.tokens, p.tokens) for r, p in zip(results, plain, strict=True)]
        first = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), None) for pair in pairs]
        changed = [f for f in first if f is not None]
        before = sum(args.tokens if f is None else f for f in first)
        failed += bool(changed)
        accept = [round(r.stats.accept_length, 3) for r in results]
        rows.append({
            "name": name, "equal": not changed, "first_difference": first, "tokens": args.tokens * len(prompts),
            "changed_answers": len(changed), "tokens_before_change": before, "accept_length": accept,
        })  # fmt: skip
        found = f"{len(changed)} of {len(prompts)} answers change, after {before} equal tokens" if changed else "equal"
        print(f"{name:22} {found:56} accept length {np.mean(accept):.2f}  ({time.perf_counter() - start:.0f} s)", flush=True)
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
