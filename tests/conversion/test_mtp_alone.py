"""MTP layers in a folder of their own: both ways for every family and for a trained layer, what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import load, load_draft
from jaxspec.config import ConfigError
from jaxspec.conversion import ConversionError, convert, store
from jaxspec.conversion.drafts import mtp_alone
from jaxspec.conversion.export import write_safetensors
from jaxspec.conversion.mapping import flatten
from jaxspec.conversion.pipeline import write_converted
from jaxspec.conversion.sources import Checkpoint, open_checkpoint
from jaxspec.drafters.mtp.config import mtp_config
from jaxspec.files.folders import open_tensors
from jaxspec.training import mtp as training
from tests import tiny

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
OTHER_SIZES = {"mtp_qwen3_next": "target_mistral"}  # a target of this width and vocabulary: its own is refused


def converted_alone(case: str, folder: Path) -> Path:
    """The MTP layers of a case as a converted folder without their target."""
    if case == "mtp_qwen3_next":
        return convert(FIXTURES / case, folder, target=FIXTURES / OTHER_SIZES[case], progress=False)
    whole = open_checkpoint(FIXTURES / case)
    folder.mkdir()
    write_converted(Checkpoint(whole.source, "MTP draft", whole.drafts["mtp"], whole.tensors), folder, None, False, case)
    return folder


def own_names(case: str, names) -> dict[str, str]:
    """Names of a case's MTP tensors → what they are called in a folder of their own."""
    if case == "mtp_deepseek_v3":
        return {
            n: n.replace("layers.3.", "layers.0.")
            for n in names
            if ".layers.3." in n and "shared_head.head" not in n and "embed_tokens" not in n
        }
    return {n: n for n in names if n.startswith(("mtp.", "model.mtp_layers."))}


@pytest.mark.parametrize("case", ["mtp_qwen3_next", "mtp_mimo", "mtp_deepseek_v3"])
def test_there_and_back_gives_the_same_tensors(case, tmp_path):
    ours = converted_alone(case, tmp_path / "ours")
    theirs = convert(ours, tmp_path / "theirs", to_hf=True, progress=False)
    first, second = open_tensors(FIXTURES / case), open_tensors(theirs)
    names = own_names(case, first.info)
    assert sorted(names.values()) == sorted(second.info)
    for before, after in names.items():
        np.testing.assert_array_equal(first.read(before), second.read(after))
        assert first.info[before].dtype == second.info[after].dtype
    checkpoint = open_checkpoint(theirs)
    checkpoint.check()
    assert checkpoint.format == "MTP draft" and checkpoint.config == open_checkpoint(ours).config
    again = convert(convert(theirs, tmp_path / "again", progress=False), tmp_path / "last", to_hf=True, progress=False)
    assert (again / "config.json").read_text() == (theirs / "config.json").read_text()
    assert (again / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    keys = json.loads((theirs / "config.json").read_text())
    assert keys["num_nextn_predict_layers"] == keys["num_hidden_layers"] == 1
    original = json.loads((FIXTURES / case / "config.json").read_text())
    for key in {"partial_rotary_factor", "num_experts", "kv_lora_rank", "n_routed_experts"} & set(original):
        assert keys[key] == original[key]
    assert keys["model_type"] == original["model_type"]


def test_transformers_reads_the_configuration(tmp_path):
    transformers = pytest.importorskip("transformers")
    for case in ("mtp_qwen3_next", "mtp_deepseek_v3"):
        theirs = convert(converted_alone(case, tmp_path / case), tmp_path / f"{case} hf", to_hf=True, progress=False)
        config = transformers.AutoConfig.from_pretrained(theirs)
        assert config.num_hidden_layers == 1 and config.hidden_size == 32
    assert transformers.AutoConfig.from_pretrained(tmp_path / "mtp_qwen3_next hf").layer_types == ["full_attention"]


def test_a_trained_layer_is_a_mimo_layer(tmp_path):
    """A layer for a plain Llama target, written for other engines, comes back as it was."""
    target = tiny.target()
    objective = training.build(target.config)
    tree, _ = objective.init(jax.random.key(0), target.tree, jnp.arange(tiny.VOCAB))
    folder = tmp_path / "trained"
    folder.mkdir()
    shards = store.save(((path, np.asarray(x)) for path, x in flatten(tree).items()), folder / "params")
    store.write_config(folder, objective.config, {}, shards)
    theirs = convert(folder, tmp_path / "theirs", to_hf=True, progress=False)
    assert "model.mtp_layers.0.self_attn.q_proj.bias" in open_tensors(theirs).info
    assert json.loads((theirs / "config.json").read_text())["architectures"] == ["MiMoForCausalLM"]
    draft = load_draft(theirs, target)
    assert draft.config == objective.config
    jax.tree.map(np.testing.assert_array_equal, draft.tree, load_draft(folder).tree)


def test_several_mimo_layers_stay_together(tmp_path):
    stored = open_tensors(FIXTURES / "mtp_mimo")
    names = own_names("mtp_mimo", stored.info)
    tensors = {n.replace("layers.0", f"layers.{i}"): np.array(stored.read(n)) for i in range(2) for n in names}
    folder = tmp_path / "two"
    folder.mkdir()
    shutil.copy(FIXTURES / "mtp_mimo" / "config.json", folder)
    write_safetensors(folder / "model.safetensors", [(n, a.dtype, a.shape) for n, a in tensors.items()], iter(tensors.items()))
    assert open_checkpoint(folder).config.num_layers == 2
    theirs = convert(folder, tmp_path / "theirs", to_hf=True, progress=False)
    assert set(open_tensors(theirs).info) == set(tensors)
    assert open_checkpoint(theirs).config == open_checkpoint(folder).config


def test_copies_of_embedding_and_head_are_left_out(tmp_path):
    """Published folders for DeepSeek hold them; without the target nothing can be said of them."""
    theirs = convert(converted_alone("mtp_deepseek_v3", tmp_path / "a"), tmp_path / "b", to_hf=True, progress=False)
    stored = open_tensors(theirs)
    tensors = {n: np.array(stored.read(n)) for n in stored.info}
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"model.layers.0.{name}.weight"] = np.zeros((112, 32), np.float32)
    write_safetensors(theirs / "model.safetensors", [(n, a.dtype, a.shape) for n, a in tensors.items()], iter(tensors.items()))
    checkpoint = open_checkpoint(theirs)
    checkpoint.check()
    assert len(checkpoint.ignored) == 1


def test_what_does_not_fit_is_refused(tmp_path):
    theirs = convert(converted_alone("mtp_mimo", tmp_path / "a"), tmp_path / "b", to_hf=True, progress=False)
    with pytest.raises(ConversionError, match="belongs to another model: vocab_size is"):
        load_draft(theirs, tiny.config())
    with pytest.raises(ConfigError, match="is a draft head .MtpConfig., not a model"):
        load(theirs)
    deepseek = open_checkpoint(FIXTURES / "mtp_deepseek_v3").drafts["mtp"].config
    several = dataclasses.replace(deepseek, layers=dataclasses.replace(deepseek.layers, num_layers=2, windows=()))
    with pytest.raises(ConversionError, match="holds one of them, here are 2"):
        mtp_alone.export_alone(several, {})
    with pytest.raises(ConversionError, match="biases on q, k and v only"):
        mtp_alone.export_alone(mtp_config(tiny.config(), "mimo", 1), {})
