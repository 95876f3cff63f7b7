"""Trains the demo model's heads: one data set, and all heads at once on it within a time budget.

    PYTHONPATH=. python3 benchmarks/train_demo.py --budget 480 --tokens 12e6 --out OUT --heads eagle3 dspark uno
    PYTHONPATH=. python3 benchmarks/train_demo.py … --heads eagle3 --start eagle3=checkpoints/smollm2-135m-eagle3

Several processes (one a GPU) may write data into the same folder under different seeds; each waits for the others'
(--wait) and trains on all of it. Heads are written as OUT/<model>-<head> (int8), with their curves. A head that fails is
reported and the others go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import traceback
from pathlib import Path

import numpy as np

import jaxspec
from jaxspec import runtime
from jaxspec.config import ModelConfig
from jaxspec.train import tokenizer_files
from jaxspec.training import data as rows
from jaxspec.training.data import Data
from jaxspec.training.heads import head_module
from jaxspec.training.loop import TrainOptions
from jaxspec.training.objective import Objective
from jaxspec.training.output import Trained, write_head
from jaxspec.training.synthesis import SynthesisOptions, synthesise
from jaxspec.training.together import train_together
from jaxspec.training.warm import read_start

BLOCK = {"taps": (2, 15, 29), "kv_heads": 9, "mask_token": 16, "candidates": 8192}
"""Of every block draft. Token 16 is one that SmolLM2 never writes. A key/value head for every query head: what a draft of one
layer knows of the target's last feature has passed through its values."""

SPARK = {"layers": 1, "block": 5, "anchors": 192, "markov_rank": 16, "ce": 1.0, "tv": 0.5, "soft": 0.8}

RECIPES: dict[str, dict] = {
    "eagle3": {"draft_vocab": 4096, "steps_ahead": 5, "taps": (2, 15, 29)},
    "dspark": BLOCK | SPARK,
    "dspark_wide": {"head": "dspark"} | BLOCK | SPARK | {"heads": 12, "kv_heads": 12, "ffn": 1344},
    "dspark_sharp": {"head": "dspark"} | BLOCK | SPARK | {"label_temperature": 0.7},
    "uno": {"rank": 5, "noise_below": 2, "ce": 0.3, "curriculum_steps": 1500},
    "dflash": BLOCK | {"layers": 2, "block": 6, "ffn": 1152, "anchors": 128},
    "eagle": {},
    "mtp": {},
    "standalone": {},
}
"""Name → options for the demo model; "head" says which kind of head it is where it is not called so."""


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGIN:5.0f} s] {text}", flush=True)


BEGIN = time.perf_counter()


def join(parts: list[Data]) -> Data:
    """Several data sets as one."""
    about = dict(parts[0].about) | {"seed": [p.about["seed"] for p in parts]}
    for key in ("rows_written", "rows_dropped_for_overlap", "rows_dropped_for_repetition", "rows_dropped_as_copies"):
        about[key] = sum(p.about.get(key, 0) for p in parts)
    arrays = [np.concatenate([getattr(p, name) for p in parts]) for name in ("tokens", "supervised", "temperatures")]
    return Data(*arrays, about)


