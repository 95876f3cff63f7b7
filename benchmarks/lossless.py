"""Greedy answers with every algorithm against plain decoding, in float32, on whatever device there is.

    python benchmarks/lossless.py [--target llama-3.1-8b] [--tokens 64] [--json FILE]
    python benchmarks/lossless.py --target smollm2-135m --prompts PROMPTS.jsonl --batch 8

Random weights of a built-in shape with random drafts, or a checkpoint with the heads that ship with it, too; random prompts
of different lengths, or those of a file. In float32 every answer must be equal; exit status 1 where one is not.
`--dtype bfloat16` counts the answers that rounding changes, and the tokens before the first change.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from oracle import OracleDrafter, known

import jaxspec
from jaxspec.benchmarking import shapes
from jaxspec.benchmarking.decode import read_prompts
from jaxspec.benchmarking.records import write_rows
from jaxspec.params import ModelParams
from jaxspec.prompts import encode_prompts
from jaxspec.results import GenerationResult

RUNS = {
    "ngram 12": ({"algorithm": "ngram"}, None),
    "eagle3 3/1/4": ({"num_steps": 3, "topk": 1, "num_draft_tokens": 4}, "eagle3"),
    "eagle3 5/4/8": ({"num_steps": 5, "topk": 4, "num_draft_tokens": 8}, "eagle3"),
    "eagle 5/4/8": ({"num_steps": 5, "topk": 4, "num_draft_tokens": 8}, "eagle"),
    "mtp 3/1/4": ({"num_steps": 3, "topk": 1, "num_draft_tokens": 4}, "mtp"),
    "standalone 3/1/4": ({"num_steps": 3, "topk": 1, "num_draft_tokens": 4}, "model"),
    "dflash 16": ({}, "dflash"),
    "dflash tree 16": ({"topk": 4, "num_draft_tokens": 16}, "dflash"),
    "dspark 7": ({}, "dspark"),
    "dspark tree 16": ({"topk": 4, "num_draft_tokens": 16}, "dspark"),
    "uno 8/1/8": ({"num_steps": 1, "topk": 1, "num_draft_tokens": 8}, "uno"),
    "self 3/4/16": ({"num_steps": 3, "topk": 4, "num_draft_tokens": 16}, "self"),
    "oracle chain 4": ({"algorithm": OracleDrafter(3)}, "answers"),
    "oracle chain 16": ({"algorithm": OracleDrafter(15, error=0.125)}, "answers"),
    "oracle tree 21": ({"algorithm": OracleDrafter(5, 4)}, "answers"),
    "oracle tree 65": ({"algorithm": OracleDrafter(8, 8, error=0.125)}, "answers"),
}
"""Name → (options of `generate`, the draft: a random one of this shape, a small random model ("model"), the target itself, the
target's own answers with a fixed rate of errors ("answers"), or none). Random heads accept next to nothing: that long accepted
paths change nothing the oracles show."""
SMALL_MODELS = ("llama-1b", "smollm2-135m", "tiny")
"""A random draft model is the first of these that speaks the target's vocabulary."""
SHIPPED = {
    "eagle3 shipped 3/1/4": {"algorithm": "eagle3", "num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "eagle3 shipped 5/4/8": {"algorithm": "eagle3", "num_steps": 5, "topk": 4, "num_draft_tokens": 8},
    "eagle3 shipped 5/8/64": {"algorithm": "eagle3", "num_steps": 5, "topk": 8, "num_draft_tokens": 64},
    "eagle shipped 5/4/8": {"algorithm": "eagle", "num_steps": 5, "topk": 4, "num_draft_tokens": 8},
    "mtp shipped 3/1/4": {"algorithm": "nextn", "num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "dspark shipped chain": {"algorithm": "dspark", "topk": 1},
    "dspark shipped tree": {"algorithm": "dspark", "topk": 4, "num_draft_tokens": 16},
    "dflash shipped chain": {"algorithm": "dflash", "topk": 1},
    "dflash shipped tree": {"algorithm": "dflash", "topk": 4, "num_draft_tokens": 16},
    "uno shipped 1/8": {"algorithm": "uno", "topk": 1, "num_draft_tokens": 8},
    "uno shipped 7/4/16": {"algorithm": "uno", "num_steps": 7, "topk": 4, "num_draft_tokens": 16},
}
"""Name, which begins with the head's, → options of `generate` for a head that ships with the target."""


def run_names(target: ModelParams, asked: list[str] | None) -> list[str]:
    """The runs asked for, or all that the target has. SystemExit for a shipped head that it does not have."""
    there = [name for name in SHIPPED if name.split()[0] in target.drafts]
    for name in asked or ():
        if name in SHIPPED and name not in there:
            raise SystemExit(f"{name!r}: no such head ships with this target (it has {', '.join(target.drafts) or 'none'})")
    return asked or [*RUNS, *there]


def options_of(name: str, target: ModelParams, dtype: str, answers: Callable[[], dict]) -> dict:
    """A run's options of `generate`, with its draft; `answers` gives an oracle's parameters."""
    if name in SHIPPED:
        return SHIPPED[name]
    options, draft = RUNS[name]
    if draft is None:
        return options
    if draft == "answers":
        return {**options, "draft": answers()}
    if draft == "self":
        return {**options, "draft": target}
    if draft == "model":
        draft = next(small for small in SMALL_MODELS if shapes.MODELS[small].vocab_size == target.config.vocab_size)
    return {**options, "draft": shapes.random_draft(draft, target.config, dtype)}


def differences(results: list[GenerationResult], plain: list[GenerationResult]) -> list[int | None]:
    """The first token of each answer that differs, None where all are equal."""
    pairs = [zip(r.tokens, p.tokens, strict=True) for r, p in zip(results, plain, strict=True)]
    return [next((i for i, (a, b) in enumerate(pair) if a != b), None) for pair in pairs]


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
    parser.add_argument("--threads", type=int, default=4, help="runs that compile at once (default: 4)")
    parser.add_argument("--json", type=Path, help="written after every run")
    args = parser.parse_args()
    built_in = args.target in shapes.MODELS and args.prompts is None
    target = shapes.random_model(args.target, args.dtype) if built_in else jaxspec.load(args.target, dtype=args.dtype)
    options = {"max_new_tokens": args.tokens, "ignore_eos": True}
    if args.prompts is not None:
        prompts, _ = encode_prompts(target, read_prompts(args.prompts, args.batch), chat=True)
    else:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, target.config.vocab_size, n).tolist() for n in rng.integers(5, 200, args.batch)]
    names, start = run_names(target, args.runs), time.perf_counter()
    rows, failed = [], 0

    def answers() -> dict:
        return known(prompts, [result.tokens for result in reference.result()[0]])

    def generated(name: str | None) -> tuple[list[GenerationResult], float]:
        begun = time.perf_counter()
        choice = {"algorithm": "none"} if name is None else options_of(name, target, args.dtype, answers)
        return jaxspec.generate(target, prompts, **choice, **options), time.perf_counter() - begun

    # Compiling takes nearly all the time: several runs at once, each with a draft that is dropped at its end.
    with concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
        reference = pool.submit(generated, None)
        running = {pool.submit(generated, name): name for name in names}
        for done in concurrent.futures.as_completed(running):
            name = running.pop(done)  # with its answers
            plain, _ = reference.result()
            if (error := done.exception()) is not None:  # the others go on
                print(f"{name:22} {type(error).__name__}: {str(error)[:400]}", flush=True)
                failed += 1
                continue
            results, seconds = done.result()
            first = differences(results, plain)
            changed = [f for f in first if f is not None]
            before = sum(args.tokens if f is None else f for f in first)
            failed += bool(changed)
            accept = [round(r.stats.accept_length, 3) for r in results]
            rows.append(
                {
                    "name": name,
                    "equal": not changed,
                    "first_difference": first,
                    "tokens": args.tokens * len(prompts),
                    "changed_answers": len(changed),
                    "tokens_before_change": before,
                    "accept_length": accept,
                }
            )
            found = f"{len(changed)} of {len(prompts)} answers change, after {before} equal tokens" if changed else "equal"
            print(f"{name:22} {found:56} accept length {np.mean(accept):.2f}  ({seconds:.0f} s)", flush=True)
            if args.json:
                write_rows(
                    args.json,
                    sorted(rows, key=lambda row: names.index(row["name"])),
                    target=args.target,
                    dtype=args.dtype,
                    tokens=args.tokens,
                    batch=args.batch,
                    missing=sorted(running.values()),
                )
    print(f"{len(rows)} of {len(names)} runs in {time.perf_counter() - start:.0f} s, {failed} with other answers or none")
    return int(failed > 0 and args.dtype == "float32")


if __name__ == "__main__":
    sys.exit(main())
