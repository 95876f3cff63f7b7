"""Accept length and speed-up over plain decoding of the shipped heads, on MT-Bench, GSM8K and HumanEval prompts.

    python benchmarks/accept_lengths.py --data DATA --json benchmarks/results/accept_lengths_cpu.json
    python benchmarks/accept_lengths.py --table benchmarks/results/accept_lengths_{h200,cpu}.json --readme README.md
    python benchmarks/accept_lengths.py --write-measured checkpoints/measured.json benchmarks/results/accept_lengths_*.json
    python benchmarks/accept_lengths.py --data DATA --overlap training_rows.npz
    python benchmarks/accept_lengths.py --join benchmarks/results/accept_lengths_cpu.json share0.json share1.json

DATA is a folder with mt_bench.jsonl, gsm8k.jsonl and humaneval.jsonl (a line a prompt: {"turns": [...]}): the files
eagle/data/{mt_bench,gsm8k,humaneval}/question.jsonl of https://github.com/SafeAILab/EAGLE, 80 prompts each. Only the first turn
of a prompt is used (MT-Bench has two), with the chat template. Accept lengths come from large batches of all prompts,
speed from single prompts, plain and speculative by turns in the same process. Rows that the JSON file already has are not
measured again. Several processes may share the prompts (--share) or the rows (--rows), each with a JSON file of its own, which
--join makes one; on one GPU they take turns (--turns).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path

import accept_report
import jax
from readme import replace_between

import jaxspec
from jaxspec import shipped
from jaxspec.benchmarking import accept
from jaxspec.benchmarking.decode import read_prompts
from jaxspec.benchmarking.records import replace_text, write_rows
from jaxspec.benchmarking.turns import Turns
from jaxspec.config import ConfigError
from jaxspec.prompts import encode_prompts
from jaxspec.training import card
from jaxspec.training import data as training_data

SETS = ("mt_bench", "gsm8k", "humaneval")
ROWS = (
    "eagle3 5/4/8",
    "eagle3 3/1/4",
    "eagle3 2/1/3",
    "dflash -/4/16",
    "dspark -/4/16",
    "dspark",
    "eagle 5/4/8",
    "eagle 3/1/4",
    "mtp 3/1/4",
    "uno 7/4/16",
    "uno -/1/8",
    "ngram 12",
    "standalone 3/1/4",
    "dflash",
    "eagle3 3/4/16",
    "eagle3 5/8/64",
    "uno 7/4/32",
    "dflash -/4/32",
    "mtp 5/4/8",
    "standalone 5/4/8",
)
"""The most telling first, for a run that may have to stop early."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, help="folder of the JSONL files")
    p.add_argument("--sets", nargs="+", default=list(SETS), help=f"names of the files (default: {' '.join(SETS)})")
    p.add_argument("--target", default="smollm2-135m")
    p.add_argument("--checkpoints", type=Path, help="heads are here, as <target>-<name>/ (default: those that ship)")
    p.add_argument("--rows", nargs="+", help='heads and trees, e.g. "eagle3 5/4/8" "ngram 12" "dflash -/4/16" (default: all)')
    p.add_argument("--algorithms", nargs="+", help="only the rows of these heads")
    p.add_argument("--prompts", type=int, default=80, help="of each set, for accept lengths; 0: take them from the timed ones")
    p.add_argument("--timed-prompts", type=int, default=8, help="of each set, for speed; 0: measure no speed")
    p.add_argument("--repeats", type=int, default=1, help="timings of a prompt; the median counts")
    p.add_argument("--new-tokens", type=int, default=256)
    p.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    p.add_argument("--timed-temperature", type=float, nargs="+", help="temperatures whose speed is measured (default: all)")
    p.add_argument("--batch", type=int, default=32, help="answers at once for accept lengths")
    p.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on an accelerator")
    p.add_argument("--group", type=int, default=4, help="rows that share compilation and the timings of plain decoding")
    p.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1), help="programs compiled at once")
    p.add_argument(
        "--budget",
        type=float,
        help="seconds: no group of rows is begun that would take longer, and no prompt is timed after them",
    )
    p.add_argument(
        "--share",
        type=int,
        nargs=2,
        default=[0, 1],
        metavar=("I", "N"),
        help="take every N-th prompt from the I-th on: one of N processes with a file each",
    )
    p.add_argument(
        "--turns",
        type=Path,
        metavar="FILE",
        help="a lock file that all processes on a device name: they compile side by side and time one after another",
    )
    p.add_argument("--json", type=Path, help="file of results: read, completed, rewritten after every group")
    p.add_argument("--table", nargs="+", type=Path, metavar="JSON", help="print results as Markdown and measure nothing")
    p.add_argument("--readme", type=Path, help="put the table of --table between this file's marks")
    p.add_argument(
        "--join", nargs="+", type=Path, metavar=("OUT", "JSON"), help="add rows to OUT: shares joined, the last of each counts"
    )
    p.add_argument("--write-measured", nargs="+", type=Path, metavar=("OUT", "JSON"), help="write the automatic choice's table")
    p.add_argument(
        "--overlap", nargs="+", type=Path, metavar="ROWS", help="count training rows that share 13 tokens with a prompt"
    )
    return p


