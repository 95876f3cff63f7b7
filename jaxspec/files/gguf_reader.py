"""GGUF files: metadata and tensors, dequantised to float32 when they are read.

The header is parsed here (a vocabulary of 50 000 strings takes seconds in the gguf package and a tenth of one here); block
sizes and dequantisation are the gguf package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from jaxspec.files.errors import ConversionError, MissingFileError, shown
from jaxspec.files.readers import MAX_RANK, TensorInfo, check_apart
from jaxspec.files.values import check_metadata
from jaxspec.optional import optional

MAGIC = b"GGUF"
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


def _library() -> ModuleType:
    """The gguf package, which takes long to import."""
    return optional("gguf", "reading a GGUF file", "gguf")


def is_gguf(path: Path) -> bool:
    """Whether a file begins like a GGUF file."""
    if not path.is_file():
        return False
    with open(path, "rb") as stream:
        return stream.read(4) == MAGIC


class Stored(NamedTuple):
    """A tensor's type, shape in rows-first order, and place in the file."""

    quantization: Any
    shape: tuple[int, ...]
    offset: int
    size: int


class _Cursor:
    """Reads little-endian values one after another; running off the end is a truncated file."""

    def __init__(self, data: mmap.mmap, file: Path):
        self._data, self._file, self.at = data, file, 0

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self._data):
            raise ConversionError(f"{self._file} ends inside its header at byte {self.at}: it is truncated; download it again")
        self.at += count
        return self._data[self.at - count : self.at]

    def scalar(self, form: str):
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        return self.take(self.scalar("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 4):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            if depth == 0:
                raise ConversionError(f"{self._file}: metadata nested too deeply at byte {self.at}")
            inner, count = self.scalar("<I"), self.scalar("<Q")
            if inner in SCALARS:
                form = SCALARS[inner]
                return np.frombuffer(self.take(count * struct.calcsize(form)), np.dtype(form)).tolist()
            return [self.value(inner, depth - 1) for _ in range(count)]
        if kind not in SCALARS:
            raise ConversionError(f"{self._file}: unknown metadata type {kind} at byte {self.at}")
        return self.scalar(SCALARS[kind])


class GGUFReader:
    """One GGUF file: ``metadata`` as a dictionary, tensors as a lazy source of float32 arrays."""

    def __init__(self, file: Path):
        gguf = _library()
        if not file.exists():
            raise MissingFileError(f"{file} does not exist")
        if not is_gguf(file):
            raise ConversionError(f"{file} is not a GGUF file: it does not begin with {MAGIC.decode()}")
        self.file = file
        self.metadata: dict[str, Any] = {}
        self.info: dict[str, TensorInfo] = {}
        self._stored: dict[str, Stored] = {}
        with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, file)
            cursor.take(4)
            version = cursor.scalar("<I")
            if version not in (2, 3):
                raise ConversionError(f"{file} has GGUF version {version}; versions 2 and 3 (little-endian) are read")
            tensors, keys = cursor.scalar("<Q"), cursor.scalar("<Q")
            for _ in range(keys):
                key, kind = cursor.string(), cursor.scalar("<I")
                if key in self.metadata:
                    raise ConversionError(f"{file}: the metadata key {shown(key)!r} is there twice")
                self.metadata[key] = cursor.value(kind)
            entries = []
            for _ in range(tensors):
                name, rank = cursor.string(), cursor.scalar("<I")
                if rank > MAX_RANK:
                    raise ConversionError(f"{file}: tensor {shown(name)!r} has {rank} axes, at most {MAX_RANK} are read")
                shape = tuple(cursor.scalar("<Q") for _ in range(rank))[::-1]
                entries.append((name, shape, cursor.scalar("<I"), cursor.scalar("<Q")))
            check_metadata(self.metadata, file)
            alignment = self.metadata.get("general.alignment", 32)
            start = -(-cursor.at // alignment) * alignment
            total = len(data)
        for name, shape, code, offset in entries:
            try:
                kind = gguf.GGMLQuantizationType(code)
                block, width = gguf.GGML_QUANT_SIZES[kind]
            except (ValueError, KeyError):
                raise ConversionError(f"{file}: tensor {shown(name)!r} has the unknown quantisation type {code}") from None
            if shape and shape[-1] % block:
                raise ConversionError(
                    f"{file}: rows of {shape[-1]} values of tensor {shown(name)!r} are no whole blocks of {block} ({kind.name})"
                )
            size = math.prod(shape) // block * width
            if start + offset + size > total:
                raise ConversionError(f"{file} ends inside tensor {shown(name)!r}: it is truncated; download it again")
            if name in self._stored:
                raise ConversionError(f"{file}: tensor {shown(name)!r} is stored twice")
            self._stored[name] = Stored(kind, shape, start + offset, size)
            self.info[name] = TensorInfo(shape, np.dtype(np.float32), file.name)

        check_apart(file, ((t.offset, t.offset + t.size, name) for name, t in self._stored.items()))

    def quantization(self, name: str) -> str:
        """The stored type of a tensor: F32, Q4_K …"""
        return self._stored[name].quantization.name

    def read(self, name: str) -> np.ndarray:
        """The tensor in float32."""
        gguf = _library()
        kind, shape, offset, size = self._stored[name]
        if size == 0:
            return np.zeros(shape, np.float32)
        raw = np.memmap(self.file, np.uint8, "r", offset=offset, shape=(size,))
        if kind == gguf.GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(shape)
        if kind == gguf.GGMLQuantizationType.F16:
            return raw.view(np.float16).reshape(shape).astype(np.float32)
        block, width = gguf.GGML_QUANT_SIZES[kind]
        try:
            return gguf.quants.dequantize(raw.reshape(*shape[:-1], shape[-1] // block * width), kind).reshape(shape)
        except NotImplementedError:
            raise ConversionError(f"{self.file}: tensor {name!r} is quantised as {kind.name}, which is not read") from None
