"""The pickle inside a ``torch.save`` archive, read by an interpreter of our own that knows data and tensors, nothing else.

No unpickler of Python's runs, so that nothing of this process can be called, looked up or altered by a file: a global is two
strings here, and what torch would call is done by `_reduce` for the few names that checkpoints hold. Sizes are bounded, and
no value of a file is compared, hashed, counted through or shown as a whole: a few bytes can stand for 2^60 elements.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.files.errors import ConversionError, UnsafePickleError, shown

MAX_BYTES = 1 << 25
"""Of a pickle, which names tensors and holds none: some 200 bytes each."""
MAX_OPERATIONS = 2_000_000
MAX_NUMBER = 1 << 48
"""Above all sizes, offsets and strides in elements."""
MAX_RANK = 32

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


class Global(NamedTuple):
    """A name that a pickle mentions; it is never looked up."""

    module: str
    name: str


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


ORDERED_DICT = Global("collections", "OrderedDict")
SIZE = Global("torch", "Size")
TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
PARAMETER = Global("torch._utils", "_rebuild_parameter")
GLOBALS = {ORDERED_DICT, SIZE, TENSOR, PARAMETER, *(Global("torch", name) for name in STORAGES)}

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


def read_pickle(archive: zipfile.ZipFile, file: Path) -> tuple[Any, str]:
    """The value of an archive's ``data.pkl`` and the path in front of that name inside the archive.

    Returns numbers, strings, tuples, lists, dictionaries and `StridedTensor`.

    Raises:
      UnsafePickleError: it asks for more than tensors.
      ConversionError: there is no such member; it is damaged or too large.
    """
    names = {n for n in archive.namelist() if n.split("/", 1)[-1] == "data.pkl"}
    if len(names) != 1:
        raise ConversionError(f"{file} is a zip archive without the data.pkl that torch.save writes")
    name = names.pop()
    program = read_member(archive, file, name, MAX_BYTES)
    try:
        return _Machine(file).run(program), name[: -len("data.pkl")]
    except ConversionError:
        raise
    except Exception as error:  # whatever a malformed program makes the interpreter stumble over
        raise ConversionError(f"{file}: its pickle is damaged ({type(error).__name__}: {shown(error)})") from None


def read_member(archive: zipfile.ZipFile, file: Path, name: str, limit: int) -> bytes:
    """A member of an archive, of `limit` bytes at most, however small it is when packed."""
    try:
        with archive.open(name) as stream:
            data = stream.read(limit + 1)
    except Exception as error:  # each way of packing has errors of its own
        raise ConversionError(f"{file}: its member {name} is damaged ({shown(error)})") from None
    if len(data) > limit:
        raise ConversionError(f"{file}: its member {name} has more than {limit} bytes, which no checkpoint's has")
    return data


class _Machine:
    """The stack machine of pickle, as far as ``torch.save`` uses it."""

    def __init__(self, file: Path):
        self._file = file
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        """The value that the program leaves."""
        for count, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(program))):
            if count > MAX_OPERATIONS:
                raise ConversionError(f"{self._file}: its pickle has more than {MAX_OPERATIONS} operations")
            if opcode.name == "STOP":
                return self._pop()
            self._step(opcode.name, argument)
        raise ConversionError(f"{self._file}: its pickle has no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in LITERALS:
            if isinstance(argument, int) and abs(argument) >= 1 << 64:
                raise ConversionError(f"{self._file}: its pickle holds a number of {argument.bit_length()} bits")
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in ("PROTO", "FRAME"):
            pass
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name in TUPLES:
            items = [self._pop() for _ in range(TUPLES[name])]
            stack.append(tuple(reversed(items)))
        elif name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._top()
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in ("GLOBAL", "INST"):
            module, _, attribute = argument.partition(" ")
            self._allow(Global(module, attribute))
        elif name == "STACK_GLOBAL":
            attribute, module = self._pop(), self._pop()
            self._allow(Global(module, attribute))
        elif name == "APPEND":
            item = self._pop()
            self._top(list).append(item)
        elif name == "APPENDS":
            items = self._marked()
            self._top(list).extend(items)
        elif name == "SETITEM":
            value, key = self._pop(), self._pop()
            self._set([key, value])
        elif name == "SETITEMS":
            self._set(self._marked())
        elif name == "BINPERSID":
            stack.append(self._storage(self._pop()))
        elif name == "REDUCE":
            arguments, function = self._pop(), self._pop()
            stack.append(self._reduce(function, arguments))
        elif name == "BUILD":
            self._pop()
            self._top(dict)  # metadata of a state dictionary, which nothing here reads
        else:
            raise UnsafePickleError(
                f"{self._file}: its pickle has the operation {name}, which torch.save writes for no tensor; save it again as "
                "safetensors where you trust it"
            )

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise ConversionError(f"{self._file}: its pickle takes a value that it does not have")
        return self._stack.pop()

    def _top(self, kind: type | None = None) -> Any:
        if not self._stack or self._stack[-1] is _MARK or (kind is not None and type(self._stack[-1]) is not kind):
            raise ConversionError(
                f"{self._file}: its pickle fills something that is no {'value' if kind is None else kind.__name__}"
            )
        return self._stack[-1]

    def _marked(self) -> list[Any]:
        items = []
        while self._stack:
            item = self._stack.pop()
            if item is _MARK:
                return items[::-1]
            items.append(item)
        raise ConversionError(f"{self._file}: its pickle ends a group that it did not begin")

    def _set(self, pairs: list[Any]) -> None:
        found = self._top(dict)
        if len(pairs) % 2:
            raise ConversionError(f"{self._file}: its pickle has a key without a value")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) not in (str, int):
                raise ConversionError(f"{self._file}: its pickle has a key that is a {type(key).__name__}, expected a name")
            found[key] = value

    def _allow(self, named: Global) -> None:
        if not (type(named.module) is str and type(named.name) is str and named in GLOBALS):
            what = ".".join(shown(part) if type(part) is str else type(part).__name__ for part in named)
            raise UnsafePickleError(
                f"{self._file}: its pickle asks for {what}. A checkpoint holds tensors only; a pickle can run any "
                "code, so it is refused. Convert it to safetensors where you trust it."
            )
        self._stack.append(named)

    def _storage(self, pid: Any) -> Storage:
        """('storage', type, key, location, count) → `Storage`."""
        if type(pid) is tuple and len(pid) == 5 and type(pid[0]) is str and pid[0] == "storage":
            _, kind, key, _, count = pid
            if type(kind) is Global and kind.name in STORAGES and type(key) is str and _is_size(count):
                return Storage(STORAGES[kind.name], key, count)
        raise UnsafePickleError(f"{self._file}: its pickle holds an unknown persistent object, expected a storage of a tensor")

    def _reduce(self, function: Any, arguments: Any) -> Any:
        if type(function) is not Global or type(arguments) is not tuple:
            raise UnsafePickleError(f"{self._file}: its pickle calls a {type(function).__name__}")
        if function == ORDERED_DICT and not arguments:
            return {}
        if function == SIZE and len(arguments) == 1 and type(arguments[0]) in (tuple, list):
            return tuple(arguments[0])
        if function == PARAMETER and arguments:
            return arguments[0]  # a parameter is its tensor
        if function == TENSOR and len(arguments) >= 4:
            return self._tensor(*arguments[:4])
        raise UnsafePickleError(
            f"{self._file}: its pickle calls {function.module}.{function.name} in a way torch.save does not"
        )

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any) -> StridedTensor:
        """A view, which must not leave its storage."""
        sizes = type(shape) is tuple and type(strides) is tuple and len(shape) == len(strides) <= MAX_RANK
        if type(storage) is not Storage or not sizes or not all(map(_is_size, (offset, *shape, *strides))):
            raise ConversionError(f"{self._file}: malformed tensor: its storage, offset, shape or strides are no such thing")
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if 0 not in shape and last >= storage.count:
            raise ConversionError(
                f"{self._file}: a tensor of shape {shape} reaches beyond its storage of {storage.count} elements"
            )
        return StridedTensor(storage, offset, shape, strides)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_NUMBER
