"""DeepSeek, MiMo and MTP checkpoints: both ways, float8 blocks, what is refused."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxspec.conversion import ConversionError, convert
from jaxspec.conversion.drafts import mtp
from jaxspec.conversion.export import write_safetensors
from jaxspec.conversion.sources import open_checkpoint
from jaxspec.conversion.targets.deepseek import DequantizedTensors, deepseek_v2, deepseek_v3, dequantized
from jaxspec.drafters.mtp.config import MtpConfig
from jaxspec.files.folders import open_tensors
from jaxspec.files.readers import TensorInfo

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


class Tensors:
    """A tensor source in memory."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays = arrays
        self.info = {name: TensorInfo(a.shape, a.dtype, "memory") for name, a in arrays.items()}

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]


def rewrite(case: str, folder: Path, change_config=None, change_tensors=None) -> Path:
    """A copy of a case's checkpoint with another configuration or other tensors."""
    folder.mkdir()
    config = json.loads((FIXTURES / case / "config.json").read_text())
    if change_config:
        change_config(config)
    (folder / "config.json").write_text(json.dumps(config))
    if change_tensors is None:
        shutil.copy(FIXTURES / case / "model.safetensors", folder)
    else:
        stored = open_tensors(FIXTURES / case)
        tensors = {name: np.array(stored.read(name)) for name in stored.info}
        change_tensors(tensors)
        entries = [(name, a.dtype, a.shape) for name, a in tensors.items()]
        write_safetensors(folder / "model.safetensors", entries, iter(tensors.items()))
    return folder


@pytest.mark.parametrize("case", ["target_deepseek_v3", "mtp_deepseek_v3", "mtp_mimo"])
def test_there_and_back_gives_the_same_files(case, tmp_path):
    convert(FIXTURES / case, tmp_path / "ours", progress=False)
    convert(tmp_path / "ours", tmp_path / "theirs", to_hf=True, progress=False)
    first, second = open_tensors(FIXTURES / case), open_tensors(tmp_path / "theirs")
    assert set(first.info) == set(second.info)
    for name, info in first.info.items():
        assert second.info[name].dtype == info.dtype
        np.testing.assert_array_equal(first.read(name), second.read(name))
    before, after = open_checkpoint(FIXTURES / case), open_checkpoint(tmp_path / "theirs")
    assert before.config == after.config
    assert {n: p.config for n, p in before.drafts.items()} == {n: p.config for n, p in after.drafts.items()}
    assert before.config.num_mtp_layers == case.startswith("mtp")
    keys = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert keys.get("num_nextn_predict_layers", 0) == before.config.num_mtp_layers


