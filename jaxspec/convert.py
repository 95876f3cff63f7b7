"""``python -m jaxspec.convert SRC DST``: checkpoints of every known format → a converted folder, or back to Hugging Face."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jaxspec import cli
from jaxspec.conversion.quantize import METHODS


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = argparse.ArgumentParser(
        prog="python -m jaxspec.convert",
        description="Converts a checkpoint to a folder that jaxspec loads: an orbax checkpoint of a Flax parameter tree, "
        "config.json and tokenizer files. What SRC is, is recognised.",
        epilog="Example: python -m jaxspec.convert ./Llama-3.2-1B-Instruct ./llama --dtype bfloat16",
    )
    p.add_argument(
        "src", metavar="SRC", help="Hugging Face folder, GGUF file, draft head, converted folder, hub id or smollm2-135m"
    )
    p.add_argument("dst", metavar="DST", nargs="?", help="folder to write; may be left out with --dry-run and --verify")
    p.add_argument("--dtype", help="float32, float16 or bfloat16 (default: as stored; GGUF: float32)")
    p.add_argument(
        "--quantize",
        choices=METHODS,
        help="store large parameters in eight bits with a scale per channel: a fourth of float32's bytes. For draft heads: it "
        "rounds, so that a target becomes another model. Not with --to-hf",
    )
    p.add_argument("--target", metavar="MODEL", help="the model that a draft head belongs to, where its format needs to know")
    p.add_argument("--to-hf", action="store_true", help="write safetensors and config.json that transformers loads")
    p.add_argument("--dry-run", action="store_true", help="print the mapping table and write nothing")
    p.add_argument("--force", action="store_true", help="replace DST if it exists")
    p.add_argument("--verify", action="store_true", help="compare every array of the converted folder SRC with its checksum")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    from jaxspec.conversion import convert
    from jaxspec.conversion.store import verify

    p = parser()
    args = p.parse_args(arguments)
    if args.verify:
        if args.dst is not None:
            p.error("--verify takes SRC alone, a converted folder")
        print(f"{args.src}: {verify(Path(args.src).expanduser())} arrays are as they were written")
        return 0
    if args.dst is None and not args.dry_run:
        p.error("DST is missing")
    folder = convert(
        args.src,
        args.dst or ".",
        dtype=args.dtype,
        force=args.force,
        dry_run=args.dry_run,
        to_hf=args.to_hf,
        target=args.target,
        quantize=args.quantize,
        progress=not args.quiet,
    )
    if not args.dry_run:
        print(f"wrote {folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    cli.run(main)
