"""UNO adapters in PEFT's format: read, written back and read again, alone and in their target's folder; refusals."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ConfigError, DraftParams, generate, load, load_draft
from jaxspec.conversion import ConversionError, convert
from jaxspec.conversion.export import write_safetensors
from jaxspec.conversion.pipeline import target_config
from jaxspec.drafters.uno.config import MODULES, UnoConfig
from jaxspec.files.folders import open_tensors

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
ADAPTER, TARGET = FIXTURES / "draft_uno_qwen3", FIXTURES / "target_qwen3"


def same(a: DraftParams, b: DraftParams) -> None:
    assert a.config == b.config
    assert jax.tree.structure(a.tree) == jax.tree.structure(b.tree)
    jax.tree.map(np.testing.assert_array_equal, a.tree, b.tree)


def same_tensors(a: Path, b: Path) -> None:
    stored, written = open_tensors(a), open_tensors(b)
    assert set(written.info) == set(stored.info)
    for name in stored.info:
        assert written.info[name][:2] == stored.info[name][:2]
        np.testing.assert_array_equal(written.read(name), stored.read(name))


def edited(folder: Path, *, config=None, change=None, source=ADAPTER) -> Path:
    """A copy of an adapter with another configuration or other tensors."""
    folder.mkdir(parents=True)
    raw = json.loads((source / "adapter_config.json").read_text()) | (config or {})
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    stored = open_tensors(source)
    tensors = {name: np.array(stored.read(name)) for name in stored.info}
    tensors = tensors if change is None else change(tensors)
    entries = [(n, t.dtype, t.shape) for n, t in tensors.items()]
    write_safetensors(folder / "adapter_model.safetensors", entries, iter(tensors.items()))
    return folder


def test_an_adapter_goes_both_ways(tmp_path):
    target = target_config(TARGET)
    adapter = load_draft(ADAPTER, target, algorithm="uno", dtype=jnp.float32)
    assert adapter.config.algorithm == "UNO"
    assert (adapter.config.rank, adapter.config.scale, adapter.config.modules) == (4, 16.0, MODULES)
    assert UnoConfig.from_json(json.loads(json.dumps(adapter.config.to_json()))) == adapter.config

    converted = convert(ADAPTER, tmp_path / "converted", target=TARGET, progress=False)
    same(load_draft(converted, dtype=jnp.float32), adapter)
    published = convert(converted, tmp_path / "published", to_hf=True, progress=False)
    assert {f.name for f in published.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    same(load_draft(published, target, dtype=jnp.float32), adapter)
    same_tensors(ADAPTER, published)
    stored, written = (json.loads((f / "adapter_config.json").read_text()) for f in (ADAPTER, published))
    assert all(stored[key] == value for key, value in written.items() if value is not None)
    assert set(written) <= set(stored)  # nothing that PEFT would not know


def test_an_adapter_in_its_targets_folder_comes_with_it(tmp_path):
    folder = tmp_path / "release"
    shutil.copytree(TARGET, folder)
    shutil.copytree(ADAPTER, folder / "adapter")
    alone = load_draft(ADAPTER, target_config(TARGET), dtype=jnp.float32)
    params = load(folder, dtype=jnp.float32)
    same(params.drafts["uno"], alone)
    same(load_draft(folder, algorithm="uno", dtype=jnp.float32), alone)
    result = generate(params, [1, 2, 3], max_new_tokens=6, ignore_eos=True)
    assert result.stats.algorithm == "UNO"
    assert result.tokens == generate(params, [1, 2, 3], algorithm="none", max_new_tokens=6, ignore_eos=True).tokens

    converted = convert(folder, tmp_path / "converted", progress=False)
    again = load(converted, dtype=jnp.float32)
    same(again.drafts["uno"], alone)
    same(load_draft(converted, algorithm="uno", dtype=jnp.float32), alone)
    jax.tree.map(np.testing.assert_array_equal, again.tree, params.tree)
    published = convert(converted, tmp_path / "published", to_hf=True, progress=False)
    same_tensors(ADAPTER, published / "adapter")
    same_tensors(TARGET, published)
    same(load(published, dtype=jnp.float32).drafts["uno"], alone)


def test_an_adapter_under_a_folder_of_its_own_is_found(tmp_path):
    shutil.copytree(ADAPTER, tmp_path / "repo" / "adapter")
    config = target_config(TARGET)
    same(load_draft(tmp_path / "repo", config, dtype=jnp.float32), load_draft(ADAPTER, config, dtype=jnp.float32))


def only(*modules: str):
    return lambda tensors: {n: t for n, t in tensors.items() if n.split(".")[-3] in modules}


def merged(config: UnoConfig, tree: dict, path: tuple[str, str, str]) -> np.ndarray:
    pair = tree["layers"][path[0]][path[1]][path[2]]
    return np.asarray(pair["a"]) @ np.asarray(pair["b"])


def test_an_adapter_on_some_modules_changes_only_their_columns(tmp_path):
    modules = ["v_proj", "up_proj"]
    folder = edited(tmp_path / "adapter", config={"target_modules": modules, "use_rslora": True}, change=only(*modules))
    config = target_config(TARGET)
    adapter = load_draft(folder, config, dtype=jnp.float32)
    assert adapter.config.modules == tuple(modules)
    assert adapter.config.scale == 64 / 2
    whole, stored = load_draft(ADAPTER, config, dtype=jnp.float32), open_tensors(ADAPTER)
    K, D = config.num_kv_heads, config.head_dim
    qkv = merged(config, adapter.tree, ("0", "attention", "qkv")).reshape(config.hidden_size, K, -1, D)
    assert not qkv[:, :, :-1].any()
    a, b = (stored.read(f"base_model.model.model.layers.0.self_attn.v_proj.lora_{x}.weight").astype(np.float32) for x in "AB")
    np.testing.assert_allclose(qkv[:, :, -1].reshape(config.hidden_size, -1), (b @ a).T, rtol=1e-5, atol=1e-6)
    gate_up = merged(config, adapter.tree, ("0", "mlp", "gate_up"))
    assert not gate_up[:, : config.ffn_size].any()
    np.testing.assert_allclose(  # products of other shapes: a BLAS may add up in another order
        gate_up[:, config.ffn_size :],
        merged(config, whole.tree, ("0", "mlp", "gate_up"))[:, config.ffn_size :],
        rtol=1e-5,
        atol=1e-7,
    )
    assert set(adapter.tree["layers"]["0"]["attention"]) == {"qkv"}
    published = convert(folder, tmp_path / "published", to_hf=True, target=TARGET, progress=False)
    same_tensors(folder, published)
    same(load_draft(published, config, dtype=jnp.float32), adapter)


def test_fused_modules_of_phi_follow_our_layout(tmp_path):
    """One matrix B for [q | k | v], rows in Phi-3's order, must change the same heads as the kernel's."""
    config, rank, rng = target_config(FIXTURES / "target_phi3"), 3, np.random.default_rng(0)
    H, K, D, E, F = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size, config.ffn_size
    sizes = {"self_attn.qkv_proj": (E, (H + 2 * K) * D), "mlp.gate_up_proj": (E, 2 * F), "mlp.down_proj": (F, E)}
    tensors = {}
    for i in range(config.num_layers):
        for module, (inputs, outputs) in sizes.items():
            name = f"base_model.model.model.layers.{i}.{module}.lora_"
            tensors[f"{name}A.weight"] = rng.normal(size=(rank, inputs)).astype(np.float32)
            tensors[f"{name}B.weight"] = rng.normal(size=(outputs, rank)).astype(np.float32)
    settings = {"r": rank, "target_modules": [m.split(".")[1] for m in sizes]}
    folder = edited(tmp_path / "adapter", config=settings, change=lambda _: tensors)
    adapter = load_draft(folder, config, dtype=jnp.float32)
    update = tensors["base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"]
    update = update @ tensors["base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight"]
    got = merged(config, adapter.tree, ("0", "attention", "qkv")).reshape(E, K, -1, D)
    q, k, v = (x.T for x in np.split(update, (H * D, (H + K) * D)))
    np.testing.assert_allclose(got[:, :, :-2].reshape(E, -1), q, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[:, :, -2].reshape(E, -1), k, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[:, :, -1].reshape(E, -1), v, rtol=1e-4, atol=1e-5)
    same_tensors(folder, convert(folder, tmp_path / "back", to_hf=True, target=FIXTURES / "target_phi3", progress=False))


def dropped(tensors):
    return {n: t for n, t in tensors.items() if "layers.1.self_attn.k_proj.lora_B" not in n}


def with_head(tensors):
    return tensors | {"base_model.model.lm_head.lora_A.weight": np.zeros((4, 8), np.float32)}


REFUSED = {
    "dora": (dict(config={"use_dora": True}), r"use_dora=True: weight-decomposed adapters \(DoRA\) are not supported"),
    "bias": (dict(config={"bias": "lora_only"}), r"bias='lora_only': trained biases are not supported"),
    "modules to save": (dict(config={"modules_to_save": ["lm_head"]}), r"modules_to_save=\['lm_head'\]"),
    "ranks": (dict(config={"rank_pattern": {"q_proj": 8}}), r"rank_pattern=.*ranks that differ"),
    "scales": (dict(config={"alpha_pattern": {"q_proj": 8}}), r"alpha_pattern=.*scales that differ"),
    "some layers": (dict(config={"layers_to_transform": [0]}), r"layers_to_transform=\[0\]"),
    "another method": (dict(config={"peft_type": "IA3"}), r"peft_type='IA3', only LORA"),
    "no rank": (dict(config={"r": None}), r"r=None, a number is needed"),
    "another rank": (dict(config={"r": 8}), r"lora_A.weight has shape \(4, \d+\), expected \(8, \d+\)"),
    "other modules said": (dict(config={"target_modules": ["q_proj"]}), r"target_modules=\['q_proj'\], the file has"),
    "a missing tensor": (dict(change=dropped), r"missing tensor .*layers.1.self_attn.k_proj.lora_B.weight \(shape"),
    "an adapted head": (dict(change=with_head), r"extra tensor base_model.model.lm_head.lora_A.weight"),
    "no LoRA at all": (dict(change=lambda t: {"w": np.zeros(3, np.float32)}), r"holds no LoRA tensors .*found w"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what, tmp_path):
    edits, message = REFUSED[what]
    with pytest.raises(ConversionError, match=message):
        load_draft(edited(tmp_path / "adapter", **edits), target_config(TARGET))


def test_the_target_must_be_known_and_the_right_one(tmp_path):
    with pytest.raises(ConversionError, match="give the target"):
        load_draft(ADAPTER)
    with pytest.raises(ConversionError, match="layers.0.self_attn"):
        load_draft(ADAPTER, dataclasses.replace(target_config(TARGET), hidden_size=48))
    with pytest.raises(ConversionError, match="adapters for the attention of deepseek_v3 models are not supported"):
        load_draft(ADAPTER, target_config(FIXTURES / "target_deepseek_v3"))
    with pytest.raises(ConversionError, match="adapters for experts are not supported"):
        load_draft(ADAPTER, target_config(FIXTURES / "target_qwen3_moe"))
    folder = edited(
        tmp_path / "a",
        config={"target_modules": ["qkv_proj"]},
        change=lambda t: {n.replace("q_proj", "qkv_proj"): x for n, x in only("q_proj")(t).items()},
    )
    with pytest.raises(ConversionError, match="changes qkv_proj, which qwen3 models do not have"):
        load_draft(folder, target_config(TARGET))
    with pytest.raises(ConfigError, match="is a draft head"):
        convert(ADAPTER, tmp_path / "c", target=convert(ADAPTER, tmp_path / "b", target=TARGET, progress=False))
