"""Block drafts: every layout read, written back and read again; folders that do not fit are refused with the reason."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ConfigError, generate, load_draft
from jaxspec.conversion import ConversionError, convert
from jaxspec.conversion.export import export_of, write_safetensors
from jaxspec.conversion.mapping import flatten, unbuild
from jaxspec.conversion.pipeline import target_config
from jaxspec.drafters.dflash.config import DFlashConfig, default_taps
from jaxspec.files.folders import open_tensors
from tests.conversion.test_eagle_conversion import edited, same, target_of
from tests.drafters.dflash_cases import draft_config, random_draft, recorded, target

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
DRAFTS = sorted(p.name for pattern in ("draft_d[fs]*", "draft_deepspec*", "draft_jetspec") for p in FIXTURES.glob(pattern))


@pytest.mark.parametrize("name", DRAFTS)
def test_every_fixture_goes_both_ways(name, tmp_path):
    source, config = FIXTURES / name, target_config(target_of(name))
    draft = load_draft(source, config, dtype=jnp.float32)
    assert DFlashConfig.from_json(json.loads(json.dumps(draft.config.to_json()))) == draft.config

    converted = convert(source, tmp_path / "converted", target=target_of(name), progress=False)
    again = load_draft(converted, dtype=jnp.float32)
    assert again.config == draft.config
    same(again, draft)

    published = convert(converted, tmp_path / "published", to_hf=True, progress=False)
    back = load_draft(published, config, dtype=jnp.float32)
    assert back.config == draft.config
    same(back, draft)
    stored, written = open_tensors(source), open_tensors(published)
    assert set(written.info) == set(stored.info)
    for tensor, info in written.info.items():
        assert info[:2] == stored.info[tensor][:2]
        np.testing.assert_array_equal(written.read(tensor), stored.read(tensor))


def publish(config: DFlashConfig, tree: dict, folder: Path, **keys) -> Path:
    """Writes a draft as its layout has it."""
    export = export_of(config)
    tensors = list(unbuild(export.rules, {path: np.asarray(leaf) for path, leaf in flatten(tree).items()}))
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", [(n, t.dtype, t.shape) for n, t in tensors], iter(tensors))
    (folder / "config.json").write_text(json.dumps(export.config | keys))
    return folder


LAYOUTS = {
    "speculators": ("speculators", {}),
    "speculators, symmetric": ("symmetric", {"layout": "speculators"}),
    "transformers, symmetric by default": ("symmetric", {"layout": "transformers"}),
    "transformers, causal": ("sliding", {"layout": "transformers", "causal": (True, True)}),
    "speculators, DSpark": ("dspark", {"layout": "speculators"}),
    "z-lab, sliding": ("sliding", {}),
    "z-lab, own width": ("deepspec", {"anchor_predicts": True}),
}


@pytest.mark.parametrize("what", LAYOUTS)
def test_layouts_without_a_fixture_come_back(what, tmp_path):
    variant, changes = LAYOUTS[what]
    draft = random_draft(variant)
    config = dataclasses.replace(draft.config, **changes)
    folder = publish(config, draft.tree, tmp_path / "draft")
    back = load_draft(folder, target().config, dtype=jnp.float32)
    assert back.config == config
    same(back, draft)
    names = set(open_tensors(folder).info)
    assert ("encoder.fc.weight" in names) == ("encoder.output_norm_enc.weight" in names) == (config.layout == "transformers")
    assert ({"d2t", "t2d"} <= names) == config.reduced_vocab


def test_speculators_counts_taps_by_index_and_others_by_output(tmp_path):
    config = random_draft("speculators").config
    written = json.loads((publish(config, random_draft("speculators").tree, tmp_path / "a") / "config.json").read_text())
    assert written["aux_hidden_state_layer_ids"] == list(config.taps)
    config = draft_config(target().config, taps=(1, 1))
    written = json.loads((publish(config, random_draft("causal head").tree, tmp_path / "b") / "config.json").read_text())
    assert written["dflash_config"]["target_layer_ids"] == [0, 0]


def test_older_names_are_read(tmp_path):
    """SpecForge once nested DSpark's heads, some files put ``model.`` in front, and keys have had other names."""
    draft = random_draft("dspark gated")
    folder = publish(draft.config, draft.tree, tmp_path / "draft")
    source = open_tensors(folder)

    def old(name: str) -> str:
        if name.startswith(("markov_head", "confidence_head")):
            return f"logit_head.{name}"
        return name if name == "lm_head.weight" else f"model.{name}"

    tensors = {old(n): np.array(source.read(n)) for n in source.info} | {"rotary_emb.inv_freq": np.ones(4, np.float32)}
    write_safetensors(folder / "model.safetensors", [(n, t.dtype, t.shape) for n, t in tensors.items()], iter(tensors.items()))
    raw = json.loads((folder / "config.json").read_text())
    nested = raw.pop("dflash_config")
    nested["dspark_noise_token_id"] = nested.pop("mask_token_id")
    (folder / "config.json").write_text(json.dumps(raw | {"dspark_config": nested}))
    back = load_draft(folder, target().config, dtype=jnp.float32)
    assert back.config == draft.config
    same(back, draft)


