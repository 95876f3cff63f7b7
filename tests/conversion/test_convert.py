"""`convert` end to end on the golden targets: every kind of source, strictness, atomic writing, the way back to HF."""

import dataclasses
import json
import shutil
import subprocess
import sys
from typing import ClassVar

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxspec
from jaxspec.config import ConfigError
from jaxspec.conversion import ConversionError, MissingFileError, convert, store
from jaxspec.conversion.mapping import flatten
from jaxspec.drafters import kinds
from tests.files.archives import FIXTURES, read_all, save_safetensors, save_torch

FAMILIES = [
    "target_llama_tied",
    "target_mistral",
    "target_qwen2",
    "target_qwen3",
    "target_qwen3_moe",
    "target_phi3",
    "target_gemma2",
    "target_gemma3",
]


def copy_of(name, tmp_path):
    return shutil.copytree(FIXTURES / name, tmp_path / name)


def run(*arguments, **options):
    convert(*arguments, progress=False, **options)


def tree_of(source, **options):
    return {p: np.asarray(a) for p, a in flatten(jaxspec.load(source, **options).tree).items()}


def assert_same_tree(first, second):
    assert {p: (a.dtype, a.shape) for p, a in first.items()} == {p: (a.dtype, a.shape) for p, a in second.items()}
    assert all(first[p].tobytes() == second[p].tobytes() for p in first)


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back(name, tmp_path):
    """HF → converted → HF gives every tensor back, bit by bit, and a configuration with the same meaning."""
    run(FIXTURES / name, tmp_path / "converted")
    run(tmp_path / "converted", tmp_path / "hf", to_hf=True)
    original, again = (read_all(f / "model.safetensors") for f in (FIXTURES / name, tmp_path / "hf"))
    assert_same_tree(original, again)
    direct, converted = jaxspec.load(FIXTURES / name), jaxspec.load(tmp_path / "converted")
    assert direct.config == converted.config == jaxspec.load(tmp_path / "hf").config
    assert_same_tree(tree_of(FIXTURES / name), tree_of(tmp_path / "converted"))


def test_stored_type_and_dtype(tmp_path):
    half = np.dtype(ml_dtypes.bfloat16)
    run(FIXTURES / "target_qwen3", tmp_path / "as_stored")
    run(tmp_path / "as_stored", tmp_path / "f32", dtype="float32")
    run(tmp_path / "f32", tmp_path / "hf16", dtype="fp16", to_hf=True)
    assert {a.dtype for a in tree_of(tmp_path / "as_stored", dtype="bfloat16").values()} == {half}
    assert store.ConvertedTensors(tmp_path / "f32").info["final_norm/scale"].dtype == np.float32
    assert {a.dtype for a in read_all(tmp_path / "hf16" / "model.safetensors").values()} == {np.dtype(np.float16)}
    assert json.loads((tmp_path / "hf16" / "config.json").read_text())["torch_dtype"] == "float16"
    with pytest.raises(ConversionError, match="dtype='int8' is not one of float32, float16, bfloat16"):
        run(FIXTURES / "target_qwen3", tmp_path / "x", dtype="int8")


def test_many_shards(tmp_path, monkeypatch):
    tensors = jaxspec.load(FIXTURES / "target_llama", dtype="float32")
    flat = {p: np.asarray(a) for p, a in flatten(tensors.tree).items()}
    sizes = []

    def stream():
        for path, array in flat.items():
            sizes.append(array.nbytes)
            yield path, array

    count = store.save(stream(), tmp_path / "params", shard_bytes=40_000)
    assert count == len(list((tmp_path / "params").glob("shard_*"))) > 5
    store.write_config(tmp_path, tensors.config, {}, count)
    assert_same_tree(flat, tree_of(tmp_path))
    shutil.rmtree(tmp_path / "params" / "shard_00002")
    with pytest.raises(MissingFileError, match="shard_00002 does not exist"):
        jaxspec.load(tmp_path)


