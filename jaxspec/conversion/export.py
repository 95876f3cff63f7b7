"""Back to published formats: rules run the other way, safetensors are streamed, ``config.json`` is what their loaders read.

What becomes of a draft head, its kind's record says (`jaxspec.drafters.kinds.Format`); of a model, `targets.hf_export`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.conversion.drafts import peft
from jaxspec.conversion.drafts.dflash_export import export_dflash
from jaxspec.conversion.drafts.eagle_export import export_eagle
from jaxspec.conversion.drafts.mtp_alone import export_alone
from jaxspec.conversion.mapping import FLOAT32_LEAVES, Rule, cast, expected_shapes, flatten, is_float, unbuild
from jaxspec.conversion.targets import hf, hf_export
from jaxspec.drafters.dflash.config import DFlashConfig
from jaxspec.drafters.eagle.config import EagleConfig
from jaxspec.drafters.kinds import format_of, imported
from jaxspec.drafters.mtp.config import MtpConfig
from jaxspec.drafters.uno.config import UnoConfig
from jaxspec.files.errors import ConversionError
from jaxspec.files.readers import SAFETENSORS_DTYPES, TensorSource
from jaxspec.tokenizer.tokenizer import TokenizerFiles

SHARD_BYTES = 5 * 10**9
CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class Export:
    """What is to be written: the rules of a published format, its ``config.json``, and what both files are called."""

    rules: tuple[Rule, ...]
    config: dict[str, Any]
    weights: str = "model"
    config_file: str = "config.json"


class Part(Protocol):
    """A parameter tree and how to fill it (`jaxspec.conversion.sources.Part`)."""

    config: Any
    shapes: Mapping
    rules: tuple[Rule, ...]


def model_export(config: ModelConfig) -> Export:
    """A decoder as transformers names it."""
    return Export(tuple(hf.rules_for(config)), hf_export.model_keys(config))


def eagle_export(config: EagleConfig) -> Export:
    """An EAGLE head in the layout that it came in."""
    rules, keys = export_eagle(config, hf_export.common_keys(config.layers))
    return Export(tuple(rules), keys)


def dflash_export(config: DFlashConfig) -> Export:
    """A block draft in the layout that it came in."""
    rules, keys = export_dflash(config, hf_export.common_keys(config.layers))
    return Export(tuple(rules), keys)


def uno_export(config: UnoConfig) -> Export:
    """An adapter as PEFT writes it."""
    return Export(tuple(peft.rules_of(config)), peft.config_keys(config), "adapter_model", peft.CONFIG_FILE)


def mtp_export(config: MtpConfig) -> Export:
    """MTP layers in a folder of their own; those that came with a target go into its files (`mtp.export_with_target`)."""
    rules, keys = export_alone(config, hf_export.common_keys(config.layers))
    return Export(tuple(rules), keys)


def export_of(config: Any, drafts: Mapping[str, Any] | None = None) -> Export:
    """The published format of a configuration and of the drafts in the same files (name → configuration).

    Raises ConversionError when one of them has none here.
    """
    write = format_of(config).export
    if write is None:
        raise ConversionError(f"a {type(config).__name__} cannot be exported to a published format")
    export = imported(write)(config)
    for name, draft in (drafts or {}).items():
        within = format_of(draft).within_target
        if within is None:
            raise ConversionError(f"the draft head {name!r} has no export inside its target's files: export it on its own")
        rules, keys = imported(within)(draft, config, list(export.rules), f"drafts/{name}/")
        export = Export(tuple(rules), export.config | keys)
    return export


def write_hf(
    main: Part,
    tensors: TensorSource,
    folder: Path,
    *,
    export: Export | None = None,
    build: Callable[[Part], Iterator[tuple[str, np.ndarray]]],
    dtype: np.dtype | None = None,
    tokenizer: TokenizerFiles | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes ``model.safetensors`` (or shards with an index), ``config.json``, generation and tokenizer files.

    An adapter's two files have other names (`Export`).

    Args:
      main: what to export.
      tensors: where its rules read from; tells the types before anything is read.
      folder: an existing folder.
      export: the published format; None for that of `main` alone.
      build: streams the parameters of a part, converted to `dtype`.
      dtype: of the floating tensors; None keeps them.
      tokenizer: files to write along.
      shard_bytes: size from which weights are split into several files.

    Raises:
      ConversionError: this kind of configuration, or this family, has no published format here.
    """
    export = export_of(main.config) if export is None else export
    if tokenizer is not None:
        tokenizer.write(folder)
    types = parameter_types(main, tensors, dtype)
    shapes = flatten(main.shapes)
    by_target = {rule.target: rule for rule in export.rules}
    order = [by_target[rule.target] for rule in main.rules]
    shards: list[list[Rule]] = [[]]
    size = 0
    for rule in order:
        count = int(np.prod(shapes[rule.target], dtype=np.int64)) * types[rule.target].itemsize
        if shards[-1] and size + count > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(rule)
        size += count
    stream = build(main)
    total, weight_map = 0, {}
    for i, rules in enumerate(shards):
        part = "" if len(shards) == 1 else f"-{i + 1:05d}-of-{len(shards):05d}"
        name = f"{export.weights}{part}.safetensors"
        entries = [entry for rule in rules for entry in stored_tensors(rule, shapes[rule.target], types[rule.target])]
        total += write_safetensors(folder / name, entries, taken(rules, stream))
        weight_map |= {source: name for source, _, _ in entries}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{export.weights}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = export.config
    if export.config_file == "config.json":
        config = config | {"torch_dtype": types[main.rules[0].target].name}
    (folder / export.config_file).write_text(json.dumps(config, indent=2) + "\n")
    if isinstance(main.config, ModelConfig) and not (folder / "generation_config.json").exists():
        generation = {k: config[k] for k in ("bos_token_id", "eos_token_id") if config.get(k) is not None}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def stored_tensors(rule: Rule, shape: tuple[int, ...], dtype: np.dtype) -> list[tuple[str, np.dtype, tuple[int, ...]]]:
    """Name, type and shape of a rule's tensors; those of an integer parameter (token ids) have types of their own."""
    if is_float(dtype):
        dtypes = [dtype] * len(rule.sources)
    else:
        dtypes = [part.dtype for part in rule.transform.split(np.zeros(shape, dtype))]
    return list(zip(rule.sources, dtypes, expected_shapes(rule, shape), strict=True))


