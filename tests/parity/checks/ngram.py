"""The n-gram matcher against the trees that SGLang's own C++ code gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from jaxspec.drafters.ngram.config import NgramConfig
from jaxspec.drafters.ngram.corpus import Corpus
from jaxspec.drafters.ngram.history import NgramHistory
from jaxspec.drafters.ngram.trie import MatchTree


def stored_paths(tokens: np.ndarray, parents: np.ndarray, num_matched: int) -> set[tuple[int, ...]]:
    """The stored tree as a set of root-to-node paths; padding left out."""
    tree = MatchTree(int(tokens[0]))
    tree.tokens += tokens[1 : num_matched + 1].tolist()
    tree.parents += parents[1 : num_matched + 1].tolist()
    return tree.paths()


def compare(tree: MatchTree, arrays: dict, prefix: str, row: int | None = None) -> None:
    """Asserts that a tree has the stored root, number of nodes and, where no tie leaves a choice, paths."""
    names = ("tokens", "parents", "num_matched", "tie_free")
    stored = [arrays[f"{prefix}.{n}"] if f"{prefix}.{n}" in arrays else np.asarray(True) for n in names]
    tokens, parents, num_matched, tie_free = stored if row is None else [value[row] for value in stored]
    where = prefix if row is None else f"{prefix}, row {row}"
    assert tree.tokens[0] == tokens[0], f"{where}: root {tree.tokens[0]}, expected {tokens[0]}"
    assert tree.num_matched == num_matched, f"{where}: {tree.num_matched} nodes matched, expected {num_matched}"
    if tie_free:
        expected = stored_paths(tokens, parents, int(num_matched))
        assert tree.paths() == expected, f"{where}: paths {sorted(tree.paths())}, expected {sorted(expected)}"


def numbers(text: str) -> list[int]:
    """The integers in a sentence, in order."""
    return [int(word) for word in "".join(c if c.isdigit() else " " for c in text).split()]


def check_ngram(case_dir: Path) -> float:
    """Compares every query of a case directory; the error is 0 or an AssertionError, since trees are discrete."""
    case = json.loads((case_dir / "case.json").read_text())
    with np.load(case_dir / "io.npz") as file:
        arrays = dict(file)

    def unpad(row: np.ndarray) -> list[int]:
        return row[row >= 0].tolist()

    def config(depth: int, low: int, high: int, match_type: str, **more) -> NgramConfig:
        return NgramConfig(
            max_trie_depth=int(depth), min_bfs_breadth=int(low), max_bfs_breadth=int(high), match_type=match_type, **more
        )

    for match_type in ("bfs", "prob"):
        for name in sorted(key.removesuffix(".params") for key in arrays if key.endswith(".params")):
            *params, num_draft_tokens = arrays[f"{name}.params"]
            history = NgramHistory(config(*params, match_type))
            for document in arrays[f"{name}.corpus"]:
                history.insert(unpad(document))
            for row, query in enumerate(arrays[f"{name}.queries"]):
                tree = history.match(unpad(query), int(num_draft_tokens))
                compare(tree, arrays, f"{name}.{match_type}", row)

        if f"growing.{match_type}.tokens" in arrays:
            # These parameters and the query are given in words only.
            text = case["arrays"][f"growing.{match_type}.tokens"]["meaning"]
            query = numbers(text.split("query [", 1)[1].split("]")[0])
            *params, num_draft_tokens = numbers(text.split("(", 1)[1])
            history = NgramHistory(config(*params, match_type))
            for row, document in enumerate(arrays["growing.inserts"]):
                history.insert(unpad(document))
                compare(history.match(query, num_draft_tokens), arrays, f"growing.{match_type}", row)

    if "external.tokens" in arrays:
        *params, num_draft_tokens = numbers(case["arrays"]["external.inserted"]["meaning"].split("(", 1)[1])
        budget = numbers(case["arrays"]["external.corpus"]["meaning"].split("budget", 1)[1])[0]
        history = NgramHistory(config(*params, "BFS", external_sam_budget=budget))
        history.insert(unpad(arrays["external.inserted"]))
        history.corpora["external"] = Corpus.build(arrays["external.corpus"], history.config)
        compare(history.match(unpad(arrays["external.query"]), num_draft_tokens), arrays, "external")
    return 0.0
