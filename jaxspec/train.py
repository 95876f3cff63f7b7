"""``python -m jaxspec.train``: draft heads for a target, from data that the target writes itself."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from jaxspec import cli
from jaxspec.config import ConfigError

DATA_OPTIONS = (
    "tokens",
    "length",
    "rows",
    "temperatures",
    "user_temperature",
    "longest_user",
    "longest_answer",
    "opener_share",
    "least_distinct",
)
"""Fields of `SynthesisOptions` that the command line gives."""

STORE_DTYPES = ("float32", "float16", "bfloat16")


class _Parser(argparse.ArgumentParser):
    """Raises its complaints, so that another parser can be tried."""

    def error(self, message: str):
        raise argparse.ArgumentError(None, message)


def parse(arguments: list[str]) -> argparse.Namespace:
    """What the command line says.

    Which options there are depends on HEAD, and which word is HEAD depends on the options: --out may be called like a head.
    So every word that names a head is tried, those that follow an option last.
    """
    from jaxspec.training import heads

    words = [i for i, word in enumerate(arguments) if word in heads.modules() or word == "data"]
    words.sort(key=lambda i: i > 0 and arguments[i - 1].startswith("-"))
    names = list(dict.fromkeys(arguments[i] for i in words))
    for name in names:
        try:
            args = parser(name, _Parser).parse_args(arguments)
        except argparse.ArgumentError:
            continue
        if args.head == name:
            return args
    return parser(names[0] if names else None).parse_args(arguments)  # says what is wrong, and leaves


def parser(head: str | None, cls: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The command's options; those of `head` among them."""
    from jaxspec.training import heads
    from jaxspec.training.loop import TrainOptions
    from jaxspec.training.synthesis import SynthesisOptions

    p = cls(
        prog="python -m jaxspec.train",
        description="Trains a draft head for a target. The target writes the training data itself: dialogues, sampled in large "
        "batches. The head is a converted folder, which jaxspec.load_draft and --draft read.",
        epilog="Example: python -m jaxspec.train eagle3 --target smollm2-135m --out ./head --minutes 10. "
        "HEAD may be 'data': then only --data is written.",
    )
    p.add_argument("head", metavar="HEAD", choices=[*heads.modules(), "data"], help=f"{', '.join(heads.modules())}, or data")
    p.add_argument("--target", required=True, help="converted folder, HF folder, GGUF file, hub id or smollm2-135m")
    p.add_argument("--out", metavar="DIR", help="folder of the trained head (HEAD data: may be left out)")
    p.add_argument("--data", metavar="FILE", help="rows to train on: read if the file exists, else written there")
    p.add_argument("--dtype", help="type that is computed in (default: float32 on a CPU, bfloat16 on a GPU)")
    p.add_argument(
        "--from",
        dest="start",
        metavar="DIR",
        help="begin with the weights of a head that was trained before, with the same options",
    )
    p.add_argument("--force", action="store_true", help="replace --out if it exists")
    p.add_argument("--quiet", action="store_true", help="no progress bars")

    group = p.add_argument_group("data")
    helps, defaults = cli.field_help(SynthesisOptions), SynthesisOptions()
    group.add_argument(
        "--prompts",
        metavar="JSONL",
        help="rows with 'turns' or 'prompt', whose answers are written; default: the target is the user, too",
    )
    group.add_argument(
        "--exclude",
        metavar="JSONL",
        nargs="+",
        default=[],
        help="evaluation prompts: rows that share 13 tokens in a row with one are dropped",
    )
    for name in DATA_OPTIONS:
        default = getattr(defaults, name)
        many = isinstance(default, tuple)
        kind = type(default[0]) if many else type(default)
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=None,
            nargs="+" if many else None,
            help=cli.with_default(helps[name], default),
        )

    group = p.add_argument_group("training")
    helps, plain = cli.field_help(TrainOptions), TrainOptions(steps=1)
    module = heads.head_module(head) if head in heads.modules() else None
    rate = "the head's" if module is None else module.LEARNING_RATE
    decay = "the head's" if module is None else getattr(module, "WEIGHT_DECAY", 0.0)
    group.add_argument("--steps", type=int, help="optimiser steps, in place of --minutes")
    group.add_argument("--minutes", type=float, help="minutes of training, in place of --steps (default: 10)")
    group.add_argument("--lr", type=float, dest="learning_rate", help=f"AdamW's peak (default: {rate})")
    group.add_argument("--seed", type=int, default=0, help="of data and training (default: 0)")
    for name in ("batch", "weight_decay", "warmup", "clip", "held_out", "evaluate_every", "checkpoint_every"):
        default = getattr(plain, name)
        shown = decay if name == "weight_decay" else default
        group.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=None, help=cli.with_default(helps[name], shown)
        )
    group.add_argument("--evaluate-steps", type=int, help="steps between measurements, in place of seconds")
    group.add_argument("--checkpoint-steps", type=int, help="steps between checkpoints, in place of seconds")
    group.add_argument("--stop-after", type=int, help=cli.with_default(helps["stop_after"], None))
    group.add_argument(
        "--store-dtype", default="bfloat16", choices=STORE_DTYPES, help="type in which the head is stored (default: bfloat16)"
    )
    group.add_argument("--quantize", choices=["int8"], help="store the head in eight bits per weight")

    if module is not None:
        group = p.add_argument_group(f"the head ({head})")
        for name, option in module.OPTIONS.items():
            flag, text = f"--{name.replace('_', '-')}", cli.with_default(option.help, option.default)
            if option.type is bool:
                group.add_argument(flag, action=argparse.BooleanOptionalAction, default=option.default, help=text)
            else:
                group.add_argument(flag, type=option.type, default=option.default, help=text)
    return p