def parameter_types(part: Part, tensors: TensorSource, dtype: np.dtype | None) -> dict[str, np.dtype]:
    """The type that each parameter will have once built."""
    types = {}
    for rule in part.rules:
        found = np.result_type(*{tensors.info[name].dtype for name in rule.sources})
        if rule.target.rsplit("/", 1)[-1] in FLOAT32_LEAVES:
            found = np.dtype(np.float32)
        elif dtype is not None and is_float(found):
            found = dtype
        types[rule.target] = found
    return types


def taken(rules: list[Rule], stream: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of the next ``len(rules)`` parameters of a stream that comes in the order of the rules."""
    for rule in rules:
        path, array = next(stream)
        if path != rule.target:
            raise ConversionError(f"parameter {path} came where {rule.target} was expected")
        yield from unbuild([rule], {path: array})


def write_safetensors(
    file: Path, entries: list[tuple[str, np.dtype, tuple[int, ...]]], tensors: Iterator[tuple[str, np.ndarray]]
) -> int:
    """A safetensors file whose tensors come as a stream in the order of `entries`; returns the bytes of data.

    The header precedes the data, hence names, types and shapes are known first.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in entries:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for (name, dtype, shape), (found, array) in zip(entries, tensors, strict=True):
            if found != name or array.shape != shape:
                raise ConversionError(f"tensor {found} {array.shape} came where {name} {shape} was expected")
            stream.write(cast(name, array, dtype).tobytes())
    return at
