"""`convert`: any recognised source → a converted folder or a Hugging Face folder, written beside the goal and renamed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.conversion import store
from jaxspec.conversion.export import export_of, write_hf
from jaxspec.conversion.quantize import check_method
from jaxspec.conversion.sources import Checkpoint, Part, open_checkpoint
from jaxspec.drafters.kinds import format_of
from jaxspec.files.errors import ConversionError
from jaxspec.files.replacing import replacing
from jaxspec.hub import locate

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def parse_dtype(dtype: Any) -> np.dtype | None:
    """A floating type by name or as a type; None stays None.

    Raises ConversionError for anything else.
    """
    if dtype is None:
        return None
    short = {"fp32": "float32", "f32": "float32", "fp16": "float16", "f16": "float16", "bf16": "bfloat16"}
    try:
        name = short.get(dtype, dtype) if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ConversionError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: Any = None,
    force: bool = False,
    dry_run: bool = False,
    to_hf: bool = False,
    target: str | Path | None = None,
    quantize: str | None = None,
    progress: bool = True,
) -> Path:
    """Converts a checkpoint.

    Args:
      src: a Hugging Face folder, a GGUF file, a converted folder, a draft head of a known format; or what `jaxspec.load` takes.
      dst: the folder to be written.
      dtype: float32, float16 or bfloat16 for the floating parameters; None keeps the stored type (GGUF: float32).
      force: replace `dst` if it exists; the old one goes when the new one is complete. Never what `src` or `target` need.
      dry_run: print the mapping table and write nothing.
      to_hf: write safetensors and ``config.json`` for transformers instead of a converted folder.
      target: the model that a draft head belongs to, where its format needs to know.
      quantize: "int8" stores large parameters in eight bits with a scale per channel (`jaxspec.conversion.quantize`): a
        fourth of float32's bytes. Fine for draft heads, whose errors cost no correctness; a target becomes another model.
      progress: show a progress bar on stderr.

    Returns:
      `dst`.

    Raises:
      MissingFileError: `src` or a file of it is not there.
      ConversionError: `src` is not recognised, damaged, or does not fit its configuration; `dst` exists and not `force`;
        `quantize` with `to_hf` or of a folder that is stored in eight bits already.
    """
    dst, kind = Path(dst).expanduser().absolute(), parse_dtype(dtype)
    check_method(quantize)
    if quantize is not None and to_hf:
        raise ConversionError(f"quantize={quantize!r} is for converted folders: published formats (to_hf) hold floats here")
    path, target_path = locate(src), None if target is None else locate(target)
    if quantize is not None and store.is_quantized(path):
        raise ConversionError(f"{path} is stored in eight bits already: convert its original to avoid rounding twice")
    checkpoint = open_checkpoint(path, None if target_path is None else target_config(target_path))
    checkpoint.check()
    if dry_run:
        print(f"{checkpoint.format} {path}")
        print(checkpoint.table(kind))
        return dst
    sources = [path] if target_path is None else [path, target_path]
    with store.writing(dst), replacing(dst, force, sources) as folder:
        if to_hf:
            export_hf(checkpoint, folder, kind, progress)
        else:
            write_converted(checkpoint, folder, kind, progress, str(src), quantize)
    return dst


def target_config(path: Path) -> ModelConfig:
    """The configuration of a target, without its weights."""
    config = store.read_config(path)[0] if path.is_dir() and store.is_converted(path) else open_checkpoint(path).config
    if not isinstance(config, ModelConfig):
        raise ConversionError(f"target={path} is a draft head, not a model")
    return config


def write_converted(
    checkpoint: Checkpoint, folder: Path, dtype: np.dtype | None, progress: bool, source: str, quantize: str | None = None
) -> None:
    """Parameters, configuration and tokenizer of a checkpoint, its heads under ``drafts/``."""
    parts = checkpoint.parts()
    with bar(sum(len(part.rules) for part in parts.values()), progress) as advance:
        for name, part in parts.items():
            where = folder / "drafts" / name if name else folder
            (where / "params").mkdir(parents=True)
            stream = advance(checkpoint.build(part, dtype))
            shards = store.save(stream, where / "params", quantize=quantize)
            provenance = {"source": source, "format": checkpoint.format, "dtype": None if dtype is None else dtype.name}
            provenance |= {"quantized": quantize}
            store.write_config(where, part.config, provenance, shards)
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.write(folder)


def export_hf(checkpoint: Checkpoint, folder: Path, dtype: np.dtype | None, progress: bool) -> None:
    """Safetensors, ``config.json`` and tokenizer files for transformers; drafts in the same files or folders of their own."""
    apart = {name: part for name, part in checkpoint.drafts.items() if format_of(part.config).folder is not None}
    within = {name: part for name, part in checkpoint.drafts.items() if name not in apart}
    rules, shapes = dataclasses.replace(checkpoint, drafts=within).joined()
    whole = Part(checkpoint.config, shapes, tuple(rules))
    export = export_of(checkpoint.config, {name: part.config for name, part in within.items()})
    with bar(len(rules) + sum(len(part.rules) for part in apart.values()), progress) as advance:

        def build(part):
            return advance(checkpoint.build(part, dtype))

        write_hf(whole, checkpoint.tensors, folder, export=export, build=build, dtype=dtype, tokenizer=checkpoint.tokenizer)
        for part in apart.values():
            beside = folder / format_of(part.config).folder
            beside.mkdir()
            write_hf(part, checkpoint.tensors, beside, build=build, dtype=dtype)


@contextlib.contextmanager
def bar(total: int, progress: bool):
    """A tqdm bar over several streams: yields a function that wraps each."""
    from tqdm import tqdm

    with tqdm(total=total, unit="tensor", disable=not progress) as shown:

        def advance(stream: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
            for name, array in stream:
                shown.set_postfix_str(name, refresh=False)
                yield name, array
                shown.update()

        yield advance