def head_id(draft) -> str:
    """A digest of a head's files; empty for what has none."""
    folder = Path(getattr(draft, "source", "") or "absent")
    return card.digest(folder) if folder.is_dir() else ""


def device_name() -> str:
    if jax.default_backend() == "cpu":
        usable, there = len(os.sched_getaffinity(0)), os.cpu_count()
        return f"{platform.machine()} CPU, {there if usable == there else f'{usable} of {there}'} cores"
    return jax.devices()[0].device_kind


def load(args) -> jaxspec.ModelParams:
    """The target with its heads, without the figures that would choose their trees."""
    params = jaxspec.load(args.target, dtype=args.dtype)
    if args.checkpoints is not None:
        dtype = params.tree["embedder"]["embedding"].dtype
        params.drafts = shipped.drafts_for(Path(args.target).name, params, dtype, args.checkpoints)
    for draft in params.drafts.values():
        draft.measured = ()
    return params


def prompt_sets(args, params) -> list[accept.PromptSet]:
    count = max(args.prompts, args.timed_prompts)
    texts = {name: read_prompts(args.data / f"{name}.jsonl", count) for name in args.sets}
    return [accept.PromptSet(name, tuple(map(tuple, encode_prompts(params, found)[0]))) for name, found in texts.items()]


def chosen_rows(args, params) -> list[accept.Row]:
    rows = [accept.Row.parse(text) for text in args.rows or ROWS]
    rows = [r for r in rows if not args.algorithms or r.head in args.algorithms]
    there = {*params.drafts, accept.PLAIN, "ngram"}
    if args.rows is None:
        absent = sorted({r.head for r in rows} - there)
        if absent:
            print(f"no such heads, their rows are left out: {', '.join(absent)}")
        rows = [r for r in rows if r.head in there]
    return rows


