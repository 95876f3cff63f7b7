"""What an export's ``config.json`` says, against the published file that it came from."""

from __future__ import annotations

import json
import warnings

import pytest

from jaxspec.conversion import convert
from tests.conversion.test_eagle_conversion import target_of
from tests.drafters.dflash_cases import FIXTURES

# Training's and housekeeping's own, and names of what a loader takes from elsewhere.
NOT_KEPT = {
    "attention_dropout",
    "embd_pdrop",
    "resid_pdrop",
    "initializer_range",
    "use_cache",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "pretraining_tp",
    "ep_size",
    "max_window_layers",
    "num_anchors",
    "step_loss_decay",
    "ttt_length",
    "output_router_logits",
    "router_aux_loss_coef",
    "sliding_window_pattern",
    "auto_map",
    "speculators_config",
    "use_mrope",
}
# Of the target, which a head's own file need not repeat.
OF_THE_TARGET = {"bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "architectures"}
# Said in other words: the window of layers that do not slide, ropes in transformers 5's spelling, a nested block size, defaults
# that the layout's own loader has.
IN_OTHER_WORDS = {
    "draft_dflash2": {"sliding_window", "use_sliding_window", "is_causal"},
    "e2e_dflash2": {"is_causal"},
    "draft_dflash_sliding": {"dflash_config.block_size"},
    "draft_eagle31_speculators": {"rope_parameters.rope_theta", "rope_parameters.rope_type", "target_hidden_size"},
    "draft_eagle3_speculators": {"target_hidden_size"},
    "draft_eagle3_speculators_normfc": {
        "rope_parameters.rope_theta",
        "rope_parameters.rope_type",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "target_hidden_size",
    },
    "draft_eagle3_deepspec": {"layer_types", "sliding_window", "use_sliding_window", "num_target_layers"},
    "mtp_mimo": {"attention_bias", "sliding_window"},
    "target_qwen2": {"sliding_window"},
}
CASES = sorted(f.name for f in FIXTURES.iterdir() if (f / "config.json").is_file() and f.name != "mtp_qwen3_next")


def flat(keys: dict, before: str = "") -> dict:
    """Nested keys joined by points."""
    found = {}
    for key, value in keys.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return found


def relevant(path: str, ignored: set[str]) -> bool:
    return (
        not any(part in ignored for part in path.split(".")) and path.removeprefix("transformer_layer_config.") not in ignored
    )


@pytest.mark.parametrize("name", CASES)
def test_an_export_says_what_its_source_said(name, tmp_path):
    source = FIXTURES / name
    is_draft = not name.startswith(("target", "mtp"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted = convert(source, tmp_path / "a", target=target_of(name) if is_draft else None, progress=False)
        exported = convert(converted, tmp_path / "b", to_hf=True, progress=False)
    said, says = (flat(json.loads((folder / "config.json").read_text())) for folder in (source, exported))
    ignored = NOT_KEPT | IN_OTHER_WORDS.get(name, set()) | (OF_THE_TARGET if is_draft else set())
    said = {path: value for path, value in said.items() if relevant(path, ignored)}
    assert {path: says.get(path, "nothing") for path in said} == said
    assert all(value not in ([""], "") for value in says.values())


def test_a_draft_whose_target_is_unknown_says_so(tmp_path):
    converted = convert(FIXTURES / "e2e_dflash", tmp_path / "a", target=target_of("e2e_dflash"), progress=False)
    path = converted / "config.json"
    record = json.loads(path.read_text())
    assert record["config"].pop("num_target_layers") == 8
    path.write_text(json.dumps(record))  # as a version of jaxspec before that key has written it
    with pytest.warns(UserWarning, match="lack num_target_layers, without which SGLang refuses the draft"):
        convert(converted, tmp_path / "b", to_hf=True, progress=False)