def test_the_exported_deepseek_folder_loads_in_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    convert(FIXTURES / "target_deepseek_v3", tmp_path / "out", to_hf=True, progress=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with np.load(FIXTURES / "target_deepseek_v3" / "io.npz") as io, torch.no_grad():
        logits = model(torch.tensor(io["a.input_ids"][None].astype(np.int64))).logits[0]
        np.testing.assert_allclose(logits.numpy(), io["a.logits"], atol=1e-4)


def test_several_mimo_layers_are_found_by_their_tensors(tmp_path):
    def repeat(tensors):
        for name in [n for n in tensors if ".mtp_layers.0." in n]:
            tensors[name.replace("layers.0", "layers.1")] = tensors[name]

    checkpoint = open_checkpoint(rewrite("mtp_mimo", tmp_path / "two", None, repeat))
    checkpoint.check()
    assert checkpoint.config.num_mtp_layers == checkpoint.drafts["mtp"].config.num_layers == 2


def test_copies_of_embedding_and_head_must_be_copies(tmp_path):
    def change(tensors):
        tensors["model.layers.3.embed_tokens.weight"] = tensors["model.layers.3.embed_tokens.weight"] * 2

    with pytest.raises(ConversionError, match=r"layers\.3\.embed_tokens\.weight differs from model\.embed_tokens\.weight"):
        open_checkpoint(rewrite("mtp_deepseek_v3", tmp_path / "other", None, change)).check()


def test_mtp_tensors_of_an_unknown_kind_are_refused(tmp_path):
    def rename(tensors):
        for name in [n for n in tensors if ".mtp_layers.0." in n]:
            tensors[name.replace(".mtp_layers.0.", ".mtp_layers.0.stage.")] = tensors.pop(name)

    with pytest.raises(ConversionError, match=r"mtp_layers\.0\.stage.* looks like an MTP layer of a kind that is not known"):
        open_checkpoint(rewrite("mtp_mimo", tmp_path / "other", None, rename))


def test_a_missing_mtp_tensor_is_named(tmp_path):
    with pytest.raises(ConversionError, match=r"missing tensor model\.layers\.3\.eh_proj\.weight"):
        open_checkpoint(
            rewrite("mtp_deepseek_v3", tmp_path / "less", None, lambda t: t.pop("model.layers.3.eh_proj.weight"))
        ).check()


def test_qwen3_next_is_refused_as_a_target_and_read_as_a_draft():
    folder = FIXTURES / "mtp_qwen3_next"
    with pytest.raises(ConversionError, match="linear-attention .* not supported as a target; its MTP layer alone"):
        open_checkpoint(folder)
    target = mtp.qwen3_next(json.loads((folder / "config.json").read_text()))
    checkpoint = open_checkpoint(folder, target)
    checkpoint.check()
    assert isinstance(checkpoint.config, MtpConfig) and checkpoint.config.family == "qwen3_next"
    other = open_checkpoint(FIXTURES / "mtp_mimo").config
    with pytest.raises(ConversionError, match="belongs to another model: hidden_size|vocab_size"):
        mtp.open_hybrid_mtp(folder, type(other)(**{**vars(other), "vocab_size": 7}))


def test_gated_projection_is_split_as_it_was_joined():
    config = mtp.qwen3_next(json.loads((FIXTURES / "mtp_qwen3_next" / "config.json").read_text()))
    H, K, D, E = config.num_heads, config.num_kv_heads, config.head_dim, 3
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(rows, E)) for rows in (2 * H * D, K * D, K * D))
    transform = mtp.gated_qkv(config)
    fused = transform.join([q, k, v])
    for before, after in zip((q, k, v), transform.split(fused), strict=True):
        np.testing.assert_array_equal(before, after)
    # The gate of the last head stands at the very end, its query in front of the last key.
    np.testing.assert_array_equal(fused[:, -D:], q.T[:, -D:])


def test_float8_blocks_come_out_as_bfloat16():
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(5, 7)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.5, 2, (3, 3)).astype(np.float32)
    plain = np.ones(4, ml_dtypes.bfloat16)
    stored = Tensors({"a.weight": weight, "a.weight_scale_inv": scale, "norm.weight": plain})
    tensors = dequantized(stored, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 3]}})
    assert set(tensors.info) == {"a.weight", "norm.weight"}
    assert tensors.info["a.weight"].dtype == ml_dtypes.bfloat16
    expected = [[float(weight[i, j]) * scale[i // 2, j // 3] for j in range(7)] for i in range(5)]
    np.testing.assert_array_equal(tensors.read("a.weight"), np.array(expected, np.float32).astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(tensors.read("norm.weight"), plain)
    with pytest.raises(ConversionError, match=r"a\.weight_scale_inv has shape \(3, 3\), expected \(2, 2\)"):
        DequantizedTensors(stored, (4, 4)).read("a.weight")
    assert dequantized(stored, {}) is stored


def test_a_float8_checkpoint_loads(tmp_path):
    def quantise(tensors):
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            rows, columns = tensors[name].shape
            tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = np.ones((-(-rows // 8), -(-columns // 8)), np.float32)

    def announce(config):
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}

    checkpoint = open_checkpoint(rewrite("mtp_deepseek_v3", tmp_path / "fp8", announce, quantise))
    checkpoint.check()
    path, kernel = next((p, a) for p, a in checkpoint.build(checkpoint.main) if p == "layers/0/attention/out/kernel")
    original = open_tensors(FIXTURES / "mtp_deepseek_v3").read("model.layers.0.self_attn.o_proj.weight")
    np.testing.assert_array_equal(kernel, original.astype(ml_dtypes.float8_e4m3fn).astype(ml_dtypes.bfloat16).T)


@pytest.mark.parametrize(
    "parse, changes, message",
    [
        (deepseek_v3, {"topk_method": "greedy"}, "topk_method='greedy' with scoring_func='sigmoid' is not supported"),
        (deepseek_v3, {"attention_bias": True}, "attention_bias=true"),
        (deepseek_v3, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (deepseek_v3, {"kv_lora_rank": None}, "lacks 'kv_lora_rank'"),
        (deepseek_v2, {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported for deepseek_v2"),
    ],
)
def test_what_the_models_cannot_do_is_refused(parse, changes, message):
    raw = json.loads((FIXTURES / "target_deepseek_v3" / "config.json").read_text())
    with pytest.raises(ConversionError, match=message):
        parse(raw | changes)
