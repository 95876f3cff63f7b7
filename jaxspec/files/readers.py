"""Lazy tensor sources: what a file holds is known at once, a tensor's bytes are read when it is asked for."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec.files.errors import ConversionError, MissingFileError, shown
from jaxspec.files.values import parse_json

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


MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""
MAX_NUMBER, MAX_RANK = 1 << 48, 32


class TensorInfo(NamedTuple):
    """Shape and type of a stored tensor, and the file that holds it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    file: str


class TensorSource(Protocol):
    """Named tensors. ``info`` is cheap; ``read`` gives an array that is only read, perhaps a view of the mapped file."""

    info: Mapping[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """The tensor `name`."""
        ...


class SafetensorsReader:
    """One or many safetensors files. Their headers are checked here, so that errors name file and tensor; the safetensors
    library checks them once more and reads the tensors."""

    def __init__(self, files: list[Path]):
        self.info: dict[str, TensorInfo] = {}
        self._where: dict[str, tuple[Path, int]] = {}
        self._open: dict[Path, Any] = {}
        for file in files:
            for name, dtype, shape, offset in safetensors_header(file):
                if name in self.info:
                    raise ConversionError(f"{file}: tensor {name!r} is also in {self._where[name][0].name}")
                self.info[name] = TensorInfo(shape, dtype, file.name)
                self._where[name] = (file, offset)
            try:
                self._open[file] = safe_open(file, "numpy")
            except SafetensorError as error:
                raise ConversionError(f"{file} is not a safetensors file ({shown(error)})") from None

    def read(self, name: str) -> np.ndarray:
        """The tensor `name`; of the 8-bit floats, which the library does not give to NumPy, a view of the mapped file."""
        info, (file, offset) = self.info[name], self._where[name]
        if info.dtype.name.startswith("float8"):
            return map_tensor(file, offset, info.dtype, info.shape)
        return self._open[file].get_tensor(name)


def map_tensor(file: Path, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """A read-only memory-mapped array; an empty one needs no map."""
    count = math.prod(shape)
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
        if not 2 <= length <= size - 8:
            raise ConversionError(f"{file} is not a safetensors file (a header of {length} bytes in a file of {size})")
        if length > MAX_HEADER:
            raise ConversionError(f"{file} is not a safetensors file (a header of {length} bytes, at most {MAX_HEADER})")
        try:
            header = parse_json(stream.read(length), file)
        except ConversionError as error:
            raise ConversionError(f"{file} is not a safetensors file ({error})") from None
    found, spans = [], []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        code, shape, begin, end = _header_entry(file, name, entry)
        dtype = SAFETENSORS_DTYPES[code]
        wanted = math.prod(shape) * dtype.itemsize
        if end - begin != wanted:
            raise ConversionError(f"{file}: tensor {shown(name)!r} of shape {shape} needs {wanted} bytes, has {end - begin}")
        if 8 + length + end > size:
            raise ConversionError(
                f"{file}: tensor {shown(name)!r} ends at byte {8 + length + end} but the file has {size}: "
                "it is truncated; download it again"
            )
        spans.append((begin, end, name))
        found.append((name, dtype, shape, 8 + length + begin))
    check_apart(file, spans)
    return found


def _header_entry(file: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Type code, shape and place of one tensor, each of the type that it must have."""
    keys = ("dtype", "shape", "data_offsets")
    if not isinstance(entry, dict) or any(key not in entry for key in keys):
        raise ConversionError(f"{file}: malformed header entry of tensor {shown(name)!r} (it needs {', '.join(keys)})")
    code, shape, place = (entry[key] for key in keys)
    if not isinstance(code, str) or code not in SAFETENSORS_DTYPES:
        raise ConversionError(f"{file}: tensor {shown(name)!r} has type {shown(code)}; known: {', '.join(SAFETENSORS_DTYPES)}")
    for key, value, most in (("shape", shape, MAX_RANK), ("data_offsets", place, 2)):
        whole = isinstance(value, list) and len(value) <= most and all(type(n) is int and 0 <= n < MAX_NUMBER for n in value)
        if not whole or (key == "data_offsets" and len(value) != 2):
            what = "two whole numbers" if most == 2 else f"at most {most} whole numbers"
            raise ConversionError(
                f"{file}: malformed header entry of tensor {shown(name)!r}: {key} is {shown(value)}, expected {what} of at "
                "least 0"
            )
    return code, tuple(shape), *place


def check_apart(file: Path, spans: Iterable[tuple[int, int, str]]) -> None:
    """Raises ConversionError when two tensors (begin, end, name) of one file lie upon each other: one of them is wrong."""
    before, owner = 0, ""
    for begin, end, name in sorted(span for span in spans if span[0] < span[1]):
        if begin < before:
            raise ConversionError(
                f"{file}: tensors {shown(owner)!r} and {shown(name)!r} lie upon each other at byte {begin}; download it again"
            )
        before, owner = end, name
