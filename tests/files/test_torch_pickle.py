"""Pickles that are made to hurt: they cost a moment, say one short line, and leave this process as it was."""

import builtins
import collections
import contextlib
import struct
import sys
import time
import tracemalloc
import types
import zipfile

import numpy as np
import pytest

import jaxspec.files.torch_pickle as torch_pickle
from jaxspec.files.errors import ConversionError, UnsafePickleError
from jaxspec.files.torch_list import read_list
from jaxspec.files.torch_reader import TorchReader
from tests.files.archives import push, save_torch, tensor_opcodes

NESTED = push(1) + b"\x85" * 200_000
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


def doubled(depth=60):
    """Each level is a pair of the one below: 2^59 strings in some 300 bytes."""
    code = push("x") + b"\x85q\x00"
    for i in range(1, depth):
        code += b"h" + bytes([i - 1]) + b"\x86q" + bytes([i])
    return code


def packed(file, program, kind=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(file, "w", kind) as archive:
        archive.writestr("archive/data.pkl", program)
    return file


def refused(file):
    """The errors that both readers give for an archive, each after a moment."""
    messages = []
    for read in (lambda: TorchReader([file]), lambda: read_list(file)):
        begun = time.process_time()
        with pytest.raises(ConversionError) as caught:
            read()
        assert time.process_time() - begun < 5 and len(str(caught.value)) < 600 + len(str(file))
        messages.append(str(caught.value))
    return messages


SHARED = doubled()
PROGRAMS = {
    "the state": SHARED,
    "a key": b"}" + SHARED + push(1) + b"s",
    "a key of many": b"}(" + SHARED + push(1) + b"u",
    "an entry": b"}" + push("w") + SHARED + b"s",
    "a persistent id": SHARED + b"Q",
    "a storage's type": b"(" + push("storage") + SHARED + push("0") + push("cpu") + push(4) + b"tQ",
    "a storage's name": b"(" + push("storage") + b"ctorch\nFloatStorage\n" + SHARED + push("cpu") + push(4) + b"tQ",
    "a storage's size": b"(" + push("storage") + b"ctorch\nFloatStorage\n" + push("0") + push("cpu") + SHARED + b"tQ",
    "a shape": REBUILD + b"(" + push(None) + push(0) + SHARED + SHARED + b"tR",
    "arguments": REBUILD + SHARED + b"R",
    "a global": SHARED + SHARED + b"\x93",
    "a function": SHARED + b")R",
    "what is built": SHARED + b"}b",
    "a list's numbers": b"](" + push(1) + SHARED + b"e",
    "deep nesting": NESTED,
    "a wide number": b"\x8b" + struct.pack("<i", 200_000) + b"\x01" * 200_000,
    "a memo index": push(1) + b"r\xff\xff\xff\x7f",
    "many memo indices": b"".join(push(1) + b"r" + struct.pack("<I", (i * 2654435761) % 2**32) for i in range(3000)),
    "an unknown memo index": b"j\xff\xff\xff\x7f",
    "a string that is not there": b"X\xff\xff\xff\x7f",
    "a group without a beginning": push(1) + b"t",
    "nothing": b"",
    "half a key": b"}(" + push("w") + b"u",
    "a global of many bytes": b"c" + b"a" * 100_000 + b"\n" + b"b" * 100_000 + b"\n",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_small_pickles_cost_little_and_say_little(name, tmp_path):
    refused(packed(tmp_path / "model.bin", b"\x80\x02" + PROGRAMS[name] + b"."))


@pytest.mark.parametrize(
    "program", [b"}" + b"(1" * (1 << 27), push("x" * (1 << 27)), b"\x80\x02" * (1 << 26)], ids=["groups", "text", "marks"]
)
def test_a_pickle_that_inflates(program, tmp_path):
    file = packed(tmp_path / "model.bin", program)
    assert file.stat().st_size < 4 << 20
    tracemalloc.start()
    messages = refused(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all("more than 33554432 bytes" in message for message in messages) and peak < 4 * torch_pickle.MAX_BYTES


def test_many_operations(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_pickle, "MAX_OPERATIONS", 1000)
    file = packed(tmp_path / "model.bin", b"\x80\x02" + b"N" * 2000 + b".")
    assert all("more than 1000 operations" in message for message in refused(file))


def snapshot():
    """Defaults, code and attributes of every function in the modules of the package."""
    modules = [module for name, module in sys.modules.items() if name.startswith("jaxspec")]
    functions = [f for module in modules for f in vars(module).values() if isinstance(f, types.FunctionType)]
    return {f: (f.__defaults__, f.__kwdefaults__, f.__code__, dict(f.__dict__)) for f in functions}


@pytest.mark.parametrize("name", sorted(torch_pickle.GLOBALS))
@pytest.mark.parametrize("state", [{"__defaults__": (1, 2)}, {"__code__": None}, {"evil": 1}, (None, {"__kwdefaults__": {}})])
def test_nothing_of_this_process_can_be_changed(name, state, tmp_path):
    before = snapshot()
    code = f"c{name.module}\n{name.name}\n".encode() + push(state) + b"b"
    save_torch(tmp_path / "model.bin", {"a": np.ones(3, np.float32)}, x=code)
    refused(tmp_path / "model.bin")
    assert before and snapshot() == before
    assert not hasattr(collections.OrderedDict, "evil") and not hasattr(builtins.tuple, "evil")


def test_no_object_of_this_process_is_reachable(tmp_path):
    """What a pickle can hold is data: a global is two strings, whatever it is called with."""
    with pytest.raises(UnsafePickleError, match="calls collections.OrderedDict in a way"):
        save_torch(tmp_path / "model.bin", {}, x=b"ccollections\nOrderedDict\n" + push(([("a", 1)],)) + b"R")
        TorchReader([tmp_path / "model.bin"])
    save_torch(tmp_path / "model.bin", {}, x=b"ccollections\nOrderedDict\n")
    with pytest.raises(ConversionError, match="'x' is a Global, not a tensor"):
        TorchReader([tmp_path / "model.bin"])


@pytest.mark.parametrize("opcode", [b"o", b"\x81", b"\x92", b"\x82\x01", b"P0\n", b"\x97", b"i", b"2", b"1"], ids=repr)
def test_operations_that_torch_never_writes(opcode, tmp_path):
    file = packed(tmp_path / "model.bin", b"\x80\x02" + push(1) + b"(" + push("a") + opcode + b"\n\n.")
    refused(file)


def test_a_tensor_that_repeats_its_elements_is_no_list(tmp_path):
    array = np.lib.stride_tricks.as_strided(np.ones(1, np.float32), (1 << 40,), (0,))
    program = b"\x80\x02" + tensor_opcodes(array, "0", count=1) + b"."
    with zipfile.ZipFile(tmp_path / "map.pt", "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/data/0", b"1234")
    with pytest.raises(ConversionError, match="repeats some of them"):
        read_list(tmp_path / "map.pt")


def test_lists_and_tensors_are_still_read(tmp_path):
    for value in ([3, 1, 2], (5, -7), [1 << 40]):
        packed(tmp_path / "list.pt", b"\x80\x02" + push(value) + b".")
        assert read_list(tmp_path / "list.pt").tolist() == list(value)
    with zipfile.ZipFile(tmp_path / "map.pt", "w") as archive:
        array = np.arange(6).reshape(2, 3)
        archive.writestr("archive/data.pkl", b"\x80\x02" + tensor_opcodes(array, "0") + b".")
        archive.writestr("archive/data/0", array.tobytes())
    assert np.array_equal(read_list(tmp_path / "map.pt"), array)


def test_a_damaged_archive(tmp_path):
    save_torch(tmp_path / "model.bin", {"a": np.ones(3, np.float32)})
    whole = (tmp_path / "model.bin").read_bytes()
    at = whole.index(b"archive/data/0")
    for begin, damage in ((at - 30, b"XX"), (at - 4, b"\xff\xff\xff\xff"), (10, b"\x63"), (len(whole) - 60, b"\x00" * 20)):
        (tmp_path / "model.bin").write_bytes(whole[:begin] + damage + whole[begin + len(damage) :])
        with contextlib.suppress(ConversionError):
            assert np.array_equal(TorchReader([tmp_path / "model.bin"]).read("a"), np.ones(3))
