"""What training leaves behind: the head as a converted folder, and its curve."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.config import ConfigError
from jaxspec.conversion import quantize as storage
from jaxspec.conversion import store
from jaxspec.conversion.mapping import flatten, unflatten
from jaxspec.conversion.pipeline import fresh_folder
from jaxspec.params import DraftParams
from jaxspec.training.objective import cast


@dataclass(frozen=True)
class Trained:
    """What `train` gives: the head (None where it was stopped before the end), its loss by step, the curve of measurements."""

    draft: DraftParams | None
    losses: tuple[float, ...]
    curve: tuple[dict[str, Any], ...]
    about: dict[str, Any]


def as_stored(tree: Any, method: str) -> Any:
    """The parameters as they come back from a folder that was written with that method (`jaxspec.conversion.quantize`)."""
    storage.check_method(method)

    def stored(path: str, x):
        array = np.asarray(x)
        if not storage.is_quantized(path, array.shape, array.dtype):
            return x
        return jnp.asarray(storage.dequantize(*storage.quantize(path, array)))

    return unflatten({path: stored(path, x) for path, x in flatten(tree).items()})


def write_jsonl(file: Path, rows) -> None:
    """One JSON object a line, written under another name first."""
    temporary = file.with_name(f".{file.name}.new")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(temporary, file)


def write_head(
    trained: Trained,
    out: Path,
    *,
    dtype: str | None = "bfloat16",
    quantize: str | None = None,
    force: bool = False,
    tokenizer=None,
) -> Path:
    """A converted folder with the trained head, which `jaxspec.load_draft` reads, and its curve as ``training.jsonl``.

    Args:
      trained: what `train` gave.
      out: the folder.
      dtype: type in which parameters are stored.
      quantize: "int8" for eight bits per weight (`jaxspec.conversion.quantize`).
      force: replace `out`.
      tokenizer: `TokenizerFiles` that a head which is a whole model needs.

    Raises:
      ConversionError: `out` exists and not `force`.
      ConfigError: training was stopped before its end.
    """
    if trained.draft is None:
        raise ConfigError("training was stopped before its end: there is no head to write yet")
    tree = trained.draft.tree if dtype is None else cast(trained.draft.tree, jnp.dtype(dtype))
    with fresh_folder(out, force, Path(os.devnull)) as folder:
        provenance = {"format": "trained by jaxspec", "training": trained.about}
        store.write_folder(folder, trained.draft.config, tree, provenance, quantize=quantize)
        write_jsonl(folder / "training.jsonl", trained.curve)
        if tokenizer is not None:
            tokenizer.write(folder)
    return out
