"""GGUF files made from golden targets with the gguf package, as llama.cpp's own converter makes them."""

import json
import re
from pathlib import Path

import gguf
import numpy as np

from tests.files.archives import FIXTURES, read_all

ARCHITECTURES = {
    "llama": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen3_moe": "QWEN3MOE",
    "phi3": "PHI3",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: rotary pairs become neighbours."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    case: str, file: Path, quantization="F32", metadata: dict | None = None, tensors: dict | None = None, drop=()
) -> None:
    """Writes target `case`; `metadata` and `tensors` add to it or replace what it has, `drop` leaves tensors out."""
    folder = FIXTURES / case
    raw = json.loads((folder / "config.json").read_text())
    name = ARCHITECTURES[raw["model_type"]]
    arch = gguf.MODEL_ARCH[name]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_key_length(raw.get("head_dim") or raw["hidden_size"] // heads)
    writer.add_eos_token_id(raw["eos_token_id"])
    writer.add_bos_token_id(raw["bos_token_id"])
    if raw.get("sliding_window") and "gemma" in raw["model_type"]:
        writer.add_sliding_window(raw["sliding_window"])
    if raw.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    if (raw.get("rope_scaling") or {}).get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(raw["rope_scaling"]["factor"])
    if "num_experts" in raw:
        writer.add_expert_count(raw["num_experts"])
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    for key, value in (metadata or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key.replace("ARCH", writer.arch), value)
    weights = {n: a.astype(np.float32) for n, a in read_all(folder / "model.safetensors").items()}
    names = gguf.get_tensor_name_map(arch, raw["num_hidden_layers"])
    dense = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, raw["num_hidden_layers"])  # for QWEN3MOE's plain layers
    stored, experts = {}, {}
    for hf_name, array in weights.items():
        if name == "LLAMA" and (match := re.search(r"\.([qk])_proj\.", hf_name)):
            array = permute(array, heads if match[1] == "q" else kv_heads)
        if "gemma" in raw["model_type"] and "norm" in hf_name:
            array = array + 1
        if match := re.search(r"\.experts\.(\d+)\.", hf_name):
            experts.setdefault(hf_name.replace(match[0], ".experts."), []).append(array)
        else:
            suffixes = (".weight", ".bias")
            stored[names.get_name(hf_name, suffixes) or dense.get_name(hf_name, suffixes)] = array
    for hf_name, arrays in experts.items():
        stored[names.get_name(hf_name, try_suffixes=(".weight",))] = np.stack(arrays)
    for tensor_name, array in (stored | (tensors or {})).items():
        if tensor_name in drop:
            continue
        kind = gguf.GGMLQuantizationType[quantization if array.ndim > 1 and array.shape[-1] % 32 == 0 else "F32"]
        writer.add_tensor(tensor_name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
