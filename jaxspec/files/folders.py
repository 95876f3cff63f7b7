"""Which files of a Hugging Face style folder hold its tensors."""

from __future__ import annotations

from pathlib import Path

from jaxspec.files.errors import ConversionError, MissingFileError, shown
from jaxspec.files.readers import SafetensorsReader, TensorSource
from jaxspec.files.torch_reader import TorchReader
from jaxspec.files.values import parse_json


def indexed_files(index: Path) -> list[Path]:
    """The shards that a ``*.index.json`` names; raises for one that is not there."""
    weight_map = read_weight_map(index)
    names = sorted(set(weight_map.values()))
    files = [index.parent / name for name in names]
    for name, file in zip(names, files, strict=True):
        if not file.exists():
            wanted = sum(value == name for value in weight_map.values())
            raise MissingFileError(f"{file} does not exist, but {index.name} says that it holds {wanted} tensors")
    return files


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor → file of a ``*.index.json``; every file is a plain name beside it."""
    weight_map = parse_json(index.read_bytes(), index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConversionError(f"{index} is not a checkpoint index: no usable 'weight_map' ({shown(weight_map)})")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise ConversionError(f"{index}: tensor {shown(tensor)!r} is in {shown(name)}, expected a file name")
        if name in ("", ".", "..") or any(c in name for c in "/\\\0") or len(name) > 255:
            raise ConversionError(f"{index}: shard {shown(name)!r} is not a plain file name")
    return weight_map


def check_index(index: Path, source: TensorSource) -> None:
    """An index and its shards must name the same tensors in the same files."""
    weight_map = read_weight_map(index)
    for name, file in weight_map.items():
        if name not in source.info or source.info[name].file != file:
            raise ConversionError(f"{index}: tensor {name!r} is said to be in {file}, which does not hold it")
    for name, info in source.info.items():
        if name not in weight_map:
            raise ConversionError(f"{index}: tensor {name!r} of {info.file} is not in the index")


def open_tensors(folder: Path) -> TensorSource:
    """Finds the tensor files of a Hugging Face style folder: safetensors first, then ``pytorch_model*.bin``.

    Raises MissingFileError when there are none.
    """
    for stem, suffix, reader in (
        ("model", ".safetensors", SafetensorsReader),
        ("adapter_model", ".safetensors", SafetensorsReader),
        ("pytorch_model", ".bin", TorchReader),
        ("adapter_model", ".bin", TorchReader),
    ):
        index = folder / f"{stem}{suffix}.index.json"
        if index.exists():
            source = reader(indexed_files(index))
            check_index(index, source)
            return source
        if (folder / f"{stem}{suffix}").exists():
            return reader([folder / f"{stem}{suffix}"])
    loose = sorted(folder.glob("*.safetensors"))
    if len(loose) == 1:
        return SafetensorsReader(loose)
    raise MissingFileError(
        f"{folder} holds no weights: expected model.safetensors, model.safetensors.index.json, pytorch_model.bin "
        "or pytorch_model.bin.index.json"
        + (f" (found {len(loose)} loose .safetensors files without an index)" if loose else "")
    )
