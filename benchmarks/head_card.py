"""Writes the card (README.md) of trained heads, from their configuration, training curve and measured accept lengths.

python benchmarks/head_card.py checkpoints/smollm2-135m-* --results benchmarks/results/accept_lengths_{h200,cpu}.json
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import accept_report

from jaxspec.config import ConfigError
from jaxspec.training import card


def trained_by(file: Path) -> str | None:
    """The training command that a card names."""
    found = re.search(r"^## Command\n\n```bash\n(.*?)\n```$", file.read_text(), re.S | re.M) if file.exists() else None
    return found and found[1]


def measured_lines(rows: list[dict], head_id: str) -> list[str]:
    """The card's table of accept lengths; nothing for a head without measurements."""
    own = [row for row in rows if row["head_id"] == head_id]
    return [accept_report.table(own), "", "```bash", *accept_report.commands(own), "```"] if own else []


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folders", nargs="+", type=Path)
    p.add_argument("--results", nargs="*", type=Path, default=[], metavar="JSON", help="from benchmarks/accept_lengths.py")
    p.add_argument("--command", help="the command that trained them (default: as the card there says)")
    p.add_argument("--check", action="store_true", help="write nothing; the status says whether a card is out of date")
    args = p.parse_args(arguments)
    missing = [path for path in args.results if not path.exists()]
    if missing:
        p.error(f"no such file: {', '.join(map(str, missing))}")
    results = [row for path in args.results for row in accept_report.read(path)]
    stale = 0
    for folder in args.folders:
        file = folder / card.CARD
        text = card.card(folder.absolute(), measured_lines(results, card.digest(folder)), args.command or trained_by(file))
        same = file.exists() and file.read_text() == text
        stale += not same
        if not args.check:
            file.write_text(text)
        print(f"{file}: {'up to date' if same else 'out of date' if args.check else 'written'}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"error: {error}")
