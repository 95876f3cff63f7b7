"""Checks of golden fixtures: what kinds of cases there are, who checks them, and what the checks share.

A check is a function of a case folder: it returns the largest absolute difference that it saw and raises `Mismatch` (or
anything else) when the case does not hold. One line in `CHECKS` makes a kind known; its module is imported when the first
such case comes up, and a module that does not exist yet makes the case "not built yet".
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CHECKS: tuple[tuple[str, str], ...] = (
    # (what the case name starts with, "module:function" in this package); the first match counts
    (r"verify_tree_builder", "verify:check_tree_builder"),
    (r"verify_greedy_tree", "verify:check_greedy_tree"),
    (r"verify_target_only", "verify:check_target_only"),
    (r"verify_chain", "verify:check_chain"),
    (r"verify_distributions", "verify:check_distributions"),
    (r"ngram_match", "ngram:check_ngram"),
    (r"target_deepseek_v3", "mtp:check_target"),
    (r"target_", "target:check_target"),
    (r"draft_(eagle|peagle)", "eagle:check_draft"),
    (r"tree_eagle", "eagle:check_tree"),
    (r"e2e_eagle", "eagle:check_end_to_end"),
    (r"mtp_", "mtp:check_mtp"),
    (r"draft_(dflash|dspark|deepspec|jetspec)", "dflash:check_draft"),
    (r"e2e_dflash", "dflash:check_end_to_end"),
    (r"draft_uno", "uno:check_draft"),
    (r"e2e_uno", "uno:check_end_to_end"),
)


class Mismatch(AssertionError):
    """A fixture does not hold; the message says which array, where and by how much."""


@dataclass(frozen=True)
class Case:
    """One case folder: its description and its arrays, checked against each other."""

    folder: Path
    info: dict
    arrays: dict[str, np.ndarray]

    @property
    def groups(self) -> list[str]:
        """First parts of the array names, in order: the examples of a case."""
        return list(dict.fromkeys(name.split(".")[0] for name in self.arrays))

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """The arrays under ``prefix.``, without it."""
        return {name[len(prefix) + 1 :]: a for name, a in self.arrays.items() if name.startswith(prefix + ".")}

    def compare(self, name: str, got, expected=None) -> float:
        """Compares with an array of the case (or `expected`): floats within its tolerance, all others exactly.

        Returns the largest absolute difference.
        """
        expected = self.arrays[name] if expected is None else np.asarray(expected)
        got = np.asarray(got)
        if got.shape != expected.shape:
            raise Mismatch(f"{name}: shape {got.shape} instead of {expected.shape}")
        if not got.size:
            return 0.0
        if not np.issubdtype(expected.dtype, np.floating):
            wrong = got != expected
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                raise Mismatch(f"{name}{list(at)}: {got[at]} instead of {expected[at]} ({wrong.sum()} of {wrong.size} differ)")
            return 0.0
        tolerance = self.info["tolerance"]
        got, expected = got.astype(np.float64), expected.astype(np.float64)
        gap = np.abs(got - expected)
        wrong = ~(gap <= tolerance["atol"] + tolerance["rtol"] * np.abs(expected))
        if wrong.any():
            at = tuple(int(i) for i in np.unravel_index(np.argmax(np.where(np.isnan(gap), np.inf, gap)), gap.shape))
            raise Mismatch(f"{name}{list(at)}: {got[at]} instead of {expected[at]} ({wrong.sum()} of {wrong.size} differ)")
        return float(gap.max())


def load_case(folder: str | Path) -> Case:
    """Reads case.json and io.npz; every array that the description names must be there, with that shape and type."""
    folder = Path(folder)
    info = json.loads((folder / "case.json").read_text())
    with np.load(folder / "io.npz") as stored:
        arrays = {name: stored[name] for name in stored.files}
    for name, said in info["arrays"].items():
        if name not in arrays:
            raise Mismatch(f"io.npz lacks the array {name} of case.json")
        found = (list(arrays[name].shape), str(arrays[name].dtype))
        if found != (said["shape"], said["dtype"]):
            raise Mismatch(f"{name} is {found}, case.json says {(said['shape'], said['dtype'])}")
    return Case(folder, info, {name: arrays[name] for name in info["arrays"]})


def find_check(case_name: str) -> Callable[[Path], float] | None:
    """The check for a case of this name, or None where none is registered."""
    for pattern, target in CHECKS:
        if re.match(pattern, case_name):
            module, function = target.split(":")
            return getattr(importlib.import_module(f"{__name__}.{module}"), function)
    return None
