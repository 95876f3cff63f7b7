"""Checkpoints of training: orbax for the arrays, JSON beside them for losses and measurements."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.config import ConfigError
from jaxspec.conversion import store
from jaxspec.conversion.mapping import flatten


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder, or None."""
    if not folder.is_dir():
        return None
    steps = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name) and (path / "about.json").exists()]
    return max(steps, key=lambda path: int(path.name[5:]), default=None)


def save_checkpoint(folder: Path, step: int, state: Any, about: dict) -> None:
    """Writes ``step_N`` under another name, renames it, then removes older ones.

    Args:
      folder: holds the checkpoints of one run.
      step: N.
      state: a pytree of arrays.
      about: JSON types.
    """
    temporary = folder / f".new_step_{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "state").mkdir(parents=True)
    leaves = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    shards = store.save(leaves.items(), temporary / "state")
    (temporary / "about.json").write_text(json.dumps({**about, "num_shards": shards}))
    goal = folder / f"step_{step}"
    shutil.rmtree(goal, ignore_errors=True)
    os.replace(temporary, goal)
    for path in folder.glob("step_*"):
        if path != goal:
            shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(path: Path, like: Any) -> tuple[Any, dict]:
    """(state, about) as `save_checkpoint` got them.

    Args:
      path: ``step_N``.
      like: a pytree of the state's structure and shapes.

    Raises:
      ConfigError: the stored state has another structure.
    """
    about = json.loads((path / "about.json").read_text())
    leaves, tree = jax.tree.flatten(like)
    shapes = {f"leaf_{i}": leaf.shape for i, leaf in enumerate(leaves)}
    try:
        stored = store.load(path / "state", about.pop("num_shards"), shapes)
    except ValueError as error:
        raise ConfigError(f"{path} holds the state of another kind of head: {error}") from None
    return jax.tree.unflatten(tree, [stored[name] for name in shapes]), about


def differing(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Names of all that differs between two nested dicts, with both values."""
    theirs, ours = flatten(theirs), flatten(ours)
    names = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name, "nothing") != ours.get(name, "nothing"))
    return ", ".join(f"{name} ({theirs.get(name, 'nothing')} there, {ours.get(name, 'nothing')} asked for)" for name in names)
