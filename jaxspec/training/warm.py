"""A head that was trained before as the beginning of another run: its weights, and how many tokens it has seen."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.conversion import store
from jaxspec.conversion.mapping import flatten
from jaxspec.loading import load, load_draft
from jaxspec.training import card
from jaxspec.training.state import differing


@dataclass(frozen=True, eq=False)
class Start:
    """A trained head.

    Attributes:
      source: its folder's name.
      digest: of its configuration and weights (`jaxspec.training.card.digest`).
      config: the draft's configuration.
      tree: its parameters in float32.
      about: how it was trained, as its ``config.json`` says; empty where that says nothing.
      curve: its measurements, those of still earlier runs among them.
    """

    source: str
    digest: str
    config: Any
    tree: dict
    about: dict[str, Any]
    curve: tuple[dict[str, Any], ...]

    @property
    def tokens(self) -> int:
        """Training tokens of all runs so far."""
        return int(self.about.get("tokens_of_all_runs", self.about.get("tokens", 0)))

    def provenance(self) -> dict[str, Any]:
        """What the new head says of this one."""
        about = self.about
        kept = ("learning_rate", "distinct_tokens", "seconds", "device", "started_from")
        run = {name: about[name] for name in kept if name in about}
        data = {f"data_{name}": value for name, value in about.get("data", {}).items() if name in ("seed", "rows_written")}
        return {"head": self.source, "digest": self.digest, "tokens": self.tokens, **run, **data}

    def replace(self, trainable: dict, constants: dict) -> tuple[dict, dict]:
        """Both trees of a new head with this one's values.

        Raises:
          ConfigError: their parameters differ in names or shapes.
        """
        own = flatten(self.tree)
        wanted = {path: x.shape for path, x in (flatten(trainable) | flatten(constants)).items()}
        found = {path: x.shape for path, x in own.items()}
        if wanted != found:
            differ = sorted(path for path in wanted.keys() | found.keys() if wanted.get(path) != found.get(path))
            raise ConfigError(
                f"{self.source} has other parameters than the head to be trained: "
                + ", ".join(f"{path} ({found.get(path, 'none')} there, {wanted.get(path, 'none')} here)" for path in differ[:4])
            )

        def values(tree: dict) -> dict:
            def copy(path, x):  # a step of training takes over what it is given
                return jnp.array(own["/".join(str(key.key) for key in path)], x.dtype)

            return jax.tree_util.tree_map_with_path(copy, tree)

        return values(trainable), values(constants)


def read_start(folder: str | Path, objective: Any) -> Start:
    """A head's folder as the start of a run, whether it is stored in eight bits or not.

    Args:
      folder: what `jaxspec.training.output.write_head` wrote.
      objective: of the run.

    Raises:
      ConversionError: it is no converted folder.
      ConfigError: it is a head of another configuration.
    """
    folder = Path(folder).expanduser()
    config, data = store.read_config(folder)
    if type(config) is not type(objective.config):
        raise ConfigError(
            f"{folder} is a {type(config).__name__} head, the one to be trained has a {type(objective.config).__name__}"
        )
    if config != objective.config:
        pair = (dataclasses.asdict(config), dataclasses.asdict(objective.config))
        raise ConfigError(
            f"{folder} cannot be the start of this head, they differ in {differing(*pair)}: train with its options"
        )
    whole = isinstance(config, ModelConfig)
    draft = load(folder, dtype=jnp.float32) if whole else load_draft(folder, objective.target, dtype=jnp.float32)
    file = folder / "training.jsonl"
    curve = tuple(json.loads(line) for line in file.read_text().splitlines() if line) if file.exists() else ()
    about = data.get("provenance", {}).get("training") or {}
    return Start(folder.resolve().name, card.digest(folder), config, draft.tree, about, curve)
