"""Targets: both spellings of config.json, strict loading, every layer's residual stream, logits, greedy continuation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import jaxspec
from jaxspec.conversion.targets.hf_config import parse_config
from tests.parity.checks import Mismatch, load_case

FEATURES = ("hidden_states", "final_norm", "logits")


def check_configs(folder: Path) -> None:
    """All spellings of the configuration must parse to the same ``ModelConfig``."""
    parsed = {file.name: parse_config(json.loads(file.read_text())) for file in sorted(folder.glob("config*.json"))}
    for name, config in parsed.items():
        if config != parsed["config.json"]:
            raise Mismatch(f"{name} gives another configuration than config.json: {config} and {parsed['config.json']}")


def check_target(folder: Path) -> float:
    """Compares a model with one case: groups with ``input_ids`` by their features, groups with ``prompt_ids`` by the greedy
    tokens ``new_ids`` (in one dense forward: each new token must be the arg-max behind all before it)."""
    case = load_case(folder)
    check_configs(folder)
    params = jaxspec.load(folder, dtype="float32")
    groups: dict[str, dict[str, np.ndarray]] = {}
    for name, array in case.arrays.items():
        groups.setdefault(name.rpartition(".")[0], {})[name.rpartition(".")[2]] = array
    rows = {}
    for prefix, group in groups.items():
        if "input_ids" in group and any(f in group for f in FEATURES):
            rows[prefix] = group["input_ids"]
        elif "prompt_ids" in group and "new_ids" in group:
            rows[prefix] = np.concatenate([group["prompt_ids"], group["new_ids"]])[:-1]
        else:
            raise Mismatch(f"group {prefix!r} has arrays of an unknown kind: {', '.join(group)}")
    if not rows:
        raise Mismatch("the case holds nothing to compare")
    # One program for all groups: padding stands behind the tokens, where causal attention cannot see it.
    longest = max(map(len, rows.values()))
    out = jaxspec.forward(params, np.stack([np.pad(row, (0, longest - len(row))) for row in rows.values()]))
    worst = 0.0
    for i, (prefix, row) in enumerate(rows.items()):
        group, lead = groups[prefix], f"{prefix}." if prefix else ""
        got = {
            "hidden_states": out.hidden_states[:, i, : len(row)],
            "final_norm": out.final_norm[i, : len(row)],
            "logits": out.logits[i, : len(row)],
        }
        for feature in set(FEATURES) & set(group):
            worst = max(worst, case.compare(lead + feature, got[feature]))
        if "new_ids" in group:
            chosen = np.argmax(got["logits"], axis=-1)[len(group["prompt_ids"]) - 1 :]
            case.compare(f"{lead}new_ids", chosen.astype(group["new_ids"].dtype))
    return worst
