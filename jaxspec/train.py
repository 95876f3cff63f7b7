"""``python -m jaxspec.train``: draft heads for a target, from data that the target writes itself."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from jaxspec import cli
from jaxspec.config import ConfigError


def parser(head: str | None) -> argparse.ArgumentParser:
    """The command's options; those of `head` among them."""
    from jaxspec.training import heads
    from jaxspec.training.loop import TrainOptions
    from jaxspec.training.synthesis import SynthesisOptions

    p = argparse.ArgumentParser(
        prog="python -m jaxspec.train",
        description="Trains a draft head for a target. The target writes the training data itself: dialogues, sampled in large "
        "batches. The head is a converted folder, which jaxspec.load_draft and --draft read.",
        epilog="Example: python -m jaxspec.train eagle3 --target smollm2-135m --out ./head --minutes 10. "
        "HEAD may be 'data': then only --data is written.",
    )
    p.add_argument("head", metavar="HEAD", choices=[*heads.MODULES, "data"], help=f"{', '.join(heads.MODULES)}, or data")
    p.add_argument("--target", required=True, help="converted folder, HF folder, GGUF file, hub id or smollm2-135m")
    p.add_argument("--out", metavar="DIR", help="folder of the trained head (HEAD data: may be left out)")
    p.add_argument("--data", metavar="FILE", help="rows to train on: read if the file exists, else written there")
    p.add_argument("--dtype", help="type that is computed in (default: float32 on a CPU, bfloat16 on a GPU)")
    p.add_argument("--force", action="store_true", help="replace --out if it exists")
    p.add_argument("--quiet", action="store_true", help="no progress bars")

    group = p.add_argument_group("data")
    helps, defaults = cli.field_help(SynthesisOptions), SynthesisOptions()
    group.add_argument("--prompts", metavar="JSONL", help="rows with 'turns' or 'prompt', whose answers are written; default: "
                       "the target is the user, too")  # fmt: skip
    group.add_argument("--exclude", metavar="JSONL", nargs="+", default=[],
                       help="evaluation prompts: rows that share 13 tokens in a row with one are dropped")  # fmt: skip
    for name in (
        "tokens",
        "length",
        "rows",
        "temperatures",
        "user_temperature",
        "longest_user",
        "longest_answer",
        "opener_share",
        "least_distinct",
    ):
        default = getattr(defaults, name)
        many = isinstance(default, tuple)
        kind = type(default[0]) if many else type(default)
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None, nargs="+" if many else None,
                           help=f"{helps[name]} (default: {default})")  # fmt: skip

    group = p.add_argument_group("training")
    helps, plain = cli.field_help(TrainOptions), TrainOptions(steps=1)
    group.add_argument("--steps", type=int, help="optimiser steps")
    group.add_argument("--minutes", type=float, help="time budget of the training in place of --steps (default: 10)")
    group.add_argument("--lr", type=float, dest="learning_rate", help="AdamW's peak (default: the head's)")
    group.add_argument("--seed", type=int, default=0, help="of data and training (default: 0)")
    for name in ("batch", "weight_decay", "warmup", "clip", "held_out", "evaluate_every", "checkpoint_every"):
        default = getattr(plain, name)
        group.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=None,
                           help=f"{helps.get(name, name)} (default: {default})")  # fmt: skip
    group.add_argument("--evaluate-steps", type=int, help="steps between measurements, in place of seconds")
    group.add_argument("--checkpoint-steps", type=int, help="steps between checkpoints, in place of seconds")
    group.add_argument("--stop-after", type=int, help=helps["stop_after"])
    group.add_argument("--store-dtype", default="bfloat16", help="type in which the head is stored (default: bfloat16)")
    group.add_argument("--quantize", choices=["int8"], help="store the head in eight bits per weight")

    if head in heads.MODULES:
        group = p.add_argument_group(f"the head ({head})")
        for name, option in heads.head_module(head).OPTIONS.items():
            flag, text = f"--{name.replace('_', '-')}", f"{option.help} (default: {option.default})".replace("%", "%%")
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


def get_data(args: argparse.Namespace, target, log):
    """The rows: from --data if it exists, else synthesised."""
    from jaxspec.training import data as rows
    from jaxspec.training.synthesis import SynthesisOptions, synthesise

    file = None if args.data is None else Path(args.data)
    excluded = rows.exclusion_texts(args.exclude, target.tokenizer)
    if file is not None and file.exists():
        found = rows.load(file)
        if found.tokens.max() >= target.config.vocab_size:
            raise ConfigError(f"{file} holds token ids beyond the target's vocabulary of {target.config.vocab_size}")
        clear = ~rows.overlapping(found.tokens, excluded)
        dropped = int((~clear).sum())
        log(f"data: {found.num_tokens:,} tokens from {file}, {dropped} rows dropped for an overlap with excluded prompts")
        return found.take(clear)
    options = chosen(args, SynthesisOptions)
    prompts = None if args.prompts is None else list(rows.read_jsonl(args.prompts))
    made = synthesise(target, options, prompts=prompts, exclude=excluded, progress=not args.quiet, log=log)
    if file is not None:
        made.save(file)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    p = parser(next((a for a in arguments if not a.startswith("-")), None))
    args = p.parse_args(arguments)
    if args.head == "data":
        if args.data is None:
            p.error("HEAD data needs --data FILE")
    elif args.out is None:
        p.error("--out is missing")
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
    from jaxspec.conversion.errors import ConversionError
    from jaxspec.conversion.tokenizer import TokenizerFiles
    from jaxspec.loading import resolve
    from jaxspec.training import heads
    from jaxspec.training.loop import TrainOptions, remove_checkpoints, train
    from jaxspec.training.output import write_head

    out = Path(args.out).expanduser().absolute()
    if out.exists() and not args.force:
        raise ConversionError(f"{out} exists; pass --force to replace it")
    module = heads.head_module(args.head)
    objective = module.build(target.config, **{name: getattr(args, name) for name in module.OPTIONS})
    decay = getattr(module, "WEIGHT_DECAY", 0.0)
    budget = {"minutes": 10.0} if args.steps is None and args.minutes is None else {}
    options = chosen(args, TrainOptions, learning_rate=module.LEARNING_RATE, weight_decay=decay, **budget)
    data = get_data(args, target, log)
    work = out.with_name(f".{out.name}-training")
    trained = train(objective, target, data, options, folder=work, storage=args.quantize, progress=not args.quiet, log=log)
    for number, loss in enumerate(trained.losses):
        if number == 0 or number == len(trained.losses) - 1:
            log(f"step {number + 1}: loss {loss:.4f}")
    if trained.draft is None:
        log(f"stopped behind step {len(trained.losses)}; the same command without --stop-after goes on from {work}")
        return 0
    tokenizer = None
    if isinstance(objective.config, ModelConfig):
        source = resolve(args.target)
        tokenizer = TokenizerFiles.of_folder(source) if source.is_dir() else None
    write_head(trained, out, dtype=args.store_dtype, quantize=args.quantize, force=args.force, tokenizer=tokenizer)
    remove_checkpoints(work)
    log(f"accept length on held-out rows: {trained.curve[-1]['accept_length']:.2f}; wrote {out}")
    return 0


if __name__ == "__main__":
    cli.run(main)
