"""``torch.save`` of a list of numbers or of one tensor (token maps), read without torch and without running any pickle."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import numpy as np

from jaxspec.files.errors import ConversionError
from jaxspec.files.readers import map_tensor
from jaxspec.files.torch_pickle import StridedTensor, read_pickle
from jaxspec.files.torch_reader import open_archive, storage_offset


def read_list(file: Path) -> np.ndarray:
    """The list or tensor in `file` as an array.

    Raises:
      ConversionError: it is no archive of torch.save, is damaged, or holds something else.
      UnsafePickleError: its pickle asks for more than tensors.
    """
    if not zipfile.is_zipfile(file):
        raise ConversionError(f"{file} is not a zip archive of torch.save (torch 1.6 and later)")
    with open_archive(file) as archive:
        value, root = read_pickle(archive, file)
        members = {m.filename: m for m in archive.infolist()}
    if isinstance(value, StridedTensor):
        storage = value.storage
        if math.prod(value.shape) > storage.count:
            raise ConversionError(f"{file}: a tensor of shape {value.shape} over {storage.count} elements repeats some of them")
        flat = map_tensor(file, storage_offset(file, members, root, storage), storage.dtype, (storage.count,))
        steps = tuple(s * flat.itemsize for s in value.strides)
        return np.array(np.lib.stride_tricks.as_strided(flat[value.offset :], value.shape, steps, writeable=False))
    if not isinstance(value, (list, tuple)) or not all(type(x) is int and abs(x) < 1 << 63 for x in value):
        raise ConversionError(f"{file} holds a {type(value).__name__}, expected a list of whole numbers or a tensor")
    return np.asarray(value, np.int64)
