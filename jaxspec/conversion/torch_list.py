"""``torch.save`` of a list of numbers or of one tensor (token maps), read without torch and without running any pickle."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from jaxspec.conversion.errors import ConversionError
from jaxspec.conversion.torch_reader import StridedTensor, TensorUnpickler


def read_list(file: Path) -> np.ndarray:
    """The list or tensor in `file` as an array.

    Raises:
      ConversionError: it is no archive of torch.save, is damaged, or holds something else.
      UnsafePickleError: its pickle asks for more than tensors.
    """
    if not zipfile.is_zipfile(file):
        raise ConversionError(f"{file} is not a zip archive of torch.save (torch 1.6 and later)")
    with zipfile.ZipFile(file) as archive:
        pickles = [name for name in archive.namelist() if name.split("/", 1)[-1] == "data.pkl"]
        if len(pickles) != 1:
            raise ConversionError(f"{file} is a zip archive without the data.pkl that torch.save writes")
        try:
            with archive.open(pickles[0]) as stream:
                value = TensorUnpickler(stream, file).load()
            if isinstance(value, StridedTensor):
                root = pickles[0][: -len("data.pkl")]
                flat = np.frombuffer(archive.read(f"{root}data/{value.storage.key}"), value.storage.dtype)
                if flat.size < value.storage.count:
                    raise ConversionError(f"{file}: a storage of {value.storage.count} elements is cut short to {flat.size}")
                steps = tuple(s * flat.itemsize for s in value.strides)
                return np.lib.stride_tricks.as_strided(flat[value.offset :], value.shape, steps).copy()
        except ConversionError:
            raise
        except Exception as error:
            raise ConversionError(f"{file}: its pickle is damaged ({type(error).__name__}: {error})") from None
    if not isinstance(value, (list, tuple)) or not all(isinstance(x, int) for x in value):
        raise ConversionError(f"{file} holds a {type(value).__name__}, expected a list of whole numbers or a tensor")
    return np.asarray(value)
