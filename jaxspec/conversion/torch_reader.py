"""``pytorch_model.bin`` without torch: the zip archive of ``torch.save``, its pickle read by an unpickler that knows
tensors, ordered dictionaries and nothing else. Any other global in the pickle is an error before it can be called.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.conversion.errors import ConversionError, MissingFileError, UnsafePickleError
from jaxspec.conversion.readers import TensorInfo, map_tensor

STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
    "Float8_e4m3fnStorage": np.dtype(ml_dtypes.float8_e4m3fn),
    "Float8_e5m2Storage": np.dtype(ml_dtypes.float8_e5m2),
}


class StorageType(NamedTuple):
    """Stands for torch's typed storage classes."""

    dtype: np.dtype


class Storage(NamedTuple):
    """A flat run of `count` elements in the archive member ``data/<key>``."""

    dtype: np.dtype
    key: str
    count: int


class StridedTensor(NamedTuple):
    """A view of a storage, in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def rebuild_tensor(storage, offset, shape, strides, *_unused) -> StridedTensor:
    """Stands for ``torch._utils._rebuild_tensor_v2``; refuses a view that leaves its storage."""
    tensor = StridedTensor(storage, offset, tuple(shape), tuple(strides))
    numbers = (offset, *tensor.shape, *tensor.strides)
    if not isinstance(storage, Storage) or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise ConversionError(f"malformed tensor: offset {offset}, shape {shape}, strides {strides}")
    last = offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    if 0 not in tensor.shape and last >= storage.count:
        raise ConversionError(f"a tensor of shape {tensor.shape} reaches beyond its storage of {storage.count} elements")
    return tensor


def rebuild_parameter(data, *_unused):
    """Stands for ``torch._utils._rebuild_parameter``: a parameter is its tensor."""
    return data


GLOBALS = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): rebuild_parameter,
    ("torch", "Size"): tuple,
    **{("torch", name): StorageType(dtype) for name, dtype in STORAGES.items()},
}


class TensorUnpickler(pickle.Unpickler):
    """Allows the globals of `GLOBALS` only."""

    def __init__(self, stream, file: Path):
        super().__init__(stream)
        self._file = file

    def find_class(self, module, name):
        """Looks a global up in the table; everything else is refused by name."""
        if (module, name) not in GLOBALS:
            raise UnsafePickleError(
                f"{self._file}: its pickle asks for {module}.{name}. A checkpoint holds tensors only; a pickle can run any "
                "code, so it is refused. Convert it to safetensors where you trust it."
            )
        return GLOBALS[module, name]

    def persistent_load(self, pid):
        """('storage', type, key, location, count) → `Storage`."""
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], StorageType)):
            raise UnsafePickleError(f"{self._file}: its pickle holds an unknown persistent object {str(pid)[:80]}")
        return Storage(pid[1].dtype, str(pid[2]), int(pid[4]))


class TorchReader:
    """One or many ``torch.save`` archives (the zip format of torch 1.6 and later), memory-mapped."""

    def __init__(self, files: list[Path]):
        self.info: dict[str, TensorInfo] = {}
        self._tensors: dict[str, tuple[Path, StridedTensor]] = {}
        self._offsets: dict[tuple[Path, str], int] = {}
        for file in files:
            self._read_archive(file)

    def _read_archive(self, file: Path) -> None:
        if not file.exists():
            raise MissingFileError(f"{file} does not exist")
        if not zipfile.is_zipfile(file):
            raise ConversionError(
                f"{file} is not a zip archive of torch.save: the older pickle format (before torch 1.6) and other files are "
                "not read; save it again as safetensors"
            )
        with zipfile.ZipFile(file) as archive:
            members = {m.filename: m for m in archive.infolist()}
            pickles = [name for name in members if name.split("/", 1)[-1] == "data.pkl"]
            if len(pickles) != 1:
                raise ConversionError(f"{file} is a zip archive without the data.pkl that torch.save writes")
            root = pickles[0][: -len("data.pkl")]
            if f"{root}byteorder" in members and archive.read(f"{root}byteorder") != b"little":
                raise ConversionError(f"{file} was written on a big-endian machine; save it again as safetensors")
            try:
                with archive.open(pickles[0]) as stream:
                    state = TensorUnpickler(stream, file).load()
            except ConversionError:
                raise
            except Exception as error:
                raise ConversionError(f"{file}: its pickle is damaged ({type(error).__name__}: {error})") from None
            if not isinstance(state, dict):
                raise ConversionError(f"{file} holds a {type(state).__name__}, not a dictionary of tensors")
            for name, tensor in state.items():
                if not isinstance(name, str) or not isinstance(tensor, StridedTensor):
                    raise ConversionError(f"{file}: entry {name!r} is a {type(tensor).__name__}, not a tensor")
                if name in self.info:
                    raise ConversionError(f"{file}: tensor {name!r} is also in {self.info[name].file}")
                self._locate(file, members, root, tensor.storage)
                self.info[name] = TensorInfo(tensor.shape, tensor.storage.dtype, file.name)
                self._tensors[name] = (file, tensor)

    def _locate(self, file: Path, members: dict, root: str, storage: Storage) -> None:
        """Where a storage's bytes begin: archives are uncompressed, so they can be mapped."""
        member = members.get(f"{root}data/{storage.key}")
        size = storage.count * storage.dtype.itemsize
        if member is None or member.compress_type != zipfile.ZIP_STORED or member.file_size < size:
            raise ConversionError(f"{file}: storage {storage.key!r} of {size} bytes is missing, compressed or too short")
        with open(file, "rb") as stream:
            stream.seek(member.header_offset)
            header = stream.read(30)
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        self._offsets[file, storage.key] = member.header_offset + 30 + name_length + extra_length

    def read(self, name: str) -> np.ndarray:
        """A strided view of the mapped archive."""
        file, tensor = self._tensors[name]
        storage = tensor.storage
        flat = map_tensor(file, self._offsets[file, storage.key], storage.dtype, (storage.count,))
        strides = tuple(s * storage.dtype.itemsize for s in tensor.strides)
        return np.lib.stride_tricks.as_strided(flat[tensor.offset :], tensor.shape, strides, writeable=False)
