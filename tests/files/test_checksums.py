"""Damage to a converted folder: flipped bits, lost files, full disks; each is an error that names the folder."""

import errno
import json
import random
import runpy
import shutil

import numpy as np
import pytest

import jaxspec
from jaxspec.conversion import ConversionError, convert, store
from jaxspec.conversion.mapping import flatten
from jaxspec.files import checksums
from tests.files.archives import FIXTURES


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    at = tmp_path_factory.mktemp("converted")
    convert(FIXTURES / "target_llama_tied", at / "plain", progress=False)
    convert(FIXTURES / "target_llama_tied", at / "int8", quantize="int8", progress=False)
    return at


def restored_with_a_flip(monkeypatch, path, bit):
    """orbax gives an array back in which one bit is another: what a flipped bit amounts to that its format does not see."""
    restore = store._restore

    def flipped(shard, like):
        found = restore(shard, like)
        if path in found:
            data = np.array(found[path])
            data.reshape(-1).view(np.uint8)[-1] ^= 1 << bit
            found[path] = data
        return found

    monkeypatch.setattr(store, "_restore", flipped)


@pytest.mark.parametrize("kind", ["plain", "int8"])
@pytest.mark.parametrize("which, bit", [(0, 0), (3, 7), (-1, 4)])
def test_a_flipped_bit(kind, which, bit, folders, tmp_path, monkeypatch):
    path = sorted(checksums.read_checksums(folders / kind / "params"))[which]
    restored_with_a_flip(monkeypatch, path, bit)
    reads = [
        lambda: jaxspec.load(folders / kind),
        lambda: jaxspec.load(folders / kind, dtype="bfloat16"),
        lambda: store.verify(folders / kind),
        lambda: convert(folders / kind, tmp_path / "again", progress=False),
    ]
    for read in reads:
        with pytest.raises(ConversionError, match=rf"parameter {path} is not what was written .*convert it again"):
            read()


def test_large_arrays_are_left_to_verify(folders, monkeypatch):
    monkeypatch.setattr(store, "SMALL", 0)
    path = "embedder/embedding"
    restored_with_a_flip(monkeypatch, path, 0)
    assert jaxspec.load(folders / "plain").config.family == "llama"
    with pytest.raises(ConversionError, match=f"parameter {path} is not"):
        store.verify(folders / "plain")


def test_types_are_the_same_with_checksums_and_without(folders, tmp_path):
    bare = shutil.copytree(folders / "plain", tmp_path / "bare")
    (bare / "params" / "checksums.json").unlink()
    for dtype in ("float32", "bfloat16", "float16"):
        one, two = (flatten(jaxspec.load(f, dtype=dtype).tree) for f in (folders / "plain", bare))
        assert {p: (a.dtype, np.asarray(a).tobytes()) for p, a in one.items()} == {
            p: (a.dtype, np.asarray(a).tobytes()) for p, a in two.items()
        }
    with pytest.raises(ConversionError, match="bare was written without checksums"):
        store.verify(bare)


def test_the_command(folders, capsys):
    command = runpy.run_module("jaxspec.convert", run_name="jaxspec_convert_command")  # an import would hide the function
    assert command["main"]([str(folders / "plain"), "--verify"]) == 0
    assert "arrays are as they were written" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command["main"]([str(folders / "plain"), "other", "--verify"])


def test_checksums_that_are_damaged_themselves(folders, tmp_path):
    folder = shutil.copytree(folders / "plain", tmp_path / "x")
    file = folder / "params" / "checksums.json"
    good = json.loads(file.read_text())
    first = min(good)
    for data in (
        "[]",
        "{",
        json.dumps(good | {first: "x"}),
        json.dumps({k: v for k, v in good.items() if k != first}),
        json.dumps(good | {first: good[first] ^ 1}),
    ):
        file.write_text(data)
        with pytest.raises(ConversionError, match=r"x/params"):
            jaxspec.load(folder)
    file.write_text(json.dumps(good | {"more": 1}))
    with pytest.raises(ConversionError, match="has lost the parameter more"):
        store.verify(folder)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax gives its own threads up
def test_damage_to_the_files_themselves(folders, tmp_path):
    """Bytes of every file of a shard changed, cut or gone: an error that names the folder, or what was written."""
    right = {p: np.asarray(a).tobytes() for p, a in flatten(jaxspec.load(folders / "plain").tree).items()}
    files = [p.relative_to(folders / "plain") for p in (folders / "plain" / "params").rglob("*") if p.is_file()]
    dice, errors = random.Random(0), 0
    for name in sorted(files):
        for damage in ("flip", "cut", "empty", "gone"):
            folder = tmp_path / "x"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(folders / "plain", folder)
            data = bytearray((folder / name).read_bytes())
            if damage == "flip" and data:
                data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            (folder / name).write_bytes({"flip": data, "cut": data[: len(data) // 2]}.get(damage, b""))
            if damage == "gone":
                (folder / name).unlink()
            try:
                found = {p: np.asarray(a).tobytes() for p, a in flatten(jaxspec.load(folder).tree).items()}
            except ConversionError as error:
                assert str(folder) in str(error)
                errors += 1
            else:
                assert found == right
    assert errors > 5


@pytest.mark.parametrize("where", ["write_config", "_checkpointer", "write_checksums"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("… No space left on device …")])
def test_a_full_disk(where, error, tmp_path, monkeypatch):
    def full(*_, **__):
        raise error

    monkeypatch.setattr(store, where, full)
    with pytest.raises(ConversionError, match="cannot be written: the disk is full"):
        convert(FIXTURES / "target_llama_tied", tmp_path / "out", progress=False)
    assert list(tmp_path.iterdir()) == []
