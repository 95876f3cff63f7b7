"""config.json → ModelConfig: both spellings, defaults, refusals, and the way back."""

import json

import pytest

from jaxspec.config import RopeConfig
from jaxspec.conversion.export import model_export
from jaxspec.conversion.targets.hf_config import parse_config, read_config
from jaxspec.files.errors import ConversionError, MissingFileError
from tests.files.archives import FIXTURES

TARGETS = sorted(path.parent.name for path in FIXTURES.glob("target_*/config.json"))
EXPORTED = [name for name in TARGETS if "deepseek" not in name]


def raw_config(name, file="config.json"):
    return json.loads((FIXTURES / name / file).read_text())


@pytest.mark.parametrize("name", TARGETS)
def test_both_spellings_give_the_same_configuration(name):
    assert parse_config(raw_config(name)) == parse_config(raw_config(name, "config_transformers5.json"))


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_configuration_parses_to_itself(name):
    config = parse_config(raw_config(name))
    assert parse_config(json.loads(json.dumps(model_export(config).config))) == config


def changed(name, **keys):
    return {k: v for k, v in (raw_config(name) | keys).items() if v is not ...}


def test_families_in_detail():
    llama = parse_config(raw_config("target_llama"))
    assert llama.rope == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 256) and llama.stop_token_ids == (2,)
    assert parse_config(raw_config("target_llama_tied")).stop_token_ids == (2, 3)
    assert parse_config(raw_config("target_qwen2")).windows == (None,) * 8  # use_sliding_window is false
    gemma = parse_config(raw_config("target_gemma2"))
    assert gemma.windows == (5, None, 5, None) and gemma.attention_scale == 24**-0.5 and gemma.norm_plus_one
    gemma = parse_config(raw_config("target_gemma3"))
    assert gemma.windows == (5, 5, None) * 2 and gemma.rope_local.theta == 1e4 and gemma.rope.factor == 8.0
    moe = parse_config(raw_config("target_qwen3_moe"))
    assert [moe.is_moe_layer(i) for i in range(3)] == [True, False, True]


def test_windows():
    assert parse_config(changed("target_mistral", sliding_window=None)).windows == (None,) * 4
    assert parse_config(changed("target_mistral", sliding_window=...)).windows == (4096,) * 4
    sliding = parse_config(changed("target_qwen2", use_sliding_window=True, max_window_layers=5))
    assert sliding.windows == (None,) * 5 + (4,) * 3
    with pytest.raises(ConversionError, match="layer_types"):
        parse_config(changed("target_qwen2", layer_types=["linear_attention"] * 8))
    with pytest.raises(ConversionError, match="sliding_window is not set"):
        parse_config(changed("target_qwen3", layer_types=["sliding_attention"] * 8))


def test_all_files_of_a_folder_say_when_to_stop(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw_config("target_llama")))
    assert read_config(tmp_path).stop_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_config(tmp_path).stop_token_ids == (7, 9, 2)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "added_tokens_decoder": {}}')
    assert read_config(tmp_path).stop_token_ids == (7, 9, 2)  # a token that no file gives an id


IM_END = {"id": 12, "content": "<|im_end|>", "special": True}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": {"11": {"content": "x"}, "12": IM_END}}},
        {"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}, "added_tokens": {"<|im_end|>": 12}},
        {"tokenizer_config": {"eos_token": "<|im_end|>"}, "tokenizer": {"added_tokens": [IM_END]}},
        {"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": {"model": {"vocab": {"a": 0, "</s>": 12}}}},
        {"special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}, "tokenizer": {"added_tokens": [IM_END]}},
        {
            "special_tokens_map": {"eos_token": "a"},  # tokenizer_config.json is asked first
            "tokenizer_config": {"eos_token": "<|im_end|>"},
            "tokenizer": {"added_tokens": [IM_END, {"id": 3, "content": "a"}]},
        },
    ],
)
def test_the_end_token_that_only_the_tokenizer_names_stops(files, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw_config("target_llama")))
    for name, data in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    assert read_config(tmp_path).stop_token_ids == (2, 12)


def test_an_end_token_without_a_row_in_the_model_stops_nothing(tmp_path):
    raw = raw_config("target_llama")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": raw["vocab_size"]}))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert read_config(tmp_path).stop_token_ids == (2,)