@pytest.mark.parametrize("layers, taps", [(28, (1, 7, 13, 19, 25)), (32, (1, 8, 15, 22, 29)), (36, (1, 9, 17, 25, 33))])
def test_default_taps_are_those_of_the_published_drafts(layers, taps):
    """Ids of the layers whose outputs are taken; the hidden state behind layer i is i + 1."""
    assert default_taps(layers, 5) == tuple(i + 1 for i in taps)
    assert default_taps(layers, 1) == (layers // 2 + 1,)


def test_defaults_of_what_a_file_leaves_out(tmp_path):
    name = "draft_dflash"
    bare = {"block_size": None, "dflash_config": {"mask_token_id": 3}}
    folder = edited(name, tmp_path / "a", config=bare)
    config = load_draft(folder, target_config(target_of(name))).config
    assert (config.block_size, config.taps, config.anchor_predicts) == (16, (2, 6), False)
    folder = edited("draft_dspark", tmp_path / "b", config={"block_size": None})
    assert load_draft(folder, target_config(target_of("draft_dspark"))).config.block_size == 7


def sixteen(tensors):
    return {"lm_head.weight": tensors["lm_head.weight"][:16]}


REFUSED = {
    "a mask id beyond the vocabulary": (
        "draft_dflash",
        dict(config={"dflash_config": {"mask_token_id": 128, "target_layer_ids": [1, 5]}}),
        r"mask_token_id=128 must lie in the vocabulary of 128",
    ),
    "no mask id": ("draft_dflash", dict(config={"dflash_config": {"target_layer_ids": [1, 5]}}), "names no mask token"),
    "taps counted the other way and beyond": (
        "draft_dflash",
        dict(config={"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 8]}}),
        r"hidden states \(2, 9\), but the target has 8 layers: \[9\]",
    ),
    "another number of taps": (
        "draft_dflash",
        dict(config={"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 3, 5]}}),
        r"fc.weight reads 64 channels, expected 3 taps × 32",
    ),
    "a target of another depth": (
        "draft_dflash",
        dict(config={"num_target_layers": 36}),
        "target of 36 layers, this one has 8",
    ),
    "the target's config.json": (
        "draft_dflash",
        dict(config={"num_hidden_layers": 8}),
        r"num_hidden_layers=8, the file holds 2",
    ),
    "another width": ("draft_dflash", dict(config={"hidden_size": 64}), r"hidden_size=64, but fc.weight has shape \(32, 64\)"),
    "no fc": ("draft_dflash", dict(drop=("fc.weight",)), "missing tensor fc.weight"),
    "an unknown tensor": (
        "draft_dflash",
        dict(change=lambda t: {"prefix_gru.weight_ih_l0": t["norm.weight"]}),
        "extra tensor prefix_gru",
    ),
    "Domino": ("draft_dflash", dict(config={"projector_type": "domino"}), "Domino and LiLiCorr drafts are not supported"),
    "a missing layer norm": (
        "draft_dflash",
        dict(drop=("layers.1.input_layernorm.weight",)),
        r"missing tensor layers.1.input_layernorm.weight \(shape \(32,\)\)",
    ),
    "another vocabulary": ("draft_dflash", dict(config={"vocab_size": 256}), "vocabulary of 256 tokens, the target has 128"),
    "DSpark's rank denied": (
        "draft_dspark",
        dict(config={"markov_rank": 0}),
        "says markov_rank=0, but the file has its tensors",
    ),
    "DSpark's rank without tensors": (
        "draft_deepspec_dflash",
        dict(config={"markov_rank": 6}),
        "but the file lacks its tensors",
    ),
    "another Markov head": ("draft_dspark_rnn", dict(config={"markov_head_type": "gated"}), "are those of a rnn head"),
    "confidence without Markov features": (
        "draft_dspark",
        dict(config={"confidence_head_with_markov": False}),
        "says confidence_head_with_markov=False",
    ),
    "a confidence head of odd width": (
        "draft_dspark",
        dict(change=lambda t: {"confidence_head.proj.weight": t["confidence_head.proj.weight"][:, :35]}),
        "reads 35 channels, expected 32",
    ),
    "a cut head": ("draft_dspark", dict(change=sixteen), "missing tensor d2t: draft_vocab_size=16"),
    "another group of a convolution": (
        "draft_dflash2",
        dict(config={"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 5], "conv_group_size": 16}}),
        "says conv_group_size=16, the tensors say 8",
    ),
    "no selector": (
        "draft_dflash2",
        dict(drop=("candidate_selector.hidden_projection.weight",)),
        "says selector_rank=6, but the file lacks",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what, tmp_path):
    name, edits, message = REFUSED[what]
    folder = edited(name, tmp_path / "draft", **edits)
    with pytest.raises(ConversionError, match=message):
        load_draft(folder, target_config(target_of(name)))


def test_the_two_formats_called_dflash_are_told_apart():
    """DeepSpec's drafts predict from the anchor and store their head; z-lab's do neither."""
    for name, anchor, drafts in (("draft_dflash", False, 5), ("draft_deepspec_dflash", True, 5)):
        config = load_draft(FIXTURES / name, target_config(target_of(name))).config
        assert (config.algorithm, config.anchor_predicts, config.own_head, config.num_drafts) == (
            "DFLASH",
            anchor,
            anchor,
            drafts,
        )
    assert load_draft(FIXTURES / "draft_dspark", target_config(target_of(name))).config.algorithm == "DSPARK"


def test_a_draft_is_refused_under_another_algorithm():
    model, draft = recorded("e2e_dflash")
    with pytest.raises(ConfigError, match="algorithm='DSPARK', but it is a draft for DFLASH"):
        load_draft(FIXTURES / "e2e_dflash", model, algorithm="DSPARK")
    with pytest.raises(ConfigError, match="DFLASH"):
        generate(model, [[1, 2]], draft=draft, algorithm="DSPARK", max_new_tokens=2)


def test_a_target_of_another_width_is_refused():
    wide = dataclasses.replace(target_config(FIXTURES / "target_qwen3"), hidden_size=64)
    with pytest.raises(ConversionError, match="2 taps × 64"):
        load_draft(FIXTURES / "draft_dflash", wide)
