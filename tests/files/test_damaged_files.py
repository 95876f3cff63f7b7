"""Weights that would be read as something else: tensors upon each other, keys twice, wrong types, NaN and infinity."""

import json
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest

import jaxspec
from jaxspec.conversion import ConversionError, convert
from jaxspec.conversion.mapping import all_finite
from jaxspec.files.folders import open_tensors
from jaxspec.files.gguf_reader import GGUFReader
from tests.conversion.gguf_files import write_gguf
from tests.files.archives import FIXTURES, raw_safetensors, read_all, save_safetensors


def header(**entries):
    return json.dumps(entries).encode()


def entry(begin=0, end=8, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "text, message",
    [
        (header(a=entry(), b=entry()), "tensors 'a' and 'b' lie upon each other at byte 0"),
        (header(a=entry(), b=entry(4, 12), c=entry(16, 24)), "tensors 'a' and 'b' lie upon each other at byte 4"),
        (header(a=entry(0, 24, [6]), b=entry(8, 16)), "tensors 'a' and 'b' lie upon each other at byte 8"),
        (
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"I32","shape":[2],"data_offsets":[8,16]}}',
            "has the key 'a' twice",
        ),
        (b'{"a":{"dtype":"F32","shape":[2],"shape":[1],"data_offsets":[0,4]}}', "has the key 'shape' twice"),
        (header(a=entry(shape=[2.5])), "shape is a list of 1, expected at most 32 whole numbers"),
        (header(a=entry(shape=[True, 2])), "shape is"),
        (header(a=entry(shape="2")), "shape is 2"),
        (header(a=entry(shape=[-1, -2])), "shape is"),
        (header(a=entry(shape=[2**40, 2**40])), "needs 4835703278458516698824704"),
        (header(a=entry(shape=[1] * 33)), "shape is a list of 33"),
        (header(a=entry(0.0, 8)), "data_offsets is"),
        (header(a=entry("0", 8)), "data_offsets is"),
        (header(a=entry(-8, 0)), "data_offsets is"),
        (header(a=entry() | {"data_offsets": [0]}), "data_offsets is"),
        (header(a=entry(dtype=["F32"])), "has type a list of 1"),
        (header(a=entry(dtype=None)), "has type None"),
        (header(a=None), "malformed header entry"),
        (header(a=[1]), "malformed"),
        (b"[]", "is not a safetensors file"),
        (b"null", "is not a safetensors file"),
        (b"[" * 50_000, "nested too deeply"),
        (header(**{"x" * 100_000: entry(0, 4)}), "needs 8 bytes, has 4"),
        (b"\xff\xff", "is not a safetensors file"),
    ],
)
def test_safetensors_headers(text, message, tmp_path):
    raw_safetensors(tmp_path / "model.safetensors", text, bytes(24))
    with pytest.raises(ConversionError, match=message) as caught:
        open_tensors(tmp_path)
    assert "model.safetensors" in str(caught.value) and len(str(caught.value)) < 1000


def test_empty_tensors_may_share_a_place(tmp_path):
    raw_safetensors(tmp_path / "model.safetensors", header(a=entry(), b=entry(0, 0, [0]), c=entry(8, 8, [3, 0])), bytes(8))
    assert set(open_tensors(tmp_path).info) == {"a", "b", "c"}


@pytest.mark.parametrize(
    "name", ["..", ".", "", "/etc/passwd", "a/b", "a\\b", "x\0y", "x" * 300, None, 3, ["model.safetensors"], {}]
)
def test_names_in_an_index(name, tmp_path):
    save_safetensors(tmp_path / "model.safetensors", {"a": np.ones(2, np.float32)})
    for weight_map in ({"a": name}, {"a": "model.safetensors", "b": name}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ConversionError, match=r"index.json: .*(is not a plain file name|expected a file name)"):
            open_tensors(tmp_path)


@pytest.mark.parametrize("text", ["[]", "null", '{"weight_map": 3}', '{"weight_map": null}', "{}", "[" * 50_000, "\x00"])
def test_an_index_that_is_none(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConversionError, match=r"model.safetensors.index.json"):
        open_tensors(tmp_path)


def tiny_gguf(tensors=b"", keys=b"", num_tensors=0, num_keys=0, data=256):
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + keys + tensors
    return head + bytes(-len(head) % 32) + bytes(data)


def text(value):
    return struct.pack("<Q", len(value)) + value


