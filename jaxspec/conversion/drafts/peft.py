"""PEFT LoRA folders ↔ `UnoConfig` and rules: ``adapter_config.json`` and ``adapter_model.safetensors``.

Tensors are called ``base_model.model.model.layers.{i}.{self_attn|mlp}.{module}.lora_A.weight`` [r, in] and ``lora_B`` [out, r].
A UNO release holds such a folder as ``adapter/`` beside the target's own files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.conversion.mapping import Rule, Transform, concatenate
from jaxspec.conversion.targets import hf
from jaxspec.conversion.targets.hf_config import read_json
from jaxspec.drafters.uno.config import PRODUCTS, UnoConfig
from jaxspec.files.errors import ConversionError
from jaxspec.files.folders import open_tensors
from jaxspec.files.readers import TensorInfo, TensorSource

CONFIG_FILE, FOLDER, PREFIX = "adapter_config.json", "adapter", "base_model.model.model."

REFUSED: dict[str, str] = {
    "use_dora": "weight-decomposed adapters (DoRA)",
    "bias": "trained biases",
    "lora_bias": "trained biases",
    "modules_to_save": "modules stored whole beside the adapter",
    "fan_in_fan_out": "transposed weights",
    "rank_pattern": "ranks that differ between modules",
    "alpha_pattern": "scales that differ between modules",
    "layers_to_transform": "adapters on some layers only",
    "layer_replication": "replicated layers",
    "target_parameters": "adapters on bare parameters",
    "trainable_token_indices": "trained embedding rows",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal adapters",
    "alora_invocation_tokens": "activated adapters (aLoRA)",
    "arrow_config": "routed adapters",
}
"""Keys of ``adapter_config.json`` that change the computation, and what they stand for; each must be off."""


def adapter_folder(folder: Path) -> Path | None:
    """Where a folder holds a PEFT adapter: itself, its ``adapter`` sub-folder, or nowhere (None)."""
    return next((f for f in (folder, folder / FOLDER) if (f / CONFIG_FILE).exists()), None)


def matches(folder: Path) -> bool:
    """Whether a folder is an adapter and nothing else: a target's folder with an adapter in it is the target's."""
    if not folder.is_dir() or adapter_folder(folder) is None:
        return False
    return (folder / CONFIG_FILE).exists() or not (folder / "config.json").exists()


def open_peft(folder: Path, target: ModelConfig | None) -> tuple[UnoConfig, TensorSource, list[Rule], tuple[Ignored, ...]]:
    """Opens an adapter: its configuration, tensors, rules and the tensors that may stay unused: none.

    Args:
      folder: the folder, or one that holds it as ``adapter``.
      target: the configuration of the model that it belongs to.

    Raises:
      ConversionError: there is no target, the adapter is of a kind that is not supported, or it does not fit the target.
    """
    folder = adapter_folder(folder)
    if target is None:
        raise ConversionError(
            f"{folder}: an adapter does not say how its target's heads are laid out: give the target (load_draft(…, target), "
            "or --target)"
        )
    raw, tensors = read_json(folder / CONFIG_FILE), open_tensors(folder)
    try:
        prefix, modules = find_modules(tensors, target)
        config = read_config(raw, modules, target)
    except (ConfigError, ConversionError) as error:
        raise ConversionError(f"{folder}: {error}") from None
    return config, tensors, rules_of(config, prefix), ()


def find_modules(tensors: TensorSource, target: ModelConfig) -> tuple[str, tuple[str, ...]]:
    """The prefix in front of ``layers.``, and which modules the adapter changes."""
    found = [re.fullmatch(r"(.*?)layers\.\d+\.\w+\.(\w+)\.lora_[AB]\.weight", name) for name in tensors.info]
    found = [m for m in found if m]
    if not found:
        first = next(iter(tensors.info), "nothing")
        raise ConversionError(f"holds no LoRA tensors such as {PREFIX}layers.0.self_attn.q_proj.lora_A.weight (found {first})")
    layout = hf.LAYOUTS.get(target.family, hf.LLAMA)
    fused = {name for name in (layout.qkv, layout.gate_up) if name}
    modules = tuple(dict.fromkeys(m[2] for m in found))
    strange = [m for m in modules if m in ("qkv_proj", "gate_up_proj") and m not in fused]
    if strange:
        raise ConversionError(f"changes {', '.join(strange)}, which {target.family} models do not have")
    return found[0][1], modules


def read_config(raw: dict, modules: tuple[str, ...], target: ModelConfig) -> UnoConfig:
    """``adapter_config.json`` → `UnoConfig`."""
    if raw.get("peft_type", "LORA") != "LORA":
        raise ConversionError(f"{CONFIG_FILE} says peft_type={raw['peft_type']!r}, only LORA adapters are supported")
    for key, what in REFUSED.items():
        value = raw.get(key)
        if value and not (key == "bias" and value == "none"):
            raise ConversionError(f"{CONFIG_FILE} says {key}={value!r}: {what} are not supported")
    for key in ("r", "lora_alpha"):
        if not isinstance(raw.get(key), int | float):
            raise ConversionError(f"{CONFIG_FILE} says {key}={raw.get(key)!r}, a number is needed")
    said = raw.get("target_modules")
    if isinstance(said, list) and {str(m).rsplit(".", 1)[-1] for m in said} != set(modules):
        raise ConversionError(f"{CONFIG_FILE} says target_modules={sorted(said)}, the file has {sorted(modules)}")
    return UnoConfig(
        target=target,
        rank=int(raw["r"]),
        alpha=float(raw["lora_alpha"]),
        rslora=bool(raw.get("use_rslora", False)),
        modules=modules,
        mask_token_id=raw.get("mask_token_id"),
        base_model=raw.get("base_model_name_or_path"),
    )


def rules_of(config: UnoConfig, prefix: str = PREFIX) -> list[Rule]:
    """The table of an adapter whose tensors begin with `prefix`."""
    layout, rules = hf.LAYOUTS.get(config.target.family, hf.LLAMA), []
    blocks = {"attention": layout.attention, "mlp": layout.mlp}
    for i in range(config.target.num_layers):
        for product in PRODUCTS:
            modules = config.changed(product)
            if modules:
                block, name = product
                sources = [f"{prefix}layers.{i}.{blocks[block]}.{m}" for m in modules]
                path, a = f"layers/{i}/{block}/{name}", concatenate(*(config.rank for _ in modules))
                rules.append(Rule(f"{path}/a", tuple(f"{s}.lora_A.weight" for s in sources), a))
                rules.append(Rule(f"{path}/b", tuple(f"{s}.lora_B.weight" for s in sources), blocks_of(config, product)))
    return rules


Columns = tuple[tuple[str, ...], tuple[int, ...], Callable, Callable]


def columns_of(config: UnoConfig, product: tuple[str, str]) -> Columns:
    """How a product's columns are made up: its modules, their widths, and both ways between parts and columns."""
    c, changed = config.target, config.changed(product)
    H, K, D, F, E = c.num_heads, c.num_kv_heads, c.head_dim, c.ffn_size, c.hidden_size
    if "qkv_proj" in changed:
        cuts = (H * D, (H + K) * D)
        return (
            changed,
            ((H + 2 * K) * D,),
            lambda parts: hf.join_heads(np.split(parts[0], cuts, axis=-1), c),
            lambda p: [np.concatenate(hf.split_heads(p, c), axis=-1)],
        )
    if product == ("attention", "qkv"):
        widths = (H * D, K * D, K * D)
        return ("q_proj", "k_proj", "v_proj"), widths, lambda parts: hf.join_heads(parts, c), lambda p: hf.split_heads(p, c)
    if product == ("mlp", "gate_up") and "gate_up_proj" not in changed:
        return (
            ("gate_proj", "up_proj"),
            (F, F),
            lambda parts: np.concatenate(parts, axis=-1),
            lambda p: np.split(p, 2, axis=-1),
        )
    return changed, (2 * F if product == ("mlp", "gate_up") else E,), lambda parts: parts[0], lambda p: [p]


