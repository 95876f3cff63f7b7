"""``pytorch_model.bin`` without torch: the zip archive of ``torch.save``, memory-mapped (`jaxspec.files.torch_pickle`)."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np

from jaxspec.files.errors import ConversionError, MissingFileError, shown
from jaxspec.files.readers import TensorInfo, map_tensor
from jaxspec.files.torch_pickle import Storage, StridedTensor, read_member, read_pickle


def open_archive(file: Path) -> zipfile.ZipFile:
    """A zip archive. Raises ConversionError for a damaged one."""
    try:
        return zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OSError) as error:
        raise ConversionError(f"{file} is a damaged zip archive ({shown(error)}); download it again") from None


def storage_offset(file: Path, members: dict[str, zipfile.ZipInfo], root: str, storage: Storage) -> int:
    """Where a storage's bytes begin in the file: archives are uncompressed, so they can be mapped."""
    member = members.get(f"{root}data/{storage.key}")
    size = storage.count * storage.dtype.itemsize
    if member is None or member.compress_type != zipfile.ZIP_STORED or member.file_size < size:
        raise ConversionError(f"{file}: storage {shown(storage.key)!r} of {size} bytes is missing, compressed or too short")
    with open(file, "rb") as stream:
        stream.seek(member.header_offset)
        header = stream.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise ConversionError(f"{file}: the archive's entry of storage {shown(storage.key)!r} is damaged; download it again")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    begin = member.header_offset + 30 + name_length + extra_length
    if begin + size > file.stat().st_size:
        raise ConversionError(f"{file} ends inside storage {shown(storage.key)!r}: it is truncated; download it again")
    return begin


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
        with open_archive(file) as archive:
            members = {m.filename: m for m in archive.infolist()}
            state, root = read_pickle(archive, file)
            if f"{root}byteorder" in members and read_member(archive, file, f"{root}byteorder", 16) != b"little":
                raise ConversionError(f"{file} was written on a big-endian machine; save it again as safetensors")
        if not isinstance(state, dict):
            raise ConversionError(f"{file} holds a {type(state).__name__}, not a dictionary of tensors")
        for name, tensor in state.items():
            if not isinstance(name, str) or not isinstance(tensor, StridedTensor):
                raise ConversionError(f"{file}: entry {shown(name)!r} is a {type(tensor).__name__}, not a tensor")
            if name in self.info:
                raise ConversionError(f"{file}: tensor {shown(name)!r} is also in {self.info[name].file}")
            self._offsets[file, tensor.storage.key] = storage_offset(file, members, root, tensor.storage)
            self.info[name] = TensorInfo(tensor.shape, tensor.storage.dtype, file.name)
            self._tensors[name] = (file, tensor)

    def read(self, name: str) -> np.ndarray:
        """A strided view of the mapped archive."""
        file, tensor = self._tensors[name]
        storage = tensor.storage
        flat = map_tensor(file, self._offsets[file, storage.key], storage.dtype, (storage.count,))
        strides = tuple(s * storage.dtype.itemsize for s in tensor.strides)
        return np.lib.stride_tricks.as_strided(flat[tensor.offset :], tensor.shape, strides, writeable=False)
