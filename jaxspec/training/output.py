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
from jaxspec.conversion.pipeline import parse_dtype
from jaxspec.files.replacing import replacing
from jaxspec.params import DraftParams, ModelParams
from jaxspec.training.objective import cast


@dataclass(frozen=True)
class Trained:
    """What `train` gives.

    Attributes:
      draft: the head, or a whole model where the objective trains one; None where training was stopped before its end.
      losses: by step.
      curve: the measurements.
      about: how it was trained, JSON types.
    """

    draft: DraftParams | ModelParams | None
    losses: tuple[float, ...]
    curve: tuple[dict[str, Any], ...]
    about: dict[str, Any]


def as_stored(tree: Any, method: str, dtype: str | None = "bfloat16") -> Any:
    """The parameters as they come back from a folder, in the types that they have here.

    Args:
      tree: the parameters.
      method: how they are stored (`jaxspec.conversion.quantize`).
      dtype: type in which they are stored, and from which they are rounded; see `write_head`.
    """
    storage.check_method(method)
    kind = parse_dtype(dtype)

    def stored(path: str, x):
        array = np.asarray(x if kind is None else cast(x, kind))
        if storage.is_quantized(path, array.shape, array.dtype):
            array = storage.dequantize(*storage.quantize(path, array))
        return jnp.asarray(array, x.dtype)

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
      dtype: float32, float16 or bfloat16, in which parameters are stored; None: as they are.
      quantize: "int8" for eight bits per weight (`jaxspec.conversion.quantize`).
      force: replace `out`.
      tokenizer: `TokenizerFiles` that a head which is a whole model needs.

    Raises:
      ConversionError: `out` exists and not `force`; another `dtype` than these.
      ConfigError: training was stopped before its end.
    """
    if trained.draft is None:
        raise ConfigError("training was stopped before its end: there is no head to write yet")
    kind = parse_dtype(dtype)
    tree = trained.draft.tree if kind is None else cast(trained.draft.tree, kind)
    with replacing(out, force) as folder:
        provenance = {"format": "trained by jaxspec", "training": trained.about}
        store.write_folder(folder, trained.draft.config, tree, provenance, quantize=quantize)
        write_jsonl(folder / "training.jsonl", trained.curve)
        if tokenizer is not None:
            tokenizer.write(folder)
    return out
