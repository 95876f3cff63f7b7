"""Tensor readers: every type, lazily, and what they say about files that are not what they should be."""

import json
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest

from jaxspec.files.errors import ConversionError, MissingFileError, UnsafePickleError
from jaxspec.files.folders import open_tensors
from jaxspec.files.readers import SAFETENSORS_DTYPES, SafetensorsReader
from jaxspec.files.torch_reader import TorchReader
from tests.files.archives import push, raw_safetensors, read_all, save_safetensors, save_torch, tensor_opcodes


def sample(dtype, shape=(3, 5)):
    return (np.arange(np.prod(shape)) % 3).reshape(shape).astype(dtype)


@pytest.mark.parametrize("code", SAFETENSORS_DTYPES)
def test_safetensors_of_every_type(code, tmp_path):
    tensors = {"a": sample(SAFETENSORS_DTYPES[code]), "empty": np.zeros((0, 4), SAFETENSORS_DTYPES[code])}
    save_safetensors(tmp_path / "model.safetensors", tensors)
    found = read_all(tmp_path / "model.safetensors")
    for name, array in tensors.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes() and found[name].shape == array.shape


def test_safetensors_agrees_with_the_library(tmp_path):
    from safetensors.numpy import load_file, save_file

    tensors = {"x": sample(np.float32), "y": sample(ml_dtypes.bfloat16), "z": np.array(3, np.float16)}
    save_file(tensors, tmp_path / "theirs.safetensors")
    save_safetensors(tmp_path / "ours.safetensors", tensors)
    for found in (read_all(tmp_path / "theirs.safetensors"), load_file(tmp_path / "ours.safetensors")):
        assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in found.items()} == {
            n: (a.dtype, a.shape, a.tobytes()) for n, a in tensors.items()
        }


def test_only_what_is_asked_for_is_read(tmp_path):
    size = 1 << 20
    types = {"a": np.uint8, "b": np.uint8, "c": ml_dtypes.float8_e4m3fn}
    save_safetensors(tmp_path / "model.safetensors", {name: np.zeros(size, dtype) for name, dtype in types.items()})
    tracemalloc.start()
    source = SafetensorsReader([tmp_path / "model.safetensors"])
    source.read("c")  # a view
    opened = tracemalloc.get_traced_memory()[1]
    source.read("b")
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert opened < size / 4 and size <= read < 1.25 * size


@pytest.mark.parametrize(
    "header, data, message",
    [
        (b"{not json", b"", "is not a safetensors file"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"1234", "truncated"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"12345678", "needs 8 bytes, has 4"),
        (b'{"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}', b"12345678", "'a' has type F33"),
        (b'{"a":{"shape":[2]}}', b"", "malformed header entry of tensor 'a'"),
        (b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}', b"1234", "is not a safetensors file .*offset"),
        (b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"1234", "is not a safetensors file"),
    ],
)
def test_damaged_safetensors(header, data, message, tmp_path):
    raw_safetensors(tmp_path / "model.safetensors", header, data)
    with pytest.raises(ConversionError, match=message):
        open_tensors(tmp_path)


def test_something_else_is_no_safetensors_file(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ConversionError, match="is not a safetensors file"):
        open_tensors(tmp_path)


def sharded(folder):
    save_safetensors(folder / "one.safetensors", {"a": sample(np.float32)})
    save_safetensors(folder / "two.safetensors", {"b": sample(np.float16)})
    write_index(folder, {"a": "one.safetensors", "b": "two.safetensors"})


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards(tmp_path):
    sharded(tmp_path)
    source = open_tensors(tmp_path)
    assert {n: i.file for n, i in source.info.items()} == {"a": "one.safetensors", "b": "two.safetensors"}
    assert np.array_equal(source.read("b"), sample(np.float16))


def test_missing_shard(tmp_path):
    sharded(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"two\.safetensors does not exist, but .* holds 1 tensors"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    "weight_map, message",
    [
        ({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}, "'c' is said to be in two"),
        ({"a": "one.safetensors", "z": "two.safetensors"}, "'z' is said to be in two"),
        ({"a": "../one.safetensors"}, "is not a plain file name"),
        ([], "is not a checkpoint index"),
    ],
)
def test_wrong_index(weight_map, message, tmp_path):
    sharded(tmp_path)
    save_safetensors(tmp_path.parent / "one.safetensors", {"a": sample(np.float32)})
    write_index(tmp_path, weight_map)
    with pytest.raises(ConversionError, match=message):
        open_tensors(tmp_path)