def measure(args) -> None:
    begun = time.perf_counter()
    params = load(args)
    sets = prompt_sets(args, params)
    timed = args.temperature if args.timed_temperature is None else args.timed_temperature
    if set(timed) - set(args.temperature):
        raise ConfigError(f"--timed-temperature {timed} must be among --temperature {args.temperature}")
    index, processes = args.share
    if not 0 <= index < processes:
        raise ConfigError(f"--share {index} {processes}: the first number must be 0 to {processes - 1}")
    end = None if args.budget is None else begun + args.budget
    turns = Turns(args.turns, end)
    settings = accept.Settings(
        temperatures=tuple(args.temperature),
        timed_temperatures=tuple(timed),
        new_tokens=args.new_tokens,
        batch=args.batch,
        timed=args.timed_prompts,
        repeats=args.repeats,
        prompts=args.prompts,
        share=tuple(args.share),
        threads=args.threads,
    )
    stored = accept_report.read(args.json) if args.json else []
    common = {
        "model": Path(args.target).name,
        "platform": jax.default_backend(),
        "device": device_name(),
        "dtype": str(params.tree["embedder"]["embedding"].dtype),
        "new_tokens": args.new_tokens,
        "batch": args.batch,
        "asked_prompts": args.prompts,
        "asked_timed": args.timed_prompts,
        "share": args.share,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        "command": " ".join(["python", "benchmarks/accept_lengths.py", *args.shown]),
    }
    ids = {name: head_id(draft) for name, draft in params.drafts.items()}

    def described(row, name: str, temperature: float) -> dict:
        tree = dict(zip(("num_steps", "topk", "num_draft_tokens"), row.tree, strict=True))
        return {
            **common,
            "row": row.name,
            "head": row.head,
            **tree,
            "head_id": ids.get(row.head, ""),
            "set": name,
            "temperature": temperature,
        }

    done = {accept_report.key(r) for r in stored}
    rows = []
    for row in chosen_rows(args, params):
        having = settings.temperatures if args.prompts else settings.timed_temperatures
        wanted = {accept_report.key(described(row, s.name, t)) for s in sets for t in having}
        if wanted <= done:
            print(f"{row.name}: there already")
        else:
            rows.append(row)
    slowest = 0.0
    for i in range(0, len(rows), args.group):
        start = time.perf_counter()
        if end is not None and end - start < 1.1 * slowest:
            print(f"stopped with {end - start:.0f} s left: {len(rows) - i} of {len(rows)} rows were not begun")
            break

        def save(figures: accept.Figures, before=stored) -> list[dict]:
            fresh = [{**described(*key), **found} for key, found in figures.items()]
            fresh = fresh if processes > 1 else accept_report.joined(fresh)
            if args.json:
                write_rows(args.json, accept_report.replaced(before, fresh))
            return fresh

        group = accept.Group(params, rows[i : i + args.group], sets, settings, lambda text: print(text, flush=True), turns)
        fresh = save(group.measure(save, end))
        stored = accept_report.replaced(stored, fresh)
        print(accept_report.table(fresh) + "\n" if fresh else "", flush=True)
        slowest = max(slowest, time.perf_counter() - start)


def overlap(args) -> int:
    """Prints how many training rows share 13 consecutive tokens with a prompt (all turns); the status says whether any does."""
    tokenizer = jaxspec.load(args.target).tokenizer
    texts = training_data.exclusion_texts([args.data / f"{name}.jsonl" for name in args.sets], tokenizer)
    worst = 0
    for file in args.overlap:
        rows = training_data.load(file)
        found = int(training_data.overlapping(rows.tokens, texts).sum())
        worst = max(worst, found)
        print(
            f"{file}: {found} of {len(rows.tokens)} rows ({rows.num_tokens:,} tokens) share {training_data.NGRAM} tokens "
            f"with a prompt of {', '.join(args.sets)}"
        )
    return 1 if worst else 0


def command_line(words: list[str]) -> list[str]:
    """The options as a row quotes them: without the places of files and the number of a share."""
    shown, places = [], {"--data": "DATA", "--share": "I", "--json": None, "--turns": None}
    for before, word in zip(["", *words], words, strict=False):
        word = places.get(before, word)
        if word is not None and places.get(word, word) is not None:
            shown.append(f'"{word}"' if " " in word else word)
    return shown


def read_all(paths: list[Path]) -> list[dict]:
    """The rows of several files."""
    return [row for path in paths for row in accept_report.read(path)]


def main(arguments: list[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    args.shown = command_line(words)
    if args.table:
        text = accept_report.table(read_all(args.table))
        print(text)
        if args.readme is not None:
            replace_between(args.readme, accept_report.BEGIN, accept_report.END, text)
        return 0
    if args.join:
        out, *sources = args.join
        rows = accept_report.completed([*accept_report.read(out), *accept_report.joined(read_all(sources))])
        write_rows(out, sorted(rows, key=lambda row: ROWS.index(row["row"]) if row["row"] in ROWS else len(ROWS)))
        return 0
    if args.write_measured:
        out, *sources = args.write_measured
        found = accept_report.measured(read_all(sources))
        replace_text(out, json.dumps(found, indent=1) + "\n")
        return 0
    if args.data is None:
        p.error("--data is missing")
    if args.overlap:
        return overlap(args)
    measure(args)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"error: {error}")
