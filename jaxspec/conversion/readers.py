"""Lazy tensor sources: what a file holds is known at once, a tensor's bytes are read when it is asked for."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np

from jaxspec.conversion.errors import ConversionError, MissingFileError

SAFETENSORS_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class TensorInfo(NamedTuple):
    """Shape and type of a stored tensor, and the file that holds it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    file: str


class TensorSource(Protocol):
    """Named tensors. ``info`` is cheap; ``read`` gives a read-only array, where possible a view of the mapped file."""

    info: Mapping[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """The tensor `name`."""
        ...


class SafetensorsReader:
    """One or many safetensors files, read through their headers and a memory map: every type, nothing copied."""

    def __init__(self, files: list[Path]):
        self.info: dict[str, TensorInfo] = {}
        self._where: dict[str, tuple[Path, int]] = {}
        for file in files:
            for name, dtype, shape, offset in safetensors_header(file):
                if name in self.info:
                    raise ConversionError(f"{file}: tensor {name!r} is also in {self._where[name][0].name}")
                self.info[name] = TensorInfo(shape, dtype, file.name)
                self._where[name] = (file, offset)

    def read(self, name: str) -> np.ndarray:
        """A view of the mapped file."""
        info, (file, offset) = self.info[name], self._where[name]
        return map_tensor(file, offset, info.dtype, info.shape)


def map_tensor(file: Path, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """A read-only memory-mapped array; an empty one needs no map."""
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.empty(shape, dtype)
    raw = np.memmap(file, np.uint8, "r", offset=offset, shape=(count * dtype.itemsize,))
    return raw.view(dtype).reshape(shape)


def safetensors_header(file: Path) -> list[tuple[str, np.dtype, tuple[int, ...], int]]:
    """(name, type, shape, absolute offset) of every tensor of one file; checks that the file is whole."""
    if not file.exists():
        raise MissingFileError(f"{file} does not exist")
    size = file.stat().st_size
    with open(file, "rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        try:
            if not 2 <= length <= size - 8:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(stream.read(length))
            entries = {k: v for k, v in header.items() if k != "__metadata__"}
        except (ValueError, AttributeError) as error:
            raise ConversionError(f"{file} is not a safetensors file ({error})") from None
    found = []
    for name, entry in entries.items():
        try:
            code, shape, (begin, end) = entry["dtype"], tuple(map(int, entry["shape"])), entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise ConversionError(f"{file}: malformed header entry of tensor {name!r} ({error})") from None
        if code not in SAFETENSORS_DTYPES:
            raise ConversionError(f"{file}: tensor {name!r} has type {code}; known: {', '.join(SAFETENSORS_DTYPES)}")
        dtype = SAFETENSORS_DTYPES[code]
        wanted = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if min(shape, default=0) < 0 or begin < 0 or end - begin != wanted:
            raise ConversionError(f"{file}: tensor {name!r} of shape {shape} needs {wanted} bytes, has {end - begin}")
        if 8 + length + end > size:
            raise ConversionError(
                f"{file}: tensor {name!r} ends at byte {8 + length + end} but the file has {size}: "
                "it is truncated; download it again"
            )
        found.append((name, dtype, shape, 8 + length + begin))
    return found


def indexed_files(index: Path) -> list[Path]:
    """The shards that a ``*.index.json`` names; raises for one that is not there."""
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{index} is not a checkpoint index: no usable 'weight_map' ({error})") from None
    files = [index.parent / name for name in names]
    for name, file in zip(names, files, strict=True):
        if Path(name).name != name:
            raise ConversionError(f"{index}: shard {name!r} is not a plain file name")
        if not file.exists():
            wanted = sum(value == name for value in weight_map.values())
            raise MissingFileError(f"{file} does not exist, but {index.name} says that it holds {wanted} tensors")
    return files


def check_index(index: Path, source: TensorSource) -> None:
    """An index and its shards must name the same tensors in the same files."""
    weight_map = json.loads(index.read_text())["weight_map"]
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
    from jaxspec.conversion.torch_reader import TorchReader

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
