"""A checksum per stored array of a converted folder: ``params/checksums.json``, {path: CRC-32 of its bytes in row order}.

orbax notices damage to its own records, not to the numbers in them. Folders written before there were checksums have none.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxspec.files.errors import ConversionError
from jaxspec.files.values import parse_json

FILE = "checksums.json"
SMALL = 1 << 20
"""Bytes up to which an array is checked whenever it is loaded."""


def checksum(array: np.ndarray) -> int:
    """CRC-32 of an array's bytes in row order."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def write_checksums(folder: Path, sums: Mapping[str, int]) -> None:
    """Writes the checksums of a ``params`` folder."""
    (folder / FILE).write_text(json.dumps(sums, indent=1) + "\n")


def read_checksums(folder: Path) -> dict[str, int]:
    """The checksums of a ``params`` folder; empty where none were written.

    Raises ConversionError for a damaged file.
    """
    file = folder / FILE
    if not file.exists():
        return {}
    sums = parse_json(file.read_bytes(), file)
    if not all(type(value) is int for value in sums.values()):
        raise ConversionError(f"{file} is damaged: a checksum is a whole number; convert the folder again")
    return sums


def check_arrays(sums: Mapping[str, int], arrays: Mapping[str, np.ndarray], where: Path) -> None:
    """Raises ConversionError that names the first array whose bytes are not those that were written.

    Where there are checksums, every array must have one.
    """
    for path, array in arrays.items() if sums else ():
        if path not in sums:
            raise ConversionError(f"{where}: {FILE} lacks {path}: the folder is damaged, convert it again")
        if checksum(np.asarray(array)) != sums[path]:
            raise ConversionError(
                f"{where}: parameter {path} is not what was written (its checksum differs): the folder is damaged, "
                "convert it again"
            )
