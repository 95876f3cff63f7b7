"""Values that a configuration cannot have: each is refused with file and key, at once, in every format."""

import dataclasses
import json
import shutil
import time

import pytest

import jaxspec
from jaxspec.config import ConfigError, ModelConfig
from jaxspec.conversion import ConversionError, convert
from jaxspec.conversion.sources import open_checkpoint
from jaxspec.conversion.targets.gguf_tokenizer import definition
from jaxspec.files.values import KEYS, check_config, parse_json
from jaxspec.tokenizer.tokenizer import TokenizerFiles
from tests.conversion.gguf_files import write_gguf
from tests.files.archives import FIXTURES
from tests.tokenizer.test_tokenizer import byte_level_meta

WRONG_TYPES = [[], {}, "x", "4", True, [[]], [None], 1e400, -(10**30), float("nan")]
HF = [
    "target_llama",
    "target_qwen2",
    "target_qwen3_moe",
    "target_gemma3",
    "target_deepseek_v3",
    "draft_eagle3_speculators",
    "draft_dflash",
    "draft_dspark",
    "mtp_mimo",
]


def changed(tmp_path, name, change):
    """A folder with another config.json; the weights are links."""
    folder = tmp_path / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in (FIXTURES / name).iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def refused(path, match, target=None):
    begun = time.process_time()
    with pytest.raises(ConversionError, match=match) as caught:
        open_checkpoint(path, target).check()
    assert time.process_time() - begun < 3 and len(str(caught.value)) < 1500
    return str(caught.value)


@pytest.mark.parametrize("count", [0, -1, 10**6, 10**9, 10**30, 1025])
@pytest.mark.parametrize("name", ["target_llama", "target_qwen2", "target_qwen3_moe", "target_gemma3", "target_deepseek_v3"])
def test_numbers_of_layers(name, count, tmp_path):
    folder = changed(tmp_path, name, lambda raw: raw.update(num_hidden_layers=count))
    refused(folder, "config.json: num_hidden_layers is .*, expected a whole number from 1 to 1024")


@pytest.mark.parametrize("count", [0, 10**6, 4 * 10**9])
@pytest.mark.parametrize("name", ["target_llama", "target_qwen3_moe", "target_phi3", "target_gemma2"])
def test_block_counts(name, count, tmp_path):
    write_gguf(name, tmp_path / "model.gguf")
    data = (tmp_path / "model.gguf").read_bytes()
    at = data.index(b".block_count") + len(b".block_count") + 4
    (tmp_path / "model.gguf").write_bytes(data[:at] + count.to_bytes(4, "little") + data[at + 4 :])
    refused(tmp_path / "model.gguf", r"model.gguf: \w+.block_count is .*, expected a whole number from 1 to 1024")


def test_layers_of_a_converted_folder(tmp_path):
    convert(FIXTURES / "target_llama_tied", tmp_path / "out", progress=False)
    file = tmp_path / "out" / "config.json"
    good = json.loads(file.read_text())
    for key, value in (
        ("num_layers", 10**9),
        ("num_layers", "3"),
        ("num_heads", 4.5),
        ("norm_eps", float("nan")),
        ("rope", 3),
        ("windows", [0, 0, 0]),
        ("windows", "abc"),
        ("tie_embeddings", "no"),
        ("stop_token_ids", [[1]]),
    ):
        file.write_text(json.dumps(good | {"config": good["config"] | {key: value}}))
        with pytest.raises(ConversionError, match=rf"config.json: .*{key}"):
            jaxspec.load(tmp_path / "out")
    for key in ("kind", "num_shards", "jaxspec_format", "config", "provenance"):
        for value in (None, [], "x", -1, 1.5, {"a": 1}):
            if (key, value) != ("provenance", {"a": 1}):
                file.write_text(json.dumps(good | {key: value}))
                with pytest.raises(ConversionError, match="config.json"):
                    jaxspec.load(tmp_path / "out")


NUMBERS = {
    "num_attention_heads": (4.7, 0, -4, "4"),
    "hidden_size": (32.5, 0, -32),
    "vocab_size": (0, -1, 1.5),
    "intermediate_size": (0.5,),
    "num_key_value_heads": (0, -2, 1.5),
    "head_dim": (0, 7.5, -16),
    "max_position_embeddings": (0, -1, 2.5, "long"),
    "rms_norm_eps": (float("nan"), -1e-6, float("inf"), "1e-6"),
    "rope_theta": (0, -1.0, float("nan"), float("inf"), 1e40),
    "sliding_window": (0, -4, 3.5),
    "tie_word_embeddings": ("false", 1),
    "eos_token_id": ("</s>", [1.5], {"a": 1}),
    "architectures": ("Llama", [1]),
    "rope_scaling": ("yarn", [1]),
    "model_type": (["llama"], {}),
    "bos_token_id": (1.5, "x"),
}


@pytest.mark.parametrize("key, value", [(key, value) for key, values in NUMBERS.items() for value in values])
def test_numbers_that_mean_nothing(key, value, tmp_path):
    folder = changed(tmp_path, "target_llama", lambda raw: raw.update({key: value}))
    refused(folder, rf"config.json: {key} is .*, expected")