def get_data(args, target) -> Data:
    """The rows of all processes; those of this one are written first."""
    own = args.data / f"data{args.seed}.npz"
    if not own.exists():
        options = SynthesisOptions(
            tokens=int(args.tokens), length=args.length, rows=args.rows, seed=args.seed, segment=max(128, args.length // 3)
        )
        options = dataclasses.replace(options, least_distinct=args.least_distinct, temperatures=tuple(args.temperatures))
        exclude = rows.exclusion_texts(args.exclude, target.tokenizer)
        synthesise(target, options, exclude=exclude, progress=False, log=say).save(own)
    wanted = [args.data / f"data{seed}.npz" for seed in (args.wait or [args.seed])]
    while missing := [file for file in wanted if not file.exists()]:
        if time.perf_counter() - BEGIN > args.budget / 2:
            say(f"{missing} did not come: training on what is there")
            break
        time.sleep(0.5)
    parts = [rows.load(file) for file in wanted if file.exists()]
    return join([part.take(rows.distinct_share(part.tokens) >= args.least_distinct) for part in parts])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--heads", nargs="+", choices=list(RECIPES), required=True)
    parser.add_argument("--budget", type=float, default=480, help="seconds for everything")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="folder of the data sets (default: --out)")
    parser.add_argument("--tokens", type=float, default=12e6, help="tokens that this process writes")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--length", type=int, default=768)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--evaluate-every", type=float, default=30.0, help="seconds between measurements")
    parser.add_argument("--seed", type=int, default=0, help="of this process's data")
    parser.add_argument("--wait", type=int, nargs="*", help="seeds of all processes that write data")
    parser.add_argument("--least-distinct", type=float, default=0.6, help="rows that repeat themselves more are dropped")
    parser.add_argument("--exclude", nargs="*", default=[], help="evaluation prompts (JSONL)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.0, 0.4, 0.7, 1.0], help="of the answers")
    parser.add_argument("--start", nargs="*", default=[], metavar="NAME=DIR", help="trained heads to begin with")
    parser.add_argument("--lr", type=json.loads, default={}, help='learning rates that differ, JSON: {"eagle3": 0.002}')
    parser.add_argument("--every", type=json.loads, default={}, help='heads that make fewer steps, JSON: {"mtp": 3}')
    parser.add_argument("--steps", type=int, help="steps of every head in place of time, for trials")
    args = parser.parse_args()
    args.data = args.data or args.out
    args.out.mkdir(parents=True, exist_ok=True)
    runtime.use_compilation_cache()
    target = jaxspec.load(args.model)
    say("target loaded")
    data = get_data(args, target)
    say(f"{data.num_tokens:,} tokens in {len(data.tokens)} rows, {data.supervised.mean():.0%} answers")
    objectives = {name: build(name, target.config) for name in args.heads}
    starts = {}
    for name, folder in (text.split("=", 1) for text in args.start):
        starts[name] = read_start(folder, objectives[name])
        say(f"{name}: begins with {folder}, which has seen {starts[name].tokens:,} tokens")
    options = {name: options_of(args, name) for name in args.heads}
    minutes = None if args.steps else (args.budget - (time.perf_counter() - BEGIN) - 4 * len(args.heads)) / 60
    trained = train_together(
        objectives, target, data, options, minutes=minutes, every=args.every, storage="int8", starts=starts, log=say
    )
    for name, result in trained.items():
        if isinstance(result, Exception):
            traceback.print_exception(result)
        else:
            write(args, name, result)
    return int(any(isinstance(result, Exception) for result in trained.values()))


def kind(name: str) -> str:
    """Which kind of head a recipe makes."""
    return RECIPES[name].get("head", name)


def build(name: str, target: ModelConfig) -> Objective:
    """The objective of a recipe."""
    return head_module(kind(name)).build(target, **{key: value for key, value in RECIPES[name].items() if key != "head"})


def options_of(args, name: str) -> TrainOptions:
    """How one head is trained."""
    module = head_module(kind(name))
    return TrainOptions(
        steps=args.steps or 1,
        batch=args.batch,
        learning_rate=args.lr.get(name, module.LEARNING_RATE),
        weight_decay=getattr(module, "WEIGHT_DECAY", 0.0),
        held_out=64,
        evaluate_every=args.evaluate_every,
    )


def write(args, name: str, trained: Trained) -> None:
    """One head: its folder, and its curve on the screen."""
    for point in trained.curve:
        say(f"{name}: {json.dumps(point)}")
    tokenizer = tokenizer_files(args.model) if isinstance(trained.draft.config, ModelConfig) else None
    out = write_head(trained, args.out / f"{args.model}-{name}", quantize="int8", force=True, tokenizer=tokenizer)
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    say(
        f"{name}: {len(trained.losses)} steps, loss {trained.losses[0]:.4f} -> {trained.losses[-1]:.4f}, "
        f"accept length {trained.curve[-1]['accept_length']}, "
        f"stored {trained.about['held_out_accept_length_int8']}, {size / 2**20:.2f} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
