"""Files with bytes and values changed at random, by fixed seeds, through every reader: an error of ours, or an answer.

An answer is a checkpoint that fits its own configuration; where only weights were changed it has finite values.
"""

import json
import random
import shutil
import time
import tracemalloc
import warnings

import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.conversion import convert
from jaxspec.conversion.sources import open_checkpoint
from jaxspec.conversion.targets.gguf_tokenizer import definition
from jaxspec.files.torch_list import read_list
from jaxspec.tokenizer.tokenizer import TokenizerFiles
from tests.conversion.gguf_files import write_gguf
from tests.files.archives import FIXTURES, push, read_all, save_torch
from tests.files.test_torch_pickle import packed
from tests.tokenizer.test_tokenizer import byte_level_meta

SECONDS, BYTES = 3, 1 << 28
"""What one file may cost, of some 100 kB."""
VALUES = [None, True, 0, -1, 1.5, 2**31, 10**9, 10**30, "", "x", "..", [], {}, [[]], [None], {"a": []}, [1] * 100, float("nan")]


def hf(at):
    return shutil.copytree(FIXTURES / "target_qwen3_moe", at / "model"), ["config.json", "model.safetensors"]


def sharded(at):
    return shutil.copytree(FIXTURES / "target_llama_sharded", at / "model"), ["model.safetensors.index.json", "config.json"]


def torch_archive(at):
    folder = shutil.copytree(FIXTURES / "target_llama_tied", at / "model")
    save_torch(folder / "pytorch_model.bin", read_all(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    return folder, ["pytorch_model.bin"]


def token_list(at):
    packed(at / "map.pt", b"\x80\x02" + push(list(range(40))) + b".")
    return at, ["map.pt"]


def gguf_file(at):
    words = ["<unk>", "a", "b", "ab"]
    vocabulary = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": words, "tokenizer.ggml.merges": ["a b"]}
    write_gguf("target_gemma2", at / "model.gguf", "Q8_0", metadata=vocabulary)
    return at, ["model.gguf"]


def head(at):
    return shutil.copytree(FIXTURES / "draft_dspark", at / "model"), ["config.json", "model.safetensors"]


def eagle(at):
    return shutil.copytree(FIXTURES / "draft_eagle3_speculators", at / "model"), ["config.json", "model.safetensors"]


def adapter(at):
    return shutil.copytree(FIXTURES / "draft_uno_qwen3", at / "model"), ["adapter_config.json"]


def converted(at):
    convert(FIXTURES / "target_llama_tied", at / "model", progress=False)
    return at / "model", ["config.json", "params/checksums.json"]


def tokenizer(at):
    files = {
        "tokenizer.json": definition(byte_level_meta()),
        "tokenizer_config.json": '{"bos_token": {"content": "a"}}',
        "chat_template.json": '{"chat_template": "{{ messages[0].content }}"}',
    }
    for name, text in files.items():
        (at / name).write_text(text)
    return at, list(files)


SOURCES = [hf, sharded, torch_archive, token_list, gguf_file, head, eagle, adapter, converted, tokenizer]


def changed_bytes(data, dice):
    """Some bytes replaced, cut out, doubled or put in, most of them near the beginning, where headers are."""
    data = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 5))):
        at = dice.randrange(min(len(data), dice.choice((16, 200, 4000, 10**9)))) if data else 0
        how, count = dice.randrange(5), dice.choice((1, 1, 4, 8, 100))
        if how == 0:
            data[at : at + 1] = bytes([dice.randrange(256)])
        elif how == 1:
            del data[at : at + count]
        elif how == 2:
            data[at:at] = data[at : at + count]
        elif how == 3:
            data[at : at + count] = bytes([dice.choice((0, 255, 0x7F))]) * count
        else:
            data[at:at] = dice.choice((b"[", b"{", b'"', b"\x00", b"9" * 20, b"\\u0000", b"-", b"null", b"1e999"))
    return bytes(data[: dice.choice((len(data), len(data), len(data) // 2))])


def changed_values(data, dice):
    """One value somewhere in a JSON file replaced by one of another kind."""
    raw = json.loads(data)
    places = []

    def walk(value):
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            walk(value[key])

    walk(raw)
    holder, key = dice.choice(places)
    holder[key] = dice.choice(VALUES)
    return json.dumps(raw).encode()


def read(at, target):
    if (at / "map.pt").exists():
        read_list(at / "map.pt")
    elif (at / "model.gguf").exists():
        drain(open_checkpoint(at / "model.gguf", target))
    elif (at / "tokenizer.json").exists():
        loaded = TokenizerFiles.of_folder(at).load()
        assert loaded is None or isinstance(loaded.encode("ab"), list)
    else:
        drain(open_checkpoint(at, target))


def drain(checkpoint):
    checkpoint.check()
    for part in checkpoint.parts().values():
        for _, array in checkpoint.build(part, np.dtype(np.float32)):
            assert array.dtype.kind in "iub" or np.isfinite(array).all()
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.load()


@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.__name__)
def test_changed_files(source, tmp_path):
    folder, names = source(tmp_path)
    target = open_checkpoint(FIXTURES / "target_qwen3").config
    good = {name: (folder / name).read_bytes() for name in names}
    read(folder, target)  # as they are
    refused = 0
    for seed in range(24):
        dice = random.Random(f"{source.__name__} {seed}")
        name = names[seed % len(names)]
        changed = (changed_values if name.endswith(".json") and seed % 4 < 2 else changed_bytes)(good[name], dice)
        (folder / name).write_bytes(changed)
        traced = seed % 6 == 0  # tracing makes everything several times slower
        if traced:
            tracemalloc.start()
        begun = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                read(folder, target)
            except ConfigError as error:
                refused += 1
                assert len(str(error)) < 4000, seed
            finally:
                spent, peak = time.process_time() - begun, tracemalloc.get_traced_memory()[1] if traced else 0
                tracemalloc.stop()
        assert spent < SECONDS * (3 if traced else 1) and peak < BYTES, seed
        (folder / name).write_bytes(good[name])
    assert refused > 3