def test_a_whole_number_may_be_written_with_a_point(tmp_path):
    folder = changed(tmp_path, "target_llama", lambda raw: raw.update(num_attention_heads=float(raw["num_attention_heads"])))
    assert open_checkpoint(folder).config == open_checkpoint(FIXTURES / "target_llama").config


def paths(raw, lead=()):
    for key, value in raw.items():
        if key in KEYS:
            yield (*lead, key)
        if isinstance(value, dict):
            yield from paths(value, (*lead, key))


@pytest.mark.parametrize("name", HF)
def test_wrong_types_anywhere(name, tmp_path):
    """Each known key of a file with each wrong type: an error that names the file, or a value that may stand there."""
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    target = open_checkpoint(FIXTURES / "target_llama").config
    for i, where in enumerate(paths(raw)):
        for value in (WRONG_TYPES[i % len(WRONG_TYPES)], WRONG_TYPES[(i + 3) % len(WRONG_TYPES)], -7, 1.5):

            def change(raw, where=where, value=value):
                for key in where[:-1]:
                    raw = raw[key]
                raw[where[-1]] = value

            folder = changed(tmp_path, name, change)
            try:
                open_checkpoint(folder, target)
            except ConversionError as error:
                assert str(tmp_path) in str(error) or "config.json" in str(error), error


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"model_type": "llama", "model_type": "qwen2"}', "has the key 'model_type' twice"),
        ("[1, 2]", "holds a list, expected a JSON object"),
        ("null", "holds a NoneType"),
        ("", "is not valid JSON"),
        ("1" * 10_000, "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
    ],
)
def test_json_that_is_none(text, message, tmp_path):
    with pytest.raises(ConversionError, match=message):
        parse_json(text, "file")
    folder = changed(tmp_path, "target_llama", lambda raw: None)
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(folder, message)


def test_experts_are_counted_over_all_layers(tmp_path):
    folder = changed(tmp_path, "target_qwen3_moe", lambda raw: raw.update(num_experts=10**8))
    refused(folder, "experts over all layers, at most")


@pytest.mark.parametrize(
    "change",
    [
        dict(norm_eps=float("nan")),
        dict(windows=(0,)),
        dict(ffn_size=True),
        dict(rope=None),
        dict(bos_token_id=1.5),
        dict(logit_softcap=0.0),
        dict(stop_token_ids=("a",)),
        dict(activation=3),
        dict(attention_scale=float("inf")),
    ],
)
def test_configurations_made_by_hand(change):
    good = ModelConfig("llama", 8, 8, 1, 1, 1, 8, 8, 8)
    assert check_config(good, "x") is good
    with pytest.raises(ConversionError, match=f"x: {next(iter(change))} is"):
        check_config(dataclasses.replace(good, **change), "x")
    for name, value in (("num_layers", 10**9), ("num_layers", -1), ("num_heads", 0), ("num_kv_heads", 1.0), ("head_dim", -8)):
        with pytest.raises(ConfigError, match=f"{name}="):
            dataclasses.replace(good, **{name: value})


@pytest.mark.parametrize(
    "key, value",
    [
        ("rope.freq_base", 0.0),
        ("rope.freq_base", float("nan")),
        ("attention.head_count", 0),
        ("attention.head_count", "4"),
        ("attention.layer_norm_rms_epsilon", -1.0),
        ("attention.layer_norm_rms_epsilon", float("inf")),
        ("context_length", 0),
        ("attention.key_length", 7.5),
        ("feed_forward_length", ["a"]),
    ],
)
def test_metadata_that_means_nothing(key, value, tmp_path):
    write_gguf("target_llama", tmp_path / "model.gguf", metadata={f"ARCH.{key}": value})
    refused(tmp_path / "model.gguf", rf"model.gguf: llama.{key} is .*, expected")


def test_tokenizers_inside_gguf_files(tmp_path):
    tokens = ["<unk>", "a", "b", "ab"]
    for key, value in (("tokens", [1, 2]), ("scores", ["x"]), ("token_type", [1.5]), ("model", 3), ("merges", [1])):
        base = {"model": "gpt2", "tokens": tokens, "merges": ["a b"]}
        data = {f"tokenizer.ggml.{k}": v for k, v in (base | {key: value}).items()}
        write_gguf("target_llama", tmp_path / "model.gguf", metadata=data)
        refused(tmp_path / "model.gguf", rf"tokenizer.ggml.{key} is")
    for data in ({"model": "gpt2", "tokens": tokens}, {"model": "llama", "tokens": tokens, "scores": [0.0]}):
        write_gguf("target_llama", tmp_path / "model.gguf", metadata={f"tokenizer.ggml.{k}": v for k, v in data.items()})
        for read in (lambda: jaxspec.load(tmp_path / "model.gguf"), lambda: convert(tmp_path / "model.gguf", tmp_path / "out")):
            with pytest.raises(ConversionError, match=r"tokenizer.json is damaged"):
                read()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name, text",
    [
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "{"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", '{"chat_template": 3}'),
        ("tokenizer_config.json", '{"chat_template": [1]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": []}]}'),
        ("chat_template.json", "null"),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_damaged_tokenizer_files(name, text, tmp_path):
    (tmp_path / "tokenizer.json").write_text(definition(byte_level_meta()))
    assert TokenizerFiles.of_folder(tmp_path).load() is not None
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConversionError, match=f"{name.split('.')[0]}|chat.template"):
        TokenizerFiles.of_folder(tmp_path).load()
