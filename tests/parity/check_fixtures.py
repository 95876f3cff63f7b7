"""Runs every golden case under a folder: ``python tests/parity/check_fixtures.py DIR [--only REGEX]``.

One line per case: ``name ok 1.2e-06`` (largest absolute difference), ``name FAIL reason`` or
``name skipped (not built yet)``. Exit status 1 if a case fails, 2 if there is none to run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def check(folder: Path) -> tuple[bool, str]:
    """Whether a case may pass, and what its line says behind the name."""
    import tests.fast_compile  # noqa: F401, I001  before jax
    import jax

    from tests.parity.checks import find_check

    try:
        function = find_check(json.loads((folder / "case.json").read_text())["case"])
        if function is None:
            return True, "skipped (not built yet)"
        with jax.default_matmul_precision("highest"):
            return True, f"ok {function(folder):.1e}"
    except Exception as error:
        if os.environ.get("CHECK_FIXTURES_TRACEBACK"):
            traceback.print_exc()
        return False, f"FAIL {type(error).__name__}: {' '.join(str(error).split())}"


def main(arguments: list[str] | None = None) -> int:
    """Checks the cases and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of case folders, each with a case.json")
    parser.add_argument("--only", metavar="REGEX", help="only cases whose folder name this matches somewhere")
    options = parser.parse_args(arguments)
    cases = sorted(path.parent for path in options.folder.glob("*/case.json"))
    if not cases:
        print(f"no case folders (with a case.json) under {options.folder}", file=sys.stderr)
        return 2
    if options.only is not None:
        names = [case.name for case in cases]
        try:
            cases = [case for case in cases if re.search(options.only, case.name)]
        except re.error as error:
            print(f"--only {options.only!r} is not a regular expression: {error}", file=sys.stderr)
            return 2
        if not cases:
            print(f"--only {options.only!r} matches none of: {', '.join(names)}", file=sys.stderr)
            return 2
    passed = True
    for case in cases:
        fine, line = check(case)
        passed &= fine
        print(case.name, line, flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
