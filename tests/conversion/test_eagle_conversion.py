"""EAGLE heads: every layout read, written back and read again; folders that do not fit are refused with the reason."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ConfigError, generate, load_draft
from jaxspec.conversion import ConversionError, convert
from jaxspec.conversion.export import write_safetensors
from jaxspec.conversion.pipeline import target_config
from jaxspec.drafters.eagle.config import EagleConfig
from jaxspec.files.folders import open_tensors
from tests.drafters.eagle_cases import trained

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
HEADS = sorted(p.name for p in FIXTURES.glob("draft_*eagle*"))


def target_of(name: str) -> Path:
    return (FIXTURES / name / json.loads((FIXTURES / name / "case.json").read_text())["target"]).resolve()


def same(a, b) -> None:
    assert jax.tree.structure(a.tree) == jax.tree.structure(b.tree)
    for x, y in zip(jax.tree.leaves(a.tree), jax.tree.leaves(b.tree), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", HEADS)
def test_every_layout_goes_both_ways(name, tmp_path):
    source, target = FIXTURES / name, target_of(name)
    config = target_config(target)
    head = load_draft(source, config, dtype=jnp.float32)
    assert EagleConfig.from_json(json.loads(json.dumps(head.config.to_json()))) == head.config

    converted = convert(source, tmp_path / "converted", target=target, progress=False)
    again = load_draft(converted, dtype=jnp.float32)
    assert again.config == head.config
    same(again, head)

    published = convert(converted, tmp_path / "published", to_hf=True, progress=False)
    back = load_draft(published, config, dtype=jnp.float32)
    assert back.config == head.config
    same(back, head)
    stored, written = open_tensors(source), open_tensors(published)
    for tensor, info in written.info.items():
        if tensor in stored.info:
            assert info.shape == stored.info[tensor].shape
            assert info.dtype == stored.info[tensor].dtype
            np.testing.assert_array_equal(written.read(tensor), stored.read(tensor))
    assert {"d2t", "t2d"} <= set(written.info) or not head.config.reduced_vocab


def edited(name: str, folder: Path, *, config=None, rename=None, change=None, drop=()) -> Path:
    """A copy of a fixture with another configuration or other tensors."""
    shutil.copytree(FIXTURES / name, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (config or {})))
    source = open_tensors(FIXTURES / name)
    tensors = {n: np.array(source.read(n)) for n in source.info if n not in drop}
    tensors = {(rename or (lambda n: n))(n): t for n, t in tensors.items()} | (change or (lambda t: {}))(tensors)
    (folder / "pytorch_model.bin").unlink(missing_ok=True)
    entries = [(n, t.dtype, t.shape) for n, t in tensors.items()]
    write_safetensors(folder / "model.safetensors", entries, iter(tensors.items()))
    return folder


def absolute_ids(tensors):
    return {"d2t": tensors["d2t"] + np.arange(tensors["d2t"].size)}


REFUSED = {
    "the target's config.json": (
        "draft_eagle3_llama",
        dict(config={"num_hidden_layers": 8, "draft_vocab_size": None}),
        r"num_hidden_layers=8, the file holds 1 .*is this\s+config.json the target's",
    ),
    "a config.json of another width": (
        "draft_eagle3_llama",
        dict(config={"hidden_size": 64}),
        r"hidden_size=64, but fc.weight has shape \(32, 96\)",
    ),
    "a config.json with other heads": (
        "draft_eagle3_llama",
        dict(config={"num_key_value_heads": 4}),
        r"k_proj.weight has shape \(16, 64\), expected \(32, 64\)",
    ),
    "no fc": ("draft_eagle3_llama", dict(drop=("fc.weight",)), r"missing tensor fc.weight.*found .*midlayer"),
    "no fc in EAGLE-2": ("draft_eagle2_llama", dict(drop=("fc.weight",)), r"missing tensor fc.weight"),
    "absolute d2t": ("draft_eagle3_llama", dict(change=absolute_ids), r"d2t holds absolute target ids.*expected offsets"),
    "absolute d2t without t2d": (
        "draft_eagle3_llama",
        dict(change=absolute_ids, drop=("t2d",)),
        r"d2t holds absolute target ids.*expected offsets",
    ),
    "d2t beyond the vocabulary": (
        "draft_eagle3_llama",
        dict(change=lambda t: {"d2t": t["d2t"] + 100}),
        r"d2t does not fit: .*vocabulary of 128",
    ),
    "no d2t": ("draft_eagle3_llama", dict(drop=("d2t", "t2d")), r"missing tensor d2t: draft_vocab_size=48 .* vocab_size=128"),
    "a head of another vocabulary": (
        "draft_eagle3_llama",
        dict(config={"vocab_size": 256}, drop=("t2d",)),
        r"vocabulary of 256 tokens, the target has 128",
    ),
    "bias denied": ("draft_eagle2_llama", dict(config={"bias": False}), r"says bias=False, but the file has its tensors"),
    "tap norms missing": (
        "draft_eagle31_sglang",
        dict(drop=tuple(f"fc_norm.{i}.weight" for i in range(3))),
        r"says fc_norm=True, but the file lacks",
    ),
    "an unknown tensor": (
        "draft_eagle3_llama",
        dict(change=lambda t: {"midlayer.gate": t["norm.weight"]}),
        r"extra tensor midlayer.gate",
    ),
    "an EAGLE-3 layer with narrow projections": (
        "draft_eagle3_llama",
        dict(change=lambda t: {n: t[n][:, :32] for n in t if n.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))}),
        r"q_proj.weight reads 32 channels, expected 64: an EAGLE-3 head",
    ),
    "a parallel head without its mask token": ("draft_peagle", dict(config={"mask_token_id": None}), r"needs mask_token_id"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what, tmp_path):
    name, edits, message = REFUSED[what]
    folder = edited(name, tmp_path / "head", **edits)
    with pytest.raises(ConversionError, match=message):
        load_draft(folder, target_config(target_of(name)))


def test_a_head_for_another_hidden_size_is_refused():
    wide = dataclasses.replace(target_config(FIXTURES / "target_llama"), hidden_size=64)
    for name in ("draft_eagle3_llama", "draft_eagle2_llama"):
        with pytest.raises(ConversionError, match="made for a target of hidden size 32, this one has 64"):
            load_draft(FIXTURES / name, wide)


def test_a_head_is_refused_under_another_algorithm():
    target, head = trained("e2e_eagle3")
    with pytest.raises(ConfigError, match="algorithm='EAGLE', but it is a draft for EAGLE3"):
        load_draft(FIXTURES / "e2e_eagle3", target, algorithm="EAGLE")
    with pytest.raises(ConfigError, match="EAGLE3"):
        generate(target, [[1, 2]], draft=head, algorithm="EAGLE", max_new_tokens=2)
    assert load_draft(FIXTURES / "e2e_eagle2", target, algorithm="eagle").config.algorithm == "EAGLE"


def test_taps_by_default_need_the_target():
    with pytest.raises(ConversionError, match="give the target"):
        load_draft(FIXTURES / "draft_eagle3_llama")


def test_norm_output_can_be_overridden_and_the_doubtful_case_warns(tmp_path):
    config = target_config(target_of("draft_eagle3_sglang"))
    folder = edited("draft_eagle3_sglang", tmp_path / "head", config={"norm_output": True})
    with pytest.warns(UserWarning, match="SpecForge up to 0.2.0"):
        head = load_draft(folder, config)
    assert head.config.norm_output
    with pytest.warns(UserWarning):
        assert not load_draft(folder, config, norm_output=False).config.norm_output


def test_rope_base_is_not_the_targets_but_the_context_is():
    config = dataclasses.replace(target_config(target_of("draft_eagle3_llama")), max_positions=4096)
    layers = load_draft(FIXTURES / "draft_eagle3_llama", config).config.layers
    assert config.rope.theta != 10000.0
    assert layers.rope.theta == 10000.0
    assert layers.max_positions == 4096
