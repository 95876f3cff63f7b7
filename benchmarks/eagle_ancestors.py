"""What it is worth that a beam of an EAGLE tree attends to its own ancestors' keys and values.

SGLang keeps one scratch column per beam index, so that after a re-selection a beam may attend to a branch it does not
continue. Both ways are run on the same prompts with the same head; answers are the same, accepted lengths are not.

    python benchmarks/eagle_ancestors.py [TARGET DRAFT] [--prompts 128] [--tokens 64]
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jaxspec import SpecConfig, load, load_draft  # noqa: E402
from jaxspec.engine.batch import open_batch  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures"
TREES = ((3, 2, 4), (3, 4, 8), (5, 2, 8), (5, 4, 8), (5, 4, 16), (5, 8, 32), (7, 4, 16))


def accept_lengths(target, head, prompts, spec: SpecConfig, tokens: int, columns: bool) -> tuple[list[list[int]], np.ndarray]:
    """The answers, and tokens per round of every prompt."""
    batch = open_batch(target, prompts, draft=head, spec=spec, max_new_tokens=tokens, ignore_eos=True)
    drafter = dataclasses.replace(batch.program.drafter, column_beams=columns)
    batch.program = dataclasses.replace(batch.program, drafter=drafter)
    batch.prefill()
    batch.run()
    answers = batch.logs()
    lengths = np.array([(len(a.tokens) - 1) / a.round_of.max() for a in answers])
    return [a.tokens for a in answers], lengths


def main() -> None:
    """Runs every tree both ways and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default=FIXTURES / "target_llama_smallvocab", metavar="TARGET")
    parser.add_argument("draft", nargs="?", default=FIXTURES / "e2e_eagle3", metavar="DRAFT")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    target = load(args.target)
    head = load_draft(args.draft, target)
    rng = np.random.default_rng(0)
    vocab = target.config.vocab_size
    prompts = [rng.integers(0, vocab, n).tolist() for n in rng.integers(4, 17, args.prompts)]
    print("| num_steps / topk / num_draft_tokens | own ancestors | columns (SGLang) | gain | standard error |")
    print("|---|---|---|---|---|")
    for tree in TREES:
        spec = SpecConfig(*tree)
        tokens, own = accept_lengths(target, head, prompts, spec, args.tokens, columns=False)
        same, column = accept_lengths(target, head, prompts, spec, args.tokens, columns=True)
        if tokens != same:
            raise SystemExit(f"{tree}: the answers differ; verification is not exact")
        gain = own - column
        error = gain.std(ddof=1) / np.sqrt(len(gain)) / column.mean()
        print(
            f"| {'/'.join(map(str, tree))} | {own.mean():.3f} | {column.mean():.3f} | {gain.mean() / column.mean():+.1%} "
            f"| {error:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