def chosen(args: argparse.Namespace, cls: type, **more):
    """An options dataclass from what the command line gives."""
    names = {f.name for f in dataclasses.fields(cls)}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return cls(**{**more, **given})


def get_data(args: argparse.Namespace, target, log, work: Path | None = None):
    """The rows: from --data if it exists, else synthesised and kept: in --data, or in the folder `work` for a run that goes on.

    Raises ConfigError for options that would do nothing, and for rows that are not fit for the target.
    """
    from jaxspec.training import data as rows
    from jaxspec.training.synthesis import SynthesisOptions, digest, synthesise

    file = None if args.data is None else Path(args.data).expanduser()
    excluded = rows.exclusion_texts(args.exclude, target.tokenizer)
    prompts = None if args.prompts is None else list(rows.read_jsonl(args.prompts))
    if file is not None and file.exists():
        return stored_rows(args, file, target, excluded, None if prompts is None else digest(prompts), log)
    options = chosen(args, SynthesisOptions)
    if file is None and work is not None:
        asked = digest([dataclasses.asdict(options), prompts, excluded, target.source])
        file = work / f"data-{asked}.npz"  # the name says what it is the answer to
        if file.exists():
            log(f"data: read from {file}")
            return rows.load(file)
    made = synthesise(target, options, prompts=prompts, exclude=excluded, progress=not args.quiet, log=log)
    if file is not None:
        made.save(file)
    return made