def test_memory_follows_the_shard_not_the_model(tmp_path, monkeypatch):
    import tracemalloc

    from jaxspec.config import ModelConfig
    from jaxspec.conversion.export import model_export
    from jaxspec.conversion.mapping import expected_shapes
    from jaxspec.conversion.targets.hf import model_rules
    from jaxspec.models.decoder import param_shapes

    config = ModelConfig(
        family="llama",
        vocab_size=64,
        hidden_size=256,
        num_layers=16,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        ffn_size=512,
        max_positions=64,
        architecture="LlamaForCausalLM",
    )
    shapes, tensors = flatten(param_shapes(config)), {}
    for rule in model_rules(config):
        sizes = expected_shapes(rule, shapes[rule.target])
        tensors |= {name: np.zeros(size, np.float32) for name, size in zip(rule.sources, sizes, strict=True)}
    (tmp_path / "hf").mkdir()
    save_safetensors(tmp_path / "hf" / "model.safetensors", tensors)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(model_export(config).config))
    total = sum(a.nbytes for a in tensors.values())
    largest = max(int(np.prod(s)) for s in shapes.values()) * 4
    shard = 2 * largest
    monkeypatch.setattr(store.save, "__defaults__", (shard,))
    del tensors
    run(FIXTURES / "target_llama_tied", tmp_path / "warm_up")  # what is imported on the way is not the model's
    tracemalloc.start()
    run(tmp_path / "hf", tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A shard, orbax's copy of it, the parameter being made and its parts; the model is ten times that.
    assert peak < 3 * (shard + largest) < total / 3


def test_exported_weights_can_be_split(tmp_path, monkeypatch):
    from jaxspec.conversion import export

    monkeypatch.setattr(export.write_hf, "__kwdefaults__", export.write_hf.__kwdefaults__ | {"shard_bytes": 60_000})
    run(FIXTURES / "target_llama", tmp_path / "hf", to_hf=True)
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 1
    assert_same_tree(tree_of(FIXTURES / "target_llama"), tree_of(tmp_path / "hf"))


def test_pytorch_bin(tmp_path):
    folder = copy_of("target_qwen2", tmp_path)
    save_torch(folder / "pytorch_model.bin", read_all(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    assert_same_tree(tree_of(FIXTURES / "target_qwen2"), tree_of(folder))


def rewritten(folder, change):
    tensors = read_all(folder / "model.safetensors")
    change(tensors)
    save_safetensors(folder / "model.safetensors", tensors)


def rename(old, new):
    def change(tensors):
        tensors[new] = tensors.pop(old)

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"missing tensor model.layers.1.mlp.up_proj.weight \(shape"),
        (lambda t: t.update(extra=np.ones(3)), r"extra tensor extra \(shape \(3,\), in model.safetensors\)"),
        (lambda t: t.update({"model.norm.weight": np.ones(7)}), r"model.norm.weight has shape \(7,\), expected \(32,\)"),
        (rename("model.norm.weight", "model.norm.wieght"), "missing tensor model.norm.weight"),
        (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}), "lm_head.weight differs"),
    ],
)
def test_strictness_names_the_tensor(change, message, tmp_path):
    folder = copy_of("target_llama_tied", tmp_path)
    rewritten(folder, change)
    for read in (lambda: run(folder, tmp_path / "out"), lambda: jaxspec.load(folder)):
        with pytest.raises(ConversionError, match=message):
            read()
    assert not (tmp_path / "out").exists()


def test_tied_head_and_rotary_buffers_may_be_stored(tmp_path):
    folder = copy_of("target_llama_tied", tmp_path)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    rewritten(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"], **extra}))
    assert_same_tree(tree_of(FIXTURES / "target_llama_tied"), tree_of(folder))


def test_gemma3_with_a_vision_tower(tmp_path):
    folder = copy_of("target_gemma3", tmp_path)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "eos_token_id": 1}))

    def wrap(tensors):
        inner = {f"language_model.{name}": tensors.pop(name) for name in list(tensors)}
        vision = {"vision_tower.x.weight": np.ones(2), "multi_modal_projector.y": np.ones(2)}
        tensors.update(inner | vision)

    rewritten(folder, wrap)
    assert_same_tree(tree_of(FIXTURES / "target_gemma3"), tree_of(folder))