def test_tensor_that_the_index_does_not_name(tmp_path):
    sharded(tmp_path)
    save_safetensors(tmp_path / "two.safetensors", {"b": sample(np.float16), "more": sample(np.float16)})
    with pytest.raises(ConversionError, match="'more' of two.safetensors is not in the index"):
        open_tensors(tmp_path)


def test_folder_without_weights(tmp_path):
    with pytest.raises(MissingFileError, match="holds no weights: expected model.safetensors"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64])
def test_torch_archive(dtype, tmp_path):
    tensors = {"a": sample(dtype), "b.c": sample(dtype, (2, 2, 4))}
    save_torch(tmp_path / "pytorch_model.bin", tensors)
    source = open_tensors(tmp_path)
    for name, array in tensors.items():
        assert source.info[name][:2] == (array.shape, array.dtype)
        assert np.array_equal(source.read(name), array)


def test_torch_archive_of_torch_itself(tmp_path):
    torch = pytest.importorskip("torch", reason="compares with torch.save")
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "plain": base.to(torch.bfloat16),
        "transposed": base.T,
        "slice": base[1:3, 2:5],
        "scalar": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(base.half()),
        "shared": base,
        "expanded": torch.ones(1).expand(3, 2),
        "flag": torch.tensor([True, False]),
        "byte": torch.arange(5, dtype=torch.uint8),
    }
    module = torch.nn.Linear(3, 2)  # its state_dict is an OrderedDict with metadata attached
    torch.save(state, tmp_path / "one.bin")
    torch.save(module.state_dict(), tmp_path / "two.bin")
    source = TorchReader([tmp_path / "one.bin", tmp_path / "two.bin"])
    for name, tensor in (state | module.state_dict()).items():
        expected = tensor.detach().float().numpy()
        assert np.array_equal(source.read(name).astype(np.float32), expected), name


@pytest.mark.parametrize(
    "code, named",
    [
        (b"cos\nsystem\n(" + push("echo no") + b"tR", "os.system"),
        (b"cposix\nsystem\n(" + push("echo no") + b"tR", "posix.system"),
        (b"cbuiltins\neval\n(" + push("1") + b"tR", "builtins.eval"),
        (push("builtins") + push("getattr") + b"\x93", "builtins.getattr"),  # STACK_GLOBAL
        (b"(" + push("echo no") + b"ios\nsystem\n", "os.system"),  # INST
        (b"ctorch\nload\n", "torch.load"),
        (b"cnumpy\nload\n", "numpy.load"),
    ],
)
def test_pickle_with_code_is_refused(code, named, tmp_path):
    save_torch(tmp_path / "pytorch_model.bin", {"a": sample(np.float32)}, evil=code)
    with pytest.raises(UnsafePickleError, match=f"asks for {named}"):
        open_tensors(tmp_path)


def test_pickle_never_runs_its_code(tmp_path):
    trace = tmp_path / "trace"
    code = b"cbuiltins\nopen\n(" + push(str(trace)) + push("w") + b"tR"
    save_torch(tmp_path / "pytorch_model.bin", {}, evil=code)
    with pytest.raises(UnsafePickleError):
        open_tensors(tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize(
    "entry, message",
    [
        (push(3), "'x' is a int, not a tensor"),
        (tensor_opcodes(sample(np.float32), "0", count=3), "reaches beyond its storage"),
        (tensor_opcodes(sample(np.float32, (4, 4)), "0"), "missing, compressed or too short"),
        (tensor_opcodes(sample(np.float32), "7"), "missing, compressed or too short"),
        (b"(" + push("module") + b"tQ", "unknown persistent object"),
    ],
)
def test_torch_archive_with_bad_entries(entry, message, tmp_path):
    save_torch(tmp_path / "pytorch_model.bin", {"a": sample(np.float32)}, x=entry)
    with pytest.raises(ConversionError, match=message):
        open_tensors(tmp_path)


def test_old_torch_format_and_other_zips(tmp_path):
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    with pytest.raises(ConversionError, match="older pickle format"):
        open_tensors(tmp_path)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(ConversionError, match=r"without the data\.pkl"):
        open_tensors(tmp_path)