def blocks_of(config: UnoConfig, product: tuple[str, str]) -> Transform:
    """Matrices B [out, r] of a product's modules ↔ one [n·r, out] in which module i's rows fill its own columns only."""
    names, widths, fuse, part = columns_of(config, product)
    changed, rank = config.changed(product), config.rank

    def join(tensors):
        rows = []
        for module, tensor in zip(changed, tensors, strict=True):
            zeros = [np.zeros((tensor.shape[1], width), tensor.dtype) for width in widths]
            rows.append(fuse([tensor.T if name == module else z for name, z in zip(names, zeros, strict=True)]))
        return np.concatenate(rows, axis=0)

    def split(p):
        return [part(p[i * rank : (i + 1) * rank])[names.index(module)].T for i, module in enumerate(changed)]

    return Transform("blocks" if len(changed) > 1 else "place", join, split)


def config_keys(config: UnoConfig) -> dict[str, Any]:
    """``adapter_config.json`` as PEFT reads it."""
    alpha = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    keys = {
        "base_model_name_or_path": config.base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": sorted(config.modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": config.rslora,
    }
    return keys if config.mask_token_id is None else keys | {"mask_token_id": config.mask_token_id}


class JoinedTensors:
    """A target's tensors and its adapter's, whose names begin with ``adapter/``."""

    def __init__(self, target: TensorSource, adapter: TensorSource):
        self._target, self._adapter = target, adapter
        self.info: dict[str, TensorInfo] = {**target.info, **{f"{FOLDER}/{n}": i for n, i in adapter.info.items()}}

    def read(self, name: str) -> np.ndarray:
        """The tensor `name`."""
        lead, _, rest = name.partition(f"{FOLDER}/")
        return self._target.read(name) if lead else self._adapter.read(rest)


def with_target(folder: Path, target: ModelConfig, tensors: TensorSource) -> tuple[UnoConfig, JoinedTensors, list[Rule]] | None:
    """The adapter in a target's folder, with the tensors of both; None when it holds none."""
    if not (folder / FOLDER / CONFIG_FILE).exists():
        return None
    config, own, rules, _ = open_peft(folder / FOLDER, target)
    renamed = [Rule(r.target, tuple(f"{FOLDER}/{s}" for s in r.sources), r.transform) for r in rules]
    return config, JoinedTensors(tensors, own), renamed
