"""Eight-bit storage: error bounds, what stays floating, and every reader of a converted folder."""

import json
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxspec
from jaxspec.conversion import ConversionError, convert, store
from jaxspec.conversion.mapping import flatten
from jaxspec.conversion.quantize import dequantize, is_quantized, quantize, quantized_paths
from jaxspec.drafters.dflash import model as dflash_model
from jaxspec.drafters.dflash.config import DFlashConfig
from jaxspec.drafters.eagle import model as eagle_model
from jaxspec.drafters.eagle.config import EagleConfig
from jaxspec.drafters.uno import model as uno_model
from jaxspec.drafters.uno.config import UnoConfig
from jaxspec.params import DraftParams
from tests.drafters.eagle_cases import random_head
from tests.files.archives import FIXTURES, read_all


@settings(deadline=None, max_examples=30)
@given(
    shape=st.sampled_from([(64, 48), (3, 40, 32), (1, 2000)]),
    name=st.sampled_from(["kernel", "embedding", "a", "b"]),
    magnitude=st.sampled_from([1e-30, 1e-4, 1.0, 3e4]),
    seed=st.integers(0, 2**20),
)
def test_every_value_is_within_half_a_step(shape, name, magnitude, seed):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(shape) * magnitude * rng.lognormal(0, 2, shape[-1:])).astype(np.float32)
    values[..., 0, :] = 0
    q, scale = quantize(f"x/{name}", values)
    axis = -1 if name in ("embedding", "b") else -2
    assert q.dtype == np.int8 and scale.dtype == ml_dtypes.bfloat16 and scale.shape[axis] == 1
    assert np.delete(scale.shape, axis).tolist() == np.delete(shape, axis).tolist()
    wide = scale.astype(np.float32)
    exact = np.abs(values).max(axis=axis, keepdims=True) / 127
    assert (wide >= exact).all() and (wide <= exact * (1 + 2**-7)).all()
    error = np.abs(dequantize(q, scale) - values)
    assert (error <= wide / 2 * (1 + 1e-6)).all()
    assert dequantize(q, scale, ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16


def test_zeros_stay_zeros_and_nan_is_refused():
    q, scale = quantize("x/kernel", np.zeros((40, 40), np.float32))
    assert not dequantize(q, scale).any()
    for bad in (np.nan, np.inf):
        values = np.ones((40, 40), np.float32)
        values[3, 4] = bad
        with pytest.raises(ConversionError, match="x/kernel holds values that are not finite"):
            quantize("x/kernel", values)


def test_which_parameters_are_stored_in_eight_bits():
    assert is_quantized("layers/0/mlp/down/kernel", (64, 64), np.float32)
    assert is_quantized("embedder/embedding", (64, 64), ml_dtypes.bfloat16)
    assert not is_quantized("final_norm/scale", (4096,), np.float32)
    assert not is_quantized("target_ids", (64, 64), np.int32)
    assert not is_quantized("confidence/kernel", (64, 1), np.float32)
    assert not is_quantized("moe/router/correction_bias", (64, 64), np.float32)


def test_folders_load_as_floats(tmp_path):
    """The tree has the shapes and types of the original, values within half a step, whatever type is asked for."""
    head = random_head("deepspec")
    store.write_folder(tmp_path / "plain", head.config, head.tree, {"source": "test"})
    store.write_folder(tmp_path / "int8", head.config, head.tree, {"source": "test"}, quantize="int8")
    assert json.loads((tmp_path / "int8" / "config.json").read_text())["provenance"]["quantized"] == "int8"
    original, plain = flatten(head.tree), jaxspec.load_draft(tmp_path / "plain", dtype="float32")
    assert all(np.array_equal(a, original[p]) for p, a in flatten(plain.tree).items())
    for dtype in ("float32", "bfloat16"):
        read = jaxspec.load_draft(tmp_path / "int8", dtype=dtype)
        assert isinstance(read, DraftParams) and read.config == head.config
        assert f"parameters, {dtype}, " in repr(read)
        found = flatten(read.tree)
        assert {p: a.shape for p, a in found.items()} == {p: a.shape for p, a in original.items()}
        for path, value in found.items():
            assert value.dtype == dtype and isinstance(value, jax.Array)
            bound = np.abs(original[path]).max() * (0.004 if dtype == "float32" else 0.009)
            np.testing.assert_allclose(np.asarray(value, np.float32), original[path], atol=bound)
    infos = [infos for _, infos in store._shards(tmp_path / "int8" / "params", 1)][0]
    pairs = quantized_paths(infos)
    assert "layers/0/attention/qkv/kernel" in pairs and all(infos[f"{p}/q"].dtype == np.int8 for p in pairs)
    assert not any(path.endswith("norm/scale") and infos[path].dtype == np.int8 for path in infos)


def test_shapes_are_still_checked(tmp_path):
    head = random_head("deepspec")
    store.write_folder(tmp_path / "int8", head.config, head.tree, {}, quantize="int8")
    file = tmp_path / "int8" / "config.json"
    data = json.loads(file.read_text())
    data["config"]["layers"]["ffn_size"] += 1
    file.write_text(json.dumps(data))
    with pytest.raises(ConversionError, match=r"mlp/down/kernel has shape \(24, 16\), expected \(25, 16\)"):
        jaxspec.load_draft(tmp_path / "int8")


def test_from_the_command_line_and_back(tmp_path):
    """Convert to eight bits, convert that to floats, export it: the same values everywhere."""
    source = str(FIXTURES / "target_llama")
    command = [sys.executable, "-m", "jaxspec.convert", source, str(tmp_path / "int8"), "--quantize", "int8", "--quiet"]
    subprocess.run(command, check=True)
    small = jaxspec.load(tmp_path / "int8", dtype="float32")
    convert(tmp_path / "int8", tmp_path / "again", progress=False)
    convert(tmp_path / "int8", tmp_path / "hf", to_hf=True, dtype="float32", progress=False)
    for other in (tmp_path / "again", tmp_path / "hf"):
        read = flatten(jaxspec.load(other, dtype="float32").tree)
        assert all(np.array_equal(a, read[p]) for p, a in flatten(small.tree).items())
    assert {a.dtype for a in read_all(tmp_path / "hf" / "model.safetensors").values()} == {np.dtype(np.float32)}
    exact = jaxspec.load(source, dtype="float32")
    first, second = (jaxspec.forward(m, [1, 2, 3]).logits for m in (exact, small))
    assert 0 < np.abs(np.asarray(first) - np.asarray(second)).max() < 0.1 * np.abs(np.asarray(first)).max()


def test_many_shards_keep_pairs_together(tmp_path):
    model = jaxspec.load(FIXTURES / "target_llama", dtype="float32")
    flat = {p: np.asarray(a) for p, a in flatten(model.tree).items()}
    count = store.save(iter(flat.items()), tmp_path / "params", 8_000, quantize="int8")
    store.write_config(tmp_path, model.config, {}, count)
    assert count > 3
    read = flatten(jaxspec.load(tmp_path, dtype="float32").tree)
    assert all(np.allclose(a, read[p], atol=0.005 * np.abs(a).max()) for p, a in flat.items())


def test_what_makes_no_sense_is_refused(tmp_path):
    source = FIXTURES / "target_llama_tied"
    with pytest.raises(ConversionError, match=r"quantize='int4' is not known; known: int8"):
        convert(source, tmp_path / "x", quantize="int4", progress=False)
    with pytest.raises(ConversionError, match="published formats"):
        convert(source, tmp_path / "x", quantize="int8", to_hf=True, progress=False)
    convert(source, tmp_path / "int8", quantize="int8", progress=False)
    with pytest.raises(ConversionError, match="stored in eight bits already"):
        convert(tmp_path / "int8", tmp_path / "x", quantize="int8", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["int8"]


def demo_target() -> jaxspec.ModelConfig:
    return jaxspec.ModelConfig("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192, tie_embeddings=True)


def layers(num: int, vocab: int = 49152) -> jaxspec.ModelConfig:
    return jaxspec.ModelConfig("llama", vocab, 576, num, 9, 3, 64, 1536, 8192)


def eagle3() -> tuple:
    config = EagleConfig(
        layers=layers(1),
        fused=True,
        taps=(2, 15, 27),
        target_hidden_size=576,
        draft_vocab_size=4096,
        reduced_vocab=True,
        own_head=True,
    )
    return config, eagle_model.init_params(config, jax.random.key(0))


def dspark() -> tuple:
    config = DFlashConfig(
        layers=layers(1),
        block_size=8,
        taps=(2, 15, 27),
        target_hidden_size=576,
        mask_token_id=0,
        markov="vanilla",
        markov_rank=16,
        anchor_predicts=True,
        confidence="markov",
        draft_vocab_size=49152,
    )
    return config, dflash_model.init_params(config, jax.random.key(0))


def uno() -> tuple:
    config = UnoConfig(target=demo_target(), rank=8, alpha=16.0)
    tree = uno_model.init_params(config, jax.random.key(0))
    offsets = {"qkv": (0, 576, 768, 960), "gate_up": (0, 1536, 3072)}
    for layer in tree["layers"].values():  # block i of `b` fills the columns of module i only
        for name, pair in (layer["attention"] | layer["mlp"]).items():
            cuts = offsets.get(name, (0, 576))
            column, row = np.arange(pair["b"].shape[1]), np.arange(pair["b"].shape[0])
            pair["b"] *= (np.searchsorted(cuts, column, "right") - 1)[None] == (row // config.rank)[:, None]
    return config, tree


@pytest.mark.parametrize("make, megabytes", [(eagle3, 7.6), (dspark, 6.3), (uno, 2.5)])
def test_sizes_of_the_demo_models_heads(make, megabytes, tmp_path):
    """Random weights compress least; what is written is near one byte a parameter; into how many files orbax cuts it varies."""
    config, tree = make()
    store.write_folder(tmp_path / "head", config, tree, {}, quantize="int8")
    files = [f for f in (tmp_path / "head").rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= megabytes * 1e6