def test_gemma3_with_a_vision_tower_is_its_text_model():
    text = {"model_type": "gemma3_text", "num_hidden_layers": 12, "hidden_size": 64, "intermediate_size": 128}
    config = parse_config({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert config.stop_token_ids == (1, 106) and config.architecture == "Gemma3ForCausalLM"
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.windows == ((4096,) * 5 + (None,)) * 2


def test_yarn():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = parse_config(changed("target_qwen3", rope_scaling=scaling)).rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 32768)
    assert rope.attention_factor == pytest.approx(1.1386294361119891)


ORIGINAL = {"original_max_position_embeddings": 64}
CONTEXTS = {  # ``max_position_embeddings``, scaling, the model's context
    "none": (64, None, 64),
    "linear": (64, {"rope_type": "linear", "factor": 4.0}, 256),
    "linear, the other spelling": (64, {"type": "linear", "factor": 2.5}, 160),
    "linear, already stretched": (256, {"rope_type": "linear", "factor": 4.0} | ORIGINAL, 256),
    "yarn": (64, {"rope_type": "yarn", "factor": 4.0}, 256),
    "yarn with its original context": (64, {"rope_type": "yarn", "factor": 4.0} | ORIGINAL, 256),
    "yarn, already stretched": (256, {"rope_type": "yarn", "factor": 4.0} | ORIGINAL, 256),
    "yarn, stretched to less": (128, {"type": "yarn", "factor": 4.0} | ORIGINAL, 128),
    "llama3": (256, {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | ORIGINAL, 256),
}


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("positions, scaling, context", CONTEXTS.values(), ids=CONTEXTS.keys())
def test_context_of_a_scaled_rope(positions, scaling, context, spelling):
    keys = {"rope_scaling": None, "rope_parameters": None, spelling: scaling, "max_position_embeddings": positions}
    config = parse_config(changed("target_qwen3", **keys))
    assert config.max_positions == context
    assert parse_config(json.loads(json.dumps(model_export(config).config))).max_positions == context


def test_context_of_gemma3_is_what_the_file_says():
    """Its scaling is that of the layers with full attention."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    raw = {"model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128}
    config = parse_config(raw | {"rope_scaling": scaling, "max_position_embeddings": 512})
    assert config.max_positions == 512 and config.rope.factor == 8.0
    assert parse_config(json.loads(json.dumps(model_export(config).config))).max_positions == 512


@pytest.mark.parametrize(
    "keys, message",
    [
        (dict(model_type="mamba", architectures=["MambaForCausalLM"]), "MambaForCausalLM .* is not supported; .*gemma2.*llama"),
        (dict(model_type=...), "model_type None"),
        (dict(hidden_size=...), "config.json lacks 'hidden_size'"),
        (dict(num_key_value_heads=3), "num_heads=4 is not a multiple of num_kv_heads=3"),
        (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "'dynamic' is not supported; supported: default, linear"),
        (dict(rope_scaling={"rope_type": "longrope", "long_factor": []}), "'longrope' is not supported"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "lacks 'low_freq_factor'"),
        (dict(rope_scaling={"rope_type": "default", "partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5"),
        (dict(quantization_config={"quant_method": "gptq"}), "quantised .gptq."),
    ],
)
def test_refusals(keys, message):
    with pytest.raises(ConversionError, match=message):
        parse_config(changed("target_llama", **keys))


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(MissingFileError, match="config.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConversionError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConversionError, match="expected a JSON object"):
        read_config(tmp_path)


@pytest.mark.parametrize("kind", sorted({raw_config(n)["model_type"] for n in TARGETS}))
def test_a_head_that_no_file_speaks_of_is_tied_where_transformers_ties_it(kind):
    """Most families have a head of their own unless ``tie_word_embeddings`` says otherwise; Gemma's is the embedding."""
    transformers = pytest.importorskip("transformers")
    raw = next(raw_config(n) for n in TARGETS if raw_config(n)["model_type"] == kind)
    default = transformers.AutoConfig.for_model(kind).tie_word_embeddings
    for silent in (..., None):
        keys = changed(next(n for n in TARGETS if raw_config(n) == raw), tie_word_embeddings=silent)
        assert parse_config(keys).tie_embeddings is default
    for said in (True, False):
        assert parse_config(raw | {"tie_word_embeddings": said}).tie_embeddings is said