def stored_rows(args: argparse.Namespace, file: Path, target, excluded, prompts_digest: str | None, log):
    """The rows of a --data file without those that overlap with excluded texts; HEAD data drops them from the file, too."""
    from jaxspec.training import data as rows

    found = rows.load(file)
    about = {**found.about, **found.about.get("options", {})}
    idle = []
    for name in DATA_OPTIONS:
        value = getattr(args, name)
        if value is not None and about.get(name) != value:
            idle.append(f"--{name.replace('_', '-')}")
    if prompts_digest is not None and about.get("prompts_digest") != prompts_digest:
        idle.append("--prompts")
    if idle:
        raise ConfigError(
            f"{file} exists and was made otherwise, so {', '.join(idle)} would do nothing: leave that out, or name a new file"
        )
    if found.tokens.min() < 0 or found.tokens.max() >= target.config.vocab_size:
        raise ConfigError(f"{file} holds token ids beyond the target's vocabulary of {target.config.vocab_size}")
    if about.get("target") != target.source:
        log(f"warning: the rows in {file} were written by {about.get('target', 'an unknown target')}, not by {target.source}")
    clear = ~rows.overlapping(found.tokens, excluded)
    dropped = int((~clear).sum())
    log(f"data: {found.num_tokens:,} tokens from {file}, {dropped} rows dropped for an overlap with excluded prompts")
    if not dropped:
        return found
    if not clear.any():
        raise ConfigError(f"every row in {file} overlaps with an excluded prompt: none is left")
    count = found.about.get("rows_dropped_for_overlap", 0) + dropped
    kept = dataclasses.replace(found.take(clear), about={**found.about, "rows_dropped_for_overlap": count})
    if args.head == "data":
        kept.save(file)
        log(f"data: wrote the other {len(kept.tokens)} rows back to {file}")
    return kept


def tokenizer_files(source: str | Path):
    """The `TokenizerFiles` of any kind of source (folder, GGUF file, hub id, demo model); None where there are none."""
    from jaxspec.conversion.sources import open_checkpoint
    from jaxspec.loading import resolve

    return open_checkpoint(resolve(source)).tokenizer


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse(arguments)
    if args.head == "data" and args.data is None:
        parser(args.head).error("HEAD data needs --data FILE")
    if args.head != "data" and args.out is None:
        parser(args.head).error("--out is missing")
    import jaxspec
    from jaxspec import runtime

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    runtime.use_compilation_cache()
    target = jaxspec.load(args.target, dtype=args.dtype)
    if args.head == "data":
        get_data(args, target, log)
        return 0
    return train_head(args, target, log)


def train_head(args: argparse.Namespace, target, log) -> int:
    """Trains the head that the command line asks for and writes it."""
    from jaxspec.config import ModelConfig
    from jaxspec.files.errors import ConversionError
    from jaxspec.training import heads
    from jaxspec.training.loop import TrainOptions, checked_dtype, remove_checkpoints, train
    from jaxspec.training.output import write_head
    from jaxspec.training.warm import read_start

    out = Path(args.out).expanduser().absolute()
    if out.exists() and not args.force:
        raise ConversionError(f"{out} exists; pass --force to replace it")
    checked_dtype(target)  # before rows are written
    module = heads.head_module(args.head)
    objective = module.build(target.config, **{name: getattr(args, name) for name in module.OPTIONS})
    decay = getattr(module, "WEIGHT_DECAY", 0.0)
    budget = {"minutes": 10.0} if args.steps is None and args.minutes is None else {}
    options = chosen(args, TrainOptions, learning_rate=module.LEARNING_RATE, weight_decay=decay, **budget)
    start = None if args.start is None else read_start(args.start, objective)
    work = out.with_name(f".{out.name}-training")
    data = get_data(args, target, log, work)
    storage = {"storage": args.quantize, "store_dtype": args.store_dtype}
    shown = {"progress": not args.quiet, "log": log}
    trained = train(objective, target, data, options, folder=work, start=start, **storage, **shown)
    for number, loss in enumerate(trained.losses):
        if number == 0 or number == len(trained.losses) - 1:
            log(f"step {number + 1}: loss {loss:.4f}")
    if trained.draft is None:
        log(f"stopped behind step {len(trained.losses)}; the same command without --stop-after goes on from {work}")
        return 0
    tokenizer = tokenizer_files(args.target) if isinstance(objective.config, ModelConfig) else None
    write_head(trained, out, dtype=args.store_dtype, quantize=args.quantize, force=args.force, tokenizer=tokenizer)
    remove_checkpoints(work)
    log(f"accept length on held-out rows: {trained.curve[-1]['accept_length']:.2f}; wrote {out}")
    return 0


if __name__ == "__main__":
    cli.run(main)
