"""The draft heads that ship with jaxspec: found in a clone (``checkpoints/``) and in an installed wheel alike.

    checkpoints/<model>-<name>/     a converted folder and its card (README.md)
    checkpoints/measured.json       what was measured of them (`jaxspec.drafters.measured`), by model and name

Only their configurations are read at once; a head's weights are read when something first needs them.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from jaxspec.config import ModelConfig
from jaxspec.conversion import store
from jaxspec.drafters.kinds import shapes_of
from jaxspec.drafters.measured import Measurement
from jaxspec.params import Deferred, DraftParams, ModelParams

PACKAGE = Path(__file__).resolve().parent
ROOTS = (PACKAGE / "checkpoints", PACKAGE.parent / "checkpoints")
"""Where heads may lie: inside the installed package, or beside it in a clone."""
MEASURED_FILE = "measured.json"


def root() -> Path | None:
    """The folder of shipped heads; None when there is none."""
    return next((folder for folder in ROOTS if folder.is_dir()), None)


def folders(model: str, where: Path | None = None) -> dict[str, Path]:
    """Heads for a model by name ("eagle3", …).

    Args:
      model: the demo model's name.
      where: a folder laid out like ``checkpoints/``; None for the one that ships.
    """
    where = root() if where is None else where
    if where is None:
        return {}
    found = {path.name.removeprefix(f"{model}-"): path for path in sorted(where.glob(f"{model}-*"))}
    return {name: path for name, path in found.items() if store.is_converted(path)}


def measurements(model: str, where: Path | None = None) -> dict[str, tuple[Measurement, ...]]:
    """What the table says of a model's heads, by name."""
    where = root() if where is None else where
    file = None if where is None else where / MEASURED_FILE
    if file is None or not file.exists():
        return {}
    rows: dict[str, list[Measurement]] = {}
    for row in json.loads(file.read_text())["rows"]:
        if row["model"] == model:
            rows.setdefault(row["head"], []).append(Measurement.from_json(row))
    return {name: tuple(found) for name, found in rows.items()}


def drafts_for(model: str, target: ModelParams, dtype: Any, where: Path | None = None) -> dict[str, DraftParams | ModelParams]:
    """A model's shipped heads, whose weights are read when they are first needed.

    Args:
      model: the demo model's name.
      target: the loaded model; heads for another vocabulary are left out (its file is then not the one they were made for).
      dtype: of the floating parameters.
      where: as for `folders`.
    """
    figures = measurements(model, where)
    drafts: dict[str, DraftParams | ModelParams] = {}
    for name, folder in folders(model, where).items():
        config, data = store.read_config(folder)
        layers = getattr(config, "layers", getattr(config, "target", config))
        if layers.vocab_size != target.config.vocab_size:
            continue
        tree = Deferred(functools.partial(store.load, folder / "params", data["num_shards"], shapes_of(config), dtype))
        measured = figures.get(name, ())
        if isinstance(config, ModelConfig):
            drafts[name] = ModelParams(tree, config, target.tokenizer, source=str(folder), measured=measured)
        else:
            drafts[name] = DraftParams(tree, config, str(folder), measured)
    return drafts