def test_refuses_to_overwrite_and_replaces_only_when_complete(tmp_path):
    out = tmp_path / "out"
    run(FIXTURES / "target_llama_tied", out)
    before = (out / "config.json").read_text()
    with pytest.raises(ConversionError, match=r"out exists; pass force=True \(--force\) to replace it"):
        run(FIXTURES / "target_qwen3", out)
    damaged = copy_of("target_qwen3", tmp_path)
    data = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(ConversionError, match="truncated"):
        run(damaged, out, force=True)
    assert (out / "config.json").read_text() == before
    run(FIXTURES / "target_qwen3", out, force=True)
    assert jaxspec.load(out).config.family == "qwen3"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "target_qwen3"]  # no temporary folder is left


def test_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("jaxspec.conversion.pipeline.store.write_config", fail)
    with pytest.raises(OSError, match="disk full"):
        run(FIXTURES / "target_llama_tied", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_never_replaces_its_own_source(tmp_path):
    folder = copy_of("target_llama_tied", tmp_path)
    for dst in (folder, tmp_path):
        with pytest.raises(ConversionError, match="is or holds the source itself"):
            run(folder, dst, force=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionError, match="is a file"):
        run(folder, tmp_path / "file", force=True)


def test_sources_that_are_nothing_known(tmp_path):
    with pytest.raises(MissingFileError, match="nowhere does not exist"):
        run(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConversionError, match=r"is none of: .*Hugging Face folder.* \(found: notes.txt\)"):
        run(tmp_path, tmp_path / "out")
    with pytest.raises(ConversionError, match="GGUF file.*a file named notes.txt"):
        run(tmp_path / "notes.txt", tmp_path / "out")


def test_damaged_converted_folders(tmp_path):
    run(FIXTURES / "target_llama_tied", tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    good = json.loads(file.read_text())
    for change, message in (
        (dict(jaxspec_format=99), "format version 99, this jaxspec reads 1"),
        (dict(kind="painting"), "unknown kind 'painting'"),
        (dict(config=good["config"] | {"ffn_size": 65}), r"gate_up/kernel has shape \(32, 128\), expected \(32, 130\)"),
        (dict(config=good["config"] | {"num_layers": 2, "windows": [None] * 2}), "extra parameter layers/2/"),
        (dict(config=good["config"] | {"num_layers": 4, "windows": [None] * 4}), "missing parameter layers/3/"),
        (dict(config=good["config"] | {"colour": "red"}), "unknown keys in a model config: .*colour"),
    ):
        file.write_text(json.dumps(good | change))
        with pytest.raises(ConfigError, match=message):
            jaxspec.load(tmp_path / "out")
        with pytest.raises(ConfigError):
            run(tmp_path / "out", tmp_path / "again")


def test_dry_run_prints_the_table_and_writes_nothing(tmp_path, capsys):
    run(FIXTURES / "target_qwen3_moe", tmp_path / "out", dry_run=True, dtype="float32")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Hugging Face folder") and not (tmp_path / "out").exists()
    assert any(line.startswith("layers/0/moe/experts/gate_up/kernel [8, 32, 32] float32  ←  stack 8") for line in lines)
    count = len(jax.tree.leaves(jaxspec.load(FIXTURES / "target_qwen3_moe").tree))
    assert len(lines) == 1 + count


def test_command_line(tmp_path):
    command = [sys.executable, "-m", "jaxspec.convert", str(FIXTURES / "target_llama_tied"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "tensor" in done.stderr and "wrote" in done.stderr, done.stderr
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2 and again.stderr.startswith("error: ") and "--force" in again.stderr
    assert "Traceback" not in again.stderr


def test_heads_inside_the_files_survive_another_conversion(tmp_path, monkeypatch):
    """A converted folder with a draft under ``drafts/`` is a source too: the head is converted along."""
    run(FIXTURES / "target_llama_tied", tmp_path / "out")
    run(FIXTURES / "target_qwen3", tmp_path / "out" / "drafts" / "small")
    run(tmp_path / "out", tmp_path / "again", dtype="float32")
    params = jaxspec.load(tmp_path / "again")
    assert list(params.drafts) == ["small"] and params.drafts["small"].config.family == "qwen3"
    assert_same_tree(
        {p: np.asarray(a) for p, a in flatten(params.drafts["small"].tree).items()}, tree_of(FIXTURES / "target_qwen3")
    )
    with pytest.raises(ConversionError, match="'small' has no export"):
        run(tmp_path / "again", tmp_path / "hf", to_hf=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_export_runs_in_transformers(name, tmp_path):
    torch = pytest.importorskip("torch", reason="compares with transformers' models, which need torch")
    from transformers import AutoModelForCausalLM

    run(FIXTURES / name, tmp_path / "hf", to_hf=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    io = np.load(FIXTURES / name / "io.npz")
    with torch.no_grad():
        logits = model(torch.tensor(io["a.input_ids"][None]).long()).logits[0].numpy()
    np.testing.assert_allclose(logits, io["a.logits"], atol=1e-4, rtol=1e-4)


VARIANTS = {
    "llama_biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama_linear": ("Llama", dict(rope_scaling={"rope_type": "linear", "factor": 4.0})),
    "mistral_full": ("Mistral", dict(sliding_window=None)),
    "qwen2_sliding": ("Qwen2", dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    "qwen3_yarn": (
        "Qwen3",
        dict(
            head_dim=16,
            attention_bias=True,
            max_position_embeddings=512,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ),
    "qwen3_moe_sparse_step": (
        "Qwen3Moe",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=2, norm_topk_prob=False),
    ),
    "phi3_sliding": ("Phi3", dict(sliding_window=4, pad_token_id=0)),
    "gemma2_defaults": ("Gemma2", dict(head_dim=16, sliding_window=4, query_pre_attn_scalar=20)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_that_no_golden_target_has(name, tmp_path):
    """Random models made and run by transformers: options of a family beyond those of the golden targets."""
    torch = pytest.importorskip("torch", reason="compares with transformers' models, which need torch")
    import transformers

    family, options = VARIANTS[name]
    sizes = dict(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    config = getattr(transformers, f"{family}Config")(**(sizes | options))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the standard initialisation is too small to tell options apart
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "hf")
    tokens = np.random.default_rng(0).integers(0, 50, 40)
    with torch.no_grad():
        expected = model(torch.tensor(tokens[None])).logits[0].numpy()
    run(tmp_path / "hf", tmp_path / "converted")
    run(tmp_path / "converted", tmp_path / "again", to_hf=True)
    got = jaxspec.forward(jaxspec.load(tmp_path / "converted"), tokens).logits
    np.testing.assert_allclose(got, expected, atol=2e-4, rtol=1e-4)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        np.testing.assert_allclose(again(torch.tensor(tokens[None])).logits[0].numpy(), expected, atol=2e-4, rtol=1e-4)


def test_draft_heads_are_not_models(tmp_path, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class HeadConfig:
        width: int
        algorithm: ClassVar[str] = "HEAD"

        def to_json(self):
            return dataclasses.asdict(self)

        @classmethod
        def from_json(cls, data):
            return cls(**data)

    head = kinds.Format("head", HeadConfig, lambda c: {"scale": (c.width,)})
    monkeypatch.setitem(kinds.KINDS, "HEAD", kinds.Kind("HEAD", "nowhere:build", format=head))
    (tmp_path / "params").mkdir()
    store.write_config(tmp_path, HeadConfig(3), {}, store.save([("scale", np.ones(3, np.float32))], tmp_path / "params"))
    draft = jaxspec.load_draft(tmp_path)
    assert draft.config == HeadConfig(3) and draft.tree["scale"].shape == (3,)
    with pytest.raises(ConfigError, match="is a draft head .HeadConfig., not a model"):
        jaxspec.load(tmp_path)
