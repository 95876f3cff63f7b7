"""Whether a change of the code changes what a GPU runs: a fingerprint of every program of the peer suite, with no GPU.

    JAX_PLATFORMS=cpu python benchmarks/program_text.py --json before.json
    JAX_PLATFORMS=cpu python benchmarks/program_text.py --against before.json

By hand: needs ``jax[cuda13]``, as `deviceless.py` does. A round is traced for an H200 and lowered, kernels included. Equal
fingerprints mean equal programs, whatever was moved or renamed; different ones may differ in order only.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import sys
from pathlib import Path

import deviceless
import jax
from jax._src import source_info_util

from jaxspec.benchmarking import shapes, suites

# Kernels carry, as bytes, the lines that they were written on.
jax.config.update("jax_traceback_in_locations_limit", 0)
source_info_util.user_frame = lambda *_: None

NAMES = ((r"\bloc\([^\n]*\)", ""), (r"#loc\d*[^\n]*", ""), (r"@\"?[\w.]+\"?", "@f"), (r"(module_)?name = \"[^\"]*\"", ""))
"""What says where code stands or what it is called."""


def fingerprint(row: str, target: str, batch: int, context: int) -> str:
    """Of the lowered round of a row."""
    jax.clear_caches()  # what other rows have traced gives names to this one's kernels
    text = deviceless.lower_round(row, target, batch, context).as_text()
    for pattern, instead in NAMES:
        text = re.sub(pattern, instead, text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", help="rows of the peer suite (default: all)")
    parser.add_argument("--target", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=6, help="layers of the target, which are all alike (default: 6)")
    parser.add_argument("--json", type=Path, help="write the fingerprints")
    parser.add_argument("--against", type=Path, help="compare with those of another commit")
    args = parser.parse_args()
    for shape in {args.target, "llama-1b"}:
        model = shapes.MODELS[shape]
        shapes.MODELS[shape] = dataclasses.replace(model, num_layers=args.layers, windows=model.windows[: args.layers])
    before = json.loads(args.against.read_text()) if args.against else {}
    found, changed = {}, 0
    for name, batch, context in suites.PEER_ORDER:
        if args.rows and name not in args.rows:
            continue
        key = f"{name} b{batch} {context}"
        found[key] = fingerprint(name, args.target, batch, context)
        verdict = "" if not before else "same" if before.get(key) == found[key] else "CHANGED"
        changed += verdict == "CHANGED"
        print(f"{key:28} {found[key]} {verdict}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if changed else 0)


if __name__ == "__main__":
    main()