def tensor(name, shape, offset, kind=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def number(key, value, kind=4, form="<I"):
    return text(key) + struct.pack("<I", kind) + struct.pack(form, value)


@pytest.mark.parametrize(
    "data, message",
    [
        (tiny_gguf(tensor(b"a", (4,), 0) + tensor(b"b", (4,), 0), num_tensors=2), "'a' and 'b' lie upon each other"),
        (tiny_gguf(tensor(b"a", (9,), 0) + tensor(b"b", (4,), 32), num_tensors=2), "'a' and 'b' lie upon each other"),
        (tiny_gguf(tensor(b"a", (4,), 0) + tensor(b"a", (4,), 32), num_tensors=2), "'a' is stored twice"),
        (tiny_gguf(keys=number(b"x", 1) + number(b"x", 2), num_keys=2), "the metadata key 'x' is there twice"),
        (tiny_gguf(keys=number(b"general.alignment", 0), num_keys=1), "general.alignment is 0, expected a whole number from 1"),
        (tiny_gguf(keys=text(b"general.alignment") + struct.pack("<IQ", 8, 1) + b"x", num_keys=1), "general.alignment is 'x'"),
        (tiny_gguf(keys=text(b"x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, num_keys=1), "nested too deeply"),
        (tiny_gguf(keys=text(b"x") + struct.pack("<IIQ", 9, 4, 2**62), num_keys=1), "ends inside its header"),
        (tiny_gguf(keys=text(b"x") + struct.pack("<IIQ", 9, 8, 2**62), num_keys=1), "ends inside its header"),
        (tiny_gguf(tensor(b"a", (2**32, 2**32), 0), num_tensors=1), "ends inside tensor 'a'"),
        (tiny_gguf(tensor(b"a", (4,), 2**63), num_tensors=1), "ends inside tensor 'a'"),
        (tiny_gguf(tensor(b"a", (33,), 0, 2), num_tensors=1), "rows of 33 values of tensor 'a' are no whole blocks of 32"),
        (tiny_gguf(tensor(b"a", (1,) * 40, 0), num_tensors=1), "'a' has 40 axes"),
        (tiny_gguf(tensor(b"a", (4,), 0, 999), num_tensors=1), "unknown quantisation type 999"),
        (tiny_gguf(num_tensors=2**60), "ends inside its header|0 axes|stored twice"),
        (tiny_gguf(num_keys=2**60), "ends inside its header|twice"),
    ],
)
def test_gguf_headers(data, message, tmp_path):
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(ConversionError, match=message):
        GGUFReader(tmp_path / "model.gguf")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("tensor", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_weights_that_are_no_numbers(tensor, dtype, value, tmp_path):
    folder = shutil.copytree(FIXTURES / "target_llama_tied", tmp_path / "model")
    weights = {n: a.astype(dtype) for n, a in read_all(folder / "model.safetensors").items()}
    weights[tensor].flat[-1] = value
    save_safetensors(folder / "model.safetensors", weights)
    for read in (lambda: jaxspec.load(folder), lambda: convert(folder, tmp_path / "out", progress=False)):
        with pytest.raises(ConversionError, match=rf"from .*{tensor}.*holds NaN or infinity"):
            read()
    assert not (tmp_path / "out").exists()


def test_scales_that_are_no_numbers(tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf("target_llama", file, "Q8_0")
    at = GGUFReader(file)._stored["blk.0.ffn_up.weight"].offset
    data = bytearray(file.read_bytes())
    for bits in (b"\x00\x7e", b"\x00\x7c", b"\x00\xfc"):  # NaN and the infinities in float16
        data[at : at + 2] = bits
        file.write_bytes(data)
        with pytest.raises(ConversionError, match=r"blk.0.ffn_up.weight\) holds NaN or infinity"):
            jaxspec.load(file)


def test_values_that_do_not_fit_the_type_asked_for(tmp_path):
    folder = shutil.copytree(FIXTURES / "target_llama_tied", tmp_path / "model")
    weights = {n: a.astype(np.float32) for n, a in read_all(folder / "model.safetensors").items()}
    weights["model.norm.weight"][0] = 70000.0
    save_safetensors(folder / "model.safetensors", weights)
    assert jaxspec.load(folder, dtype="bfloat16").config.family == "llama"
    with pytest.raises(ConversionError, match=r"final_norm/scale holds values that are too large for float16"):
        jaxspec.load(folder, dtype="float16")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_all_finite(dtype):
    array = np.ones((3, 5), dtype)
    array.flat[3] = ml_dtypes.finfo(dtype).max if np.dtype(dtype).itemsize < 4 else np.finfo(dtype).max
    assert all_finite(array) and all_finite(array.T[::2]) and all_finite(array[:0])
    array.flat[7] = np.nan
    assert not all_finite(array) and not all_finite(array.T)
