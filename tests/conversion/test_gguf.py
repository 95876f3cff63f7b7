"""GGUF files of every architecture, against the Hugging Face folders that they were made from."""

import dataclasses

import gguf
import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.config import RopeConfig
from jaxspec.conversion import ConversionError, MissingFileError, convert
from jaxspec.conversion.mapping import flatten
from jaxspec.conversion.targets.gguf import read
from jaxspec.files.gguf_reader import GGUFReader
from jaxspec.models.layers import rope_frequencies
from tests.conversion.gguf_files import write_gguf
from tests.files.archives import FIXTURES


def tree_of(source):
    return {p: np.asarray(a) for p, a in flatten(jaxspec.load(source).tree).items()}


@pytest.mark.parametrize(
    "case, metadata, unknown",
    [
        # What a GGUF file of this architecture cannot say is taken from the folder.
        ("target_llama_smallvocab", {}, {}),
        ("target_qwen2", {}, {}),
        ("target_qwen3", {}, {}),
        ("target_qwen3_moe", {}, {}),
        ("target_phi3", {}, {}),
        ("target_gemma2", {}, {"attention_scale": 24**-0.5}),
        ("target_gemma3", {"ARCH.attention.sliding_window_pattern": 3}, {}),
    ],
)
def test_same_model_as_the_hugging_face_folder(case, metadata, unknown, tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf(case, file, metadata=metadata)
    original, params = jaxspec.load(FIXTURES / case), jaxspec.load(file)
    assert dataclasses.replace(params.config, **unknown) == original.config
    theirs, ours = tree_of(FIXTURES / case), tree_of(file)
    assert theirs.keys() == ours.keys()
    for path in theirs:  # Gemma's norms went through + 1 and - 1 in float32
        np.testing.assert_allclose(ours[path], theirs[path], atol=2e-7 if "gemma" in case else 0, rtol=0, err_msg=path)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_quantised_tensors(kind, tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf("target_llama_smallvocab", file, quantization=kind)
    reader = GGUFReader(file)
    exact = tmp_path / "exact.gguf"
    write_gguf("target_llama_smallvocab", exact)
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        original = GGUFReader(exact).read(name)
        quantised = gguf.GGMLQuantizationType[kind]
        expected = gguf.quants.dequantize(gguf.quants.quantize(original, quantised), quantised)
        assert reader.quantization(name) == kind
        assert np.array_equal(reader.read(name), expected)
        # Stored as bfloat16, these weights are exact in F16 and BF16; the others round to a step of the block's range.
        step = {"Q8_0": 127, "Q5_1": 31, "Q5_0": 15, "Q4_1": 15, "Q4_0": 7}.get(kind)
        bound = np.abs(original).max() / step if step else 0
        assert np.abs(expected - original).max() <= 1.01 * bound
    assert reader.info[name].dtype == np.float32


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants(kind, tmp_path):
    """Blocks of 256 with random bits: the values are the gguf package's."""
    quantised = gguf.GGMLQuantizationType[kind]
    block, width = gguf.GGML_QUANT_SIZES[quantised]
    raw = np.random.default_rng(0).integers(0, 60, (3, 2 * width), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = GGUFReader(tmp_path / "k.gguf")
    assert reader.info["x"].shape == (3, 2 * block)
    assert np.array_equal(reader.read("x"), gguf.quants.dequantize(raw, quantised))


def test_metadata_agrees_with_the_package(tmp_path):
    values = {"a.int": 7, "a.text": "größe", "a.list": ["x", "ÿ", ""], "a.numbers": [1.5, 2.5], "a.flag": True}
    write_gguf("target_llama_smallvocab", tmp_path / "m.gguf", metadata=values)
    ours = GGUFReader(tmp_path / "m.gguf").metadata
    theirs = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert values.items() <= ours.items()
    assert ours == {k: f.contents() for k, f in theirs.items() if not k.startswith("GGUF.")}


def test_stop_ids_are_those_of_text_turn_and_message(tmp_path):
    ids = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    write_gguf("target_llama_smallvocab", tmp_path / "m.gguf", metadata=ids)
    assert read(tmp_path / "m.gguf")[1].stop_token_ids == (2, 5)


@pytest.mark.parametrize(
    "tokens, kinds, keys, expected",
    [
        (["<|endoftext|>", "a", "b", "<|im_end|>"], [3, 1, 1, 3], {"eos": 3}, (3, 0)),  # Qwen's pair
        (["a", "<|im_end|>", "b", "<|endoftext|>"], [1, 3, 1, 3], {"eos": 3, "unknown": 1}, (3,)),
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [3, 3, 3], {"eos": 2, "bos": 1, "unknown": 0}, (2,)),  # SmolLM2
        (["a", "<end_of_turn>", "<eos>"], [1, 4, 3], {"eos": 2}, (2, 1)),
        (["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], [3, 3, 3], {"eos": 0, "eot": 0}, (0, 1, 2)),
        (["<|end|>", "<|endoftext|>", "c"], [1, 1, 1], {"eos": 2}, (2,)),  # words, no control tokens
    ],
)
def test_end_tokens_are_known_by_name(tokens, kinds, keys, expected, tmp_path):
    meta = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    meta |= {f"tokenizer.ggml.{name}_token_id": index for name, index in keys.items()}
    write_gguf("target_llama_smallvocab", tmp_path / "m.gguf", metadata=meta)
    assert read(tmp_path / "m.gguf")[1].stop_token_ids == expected


def test_llama3_scaling_is_recognised_from_its_divisors(tmp_path):
    plain, scaled = RopeConfig(500000.0), RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    divisors = np.asarray(rope_frequencies(plain, 8) / rope_frequencies(scaled, 8))
    write_gguf("target_llama", tmp_path / "m.gguf", tensors={"rope_freqs.weight": divisors})
    params = jaxspec.load(tmp_path / "m.gguf")  # strict: the tensor is accounted for
    assert params.config.rope == scaled
    write_gguf("target_llama", tmp_path / "n.gguf", tensors={"rope_freqs.weight": divisors[::-1].copy()})
    with pytest.raises(ConversionError, match="is not a llama3 rope scaling"):
        jaxspec.load(tmp_path / "n.gguf")


def test_yarn_and_linear_scaling(tmp_path):
    keys = {"ARCH.rope.scaling.type": "yarn", "ARCH.rope.scaling.factor": 4.0}
    original = {"ARCH.rope.scaling.original_context_length": 64}
    write_gguf("target_qwen2", tmp_path / "m.gguf", metadata=keys | original)
    rope = read(tmp_path / "m.gguf")[1].rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 64) and rope.attention_factor > 1.1
    assert read(tmp_path / "m.gguf")[1].max_positions == 512
    linear = {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 4.0}
    write_gguf("target_qwen2", tmp_path / "l.gguf", metadata=linear)
    config = read(tmp_path / "l.gguf")[1]
    assert (config.rope.kind, config.max_positions) == ("linear", 4 * 512)
    write_gguf("target_qwen2", tmp_path / "n.gguf", metadata=keys)
    with pytest.raises(ConversionError, match="qwen2.rope.scaling.original_context_length is missing"):
        read(tmp_path / "n.gguf")


def test_convert_stores_float32_unless_asked(tmp_path):
    file = tmp_path / "m.gguf"
    write_gguf("target_llama_smallvocab", file, quantization="Q8_0")
    convert(file, tmp_path / "out", progress=False)
    convert(file, tmp_path / "half", dtype="bfloat16", progress=False)
    first, second = tree_of(file), tree_of(tmp_path / "out")
    assert all(np.array_equal(first[p], second[p]) for p in first)
    half = jaxspec.load(tmp_path / "half", dtype="bfloat16")
    assert {str(x.dtype) for x in jax.tree.leaves(half.tree)} == {"bfloat16"}


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(drop=["blk.1.ffn_up.weight"]), r"missing tensor blk.1.ffn_up.weight \(shape \(48, 32\)\)"),
        (dict(tensors={"blk.0.more": np.ones((2, 32), np.float32)}), "extra tensor blk.0.more"),
        (dict(tensors={"output_norm.weight": np.ones(31, np.float32)}), r"output_norm.weight has shape \(31,\), expected"),
        (dict(drop=["token_embd.weight"]), "token_embd.weight is missing"),
        (dict(metadata={"ARCH.expert_count": 4}), "Mixtral"),
        (dict(metadata={"split.count": 3}), "one part of a split GGUF"),
        (dict(metadata={"ARCH.rope.scaling.type": "longrope", "ARCH.rope.scaling.factor": 4.0}), "'longrope' is not supported"),
        (dict(tensors={"rope_factors_long.weight": np.ones(4, np.float32)}), "longrope scaling is not supported"),
        (dict(metadata={"ARCH.rope.dimension_count": 4}), "rope over 4 of 8 channels"),
        (dict(metadata={"ARCH.attention.head_count_kv": [2, 2, 2, 2, 2, 2, 2, 1]}), "differs between layers"),
    ],
)
def test_strictness(options, message, tmp_path):
    write_gguf("target_llama_smallvocab", tmp_path / "m.gguf", **options)
    with pytest.raises(ConversionError, match=message):
        jaxspec.load(tmp_path / "m.gguf")


def test_unknown_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConversionError, match="architecture 'rwkv7' is not supported; supported: gemma2, gemma3, llama"):
        jaxspec.load(tmp_path / "m.gguf")


def test_damaged_files(tmp_path):
    file = tmp_path / "m.gguf"
    write_gguf("target_llama_smallvocab", file)
    data = file.read_bytes()
    for cut, message in ((len(data) - 100, "ends inside tensor .*truncated"), (200, "ends inside its header .*truncated")):
        file.write_bytes(data[:cut])
        with pytest.raises(ConversionError, match=message):
            jaxspec.load(file)
    file.write_bytes(data[:4] + b"\x09" + data[5:])
    with pytest.raises(ConversionError, match="GGUF version 9"):
        jaxspec.load(file)
    file.write_bytes(b"GGML" + data[4:])
    with pytest.raises(ConversionError, match="is none of"):
        jaxspec.load(file)
    with pytest.raises(MissingFileError, match="does not exist"):
        jaxspec.load(tmp_path / "other.gguf")
