"""Checkpoints made by hand, so that the readers are tested without the libraries that usually write such files."""

import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np

from jaxspec.conversion.export import write_safetensors
from jaxspec.files.readers import SafetensorsReader

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
STORAGE_NAMES = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage", "int64": "LongStorage"}


def save_safetensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    write_safetensors(file, [(n, a.dtype, a.shape) for n, a in tensors.items()], iter(tensors.items()))


def read_all(file: Path) -> dict[str, np.ndarray]:
    reader = SafetensorsReader([file])
    return {name: np.array(reader.read(name)) for name in reader.info}


def push(value) -> bytes:
    """Opcodes of a plain value: the pickle of it without protocol mark and stop."""
    return pickle.dumps(value, protocol=2)[2:-1]


def tensor_opcodes(array: np.ndarray, key: str, count: int | None = None) -> bytes:
    """What torch.save writes for a contiguous tensor."""
    strides = tuple(s // array.itemsize for s in array.strides)
    name = STORAGE_NAMES[array.dtype.name].encode()
    storage = b"(" + push("storage") + b"ctorch\n" + name + b"\n" + push(key) + push("cpu")
    storage += push(array.size if count is None else count) + b"tQ"
    rest = push(0) + push(array.shape) + push(strides) + push(False) + b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"tR"


def save_torch(file: Path, tensors: dict[str, np.ndarray], **extra: bytes) -> None:
    """A torch.save archive; `extra` maps further names to raw opcodes."""
    items = b"".join(push(name) + tensor_opcodes(a, str(i)) for i, (name, a) in enumerate(tensors.items()))
    items += b"".join(push(name) + code for name, code in extra.items())
    program = b"\x80\x02ccollections\nOrderedDict\n)R(" + items + b"u."
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", "little")
        for i, array in enumerate(tensors.values()):
            archive.writestr(f"archive/data/{i}", array.tobytes())


def raw_safetensors(file: Path, header: bytes, data: bytes = b"") -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)
