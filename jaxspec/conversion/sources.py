"""What is this path? Every kind of source is one entry of `RECOGNISERS`, which opens it as a `Checkpoint`.

A `Checkpoint` is lazy: it knows the configuration, the names and shapes of all tensors and the table of rules, and has read
no weights. `jaxspec.load` and ``python -m jaxspec.convert`` do the same from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.conversion import (
    deepseek,
    dflash,
    eagle,
    gguf,
    gguf_reader,
    gguf_tokenizer,
    hf,
    hf_config,
    mtp,
    mtp_alone,
    peft,
    store,
)  # fmt: skip
from jaxspec.conversion.errors import ConversionError, MissingFileError
from jaxspec.conversion.mapping import COPY, Ignored, Rule, build, check, flatten, table
from jaxspec.conversion.readers import TensorSource, open_tensors
from jaxspec.conversion.tokenizer import TokenizerFiles
from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.dflash_model import param_shapes as dflash_shapes
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.drafters.eagle_model import param_shapes as eagle_shapes
from jaxspec.drafters.mtp_config import MtpConfig
from jaxspec.drafters.mtp_model import param_shapes as mtp_shapes
from jaxspec.drafters.uno_config import UnoConfig
from jaxspec.drafters.uno_model import param_shapes as uno_shapes
from jaxspec.models.decoder import param_shapes


@dataclass(frozen=True)
class Part:
    """One parameter tree inside a checkpoint: its configuration, the shapes it must have and the rules that fill it."""

    config: Any
    shapes: Mapping
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class Checkpoint:
    """An opened source.

    Attributes:
      source: where it is.
      format: what it is, in words.
      main: the model, or the draft head when the source is one.
      tensors: its tensors.
      ignored: tensors that may stay unused.
      tokenizer: its tokenizer files, if any.
      drafts: heads that come along (MTP layers in the same files, UNO's adapter), by name; tensors are used once over
        `main` and all of them.
    """

    source: Path
    format: str
    main: Part
    tensors: TensorSource
    ignored: tuple[Ignored, ...] = ()
    tokenizer: TokenizerFiles | None = None
    drafts: Mapping[str, Part] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        """The main part's configuration."""
        return self.main.config

    def parts(self) -> dict[str, Part]:
        """The main part under the empty name, then the drafts."""
        return {"": self.main, **self.drafts}

    def joined(self) -> tuple[list[Rule], dict]:
        """Rules and shapes of all parts, a draft's under ``drafts/<name>/``."""
        rules, shapes = [], {}
        for name, part in self.parts().items():
            lead = f"drafts/{name}/" if name else ""
            rules += [Rule(lead + r.target, r.sources, r.transform) for r in part.rules]
            shapes |= {lead + path: shape for path, shape in flatten(part.shapes).items()}
        return rules, shapes

    def check(self) -> None:
        """Each tensor used once, each parameter filled once, each shape right (`jaxspec.conversion.mapping.check`)."""
        rules, shapes = self.joined()
        try:
            check(rules, shapes, self.tensors, self.ignored)
        except ConversionError as error:
            raise ConversionError(f"{self.source}: {error}") from None

    def table(self, dtype=None) -> str:
        """The mapping table as text."""
        rules, shapes = self.joined()
        return table(rules, shapes, self.tensors, self.ignored, dtype)

    def build(self, part: Part, dtype=None) -> Iterator[tuple[str, np.ndarray]]:
        """Streams the parameters of one part."""
        return build(part.rules, self.tensors, dtype)


Opener = Callable[[Path, ModelConfig | None], Checkpoint]


@dataclass(frozen=True)
class Recogniser:
    """``matches(path)`` looks at names and small JSON files only; ``open(path, target)`` may need the target's config."""

    format: str
    matches: Callable[[Path], bool]
    open: Opener


def open_converted(folder: Path, target: ModelConfig | None = None) -> Checkpoint:
    """A converted folder: its parameters fill themselves."""
    del target
    tensors = store.ConvertedTensors(folder)
    stored = list(tensors.info)

    def part(config, lead=""):
        shapes = shapes_of(config)
        found = [name for name in stored if name.startswith(lead) and name[len(lead) :] in flatten(shapes)]
        missing = [lead + path for path in flatten(shapes) if lead + path not in tensors.info]
        return Part(config, shapes, tuple(Rule(name[len(lead) :], (name,), COPY) for name in found + missing))

    drafts = {
        name: part(store.read_config(path)[0], f"drafts/{name}/") for name, path in store.draft_folders(folder).items()
    }  # fmt: skip
    return Checkpoint(
        folder, "converted folder", part(store.read_config(folder)[0]), tensors,
        tokenizer=TokenizerFiles.of_folder(folder), drafts=drafts,
    )  # fmt: skip


def open_hf(folder: Path, target: ModelConfig | None = None) -> Checkpoint:
    """A Hugging Face folder: ``config.json`` and safetensors or ``pytorch_model*.bin``."""
    del target
    config = hf_config.read_config(folder)
    tensors = deepseek.dequantized(open_tensors(folder), hf_config.read_json(folder / "config.json"))
    prefix, head = hf.find_prefix(tensors)
    drafts, ignored = {}, hf.ignored_for(config, prefix, head)
    heads = mtp.find_mtp(config, tensors, prefix)
    if heads is not None:
        drafts["mtp"] = Part(heads, shapes_of(heads), tuple(mtp.mtp_rules(heads, config.num_layers, prefix)))
        ignored += mtp.ignored_copies(heads, config, prefix, head)
        config = replace(config, num_mtp_layers=heads.num_layers)
    adapter = peft.with_target(folder, config, tensors)
    if adapter is not None:
        uno, tensors, rules = adapter
        drafts["uno"] = Part(uno, shapes_of(uno), tuple(rules))
    main = Part(config, shapes_of(config), tuple(hf.rules_for(config, prefix, head)))
    return Checkpoint(folder, "Hugging Face folder", main, tensors, tuple(ignored), TokenizerFiles.of_folder(folder), drafts)


def open_hybrid_mtp(folder: Path, target: ModelConfig | None = None) -> Checkpoint:
    """The MTP layer of a Qwen3-Next folder as a draft; without a target's configuration the folder is refused."""
    if target is None:
        return open_hf(folder)
    config, tensors, rules, ignored = mtp.open_hybrid_mtp(folder, target)
    return Checkpoint(folder, "MTP layer", Part(config, shapes_of(config), tuple(rules)), tensors, tuple(ignored))


def open_mtp(folder: Path, target: ModelConfig | None = None) -> Checkpoint:
    """MTP layers in a folder of their own."""
    config, tensors, rules, ignored = mtp_alone.open_alone(folder, target)
    return Checkpoint(folder, "MTP draft", Part(config, shapes_of(config), tuple(rules)), tensors, tuple(ignored))


def open_eagle(folder: Path, target: ModelConfig | None = None) -> Checkpoint:
    """An EAGLE draft head in any published layout."""
    config, tensors, rules, ignored = eagle.open_eagle(folder, target)
    return Checkpoint(folder, f"{config.algorithm} draft head", Part(config, shapes_of(config), tuple(rules)), tensors, ignored)


def open_dflash(folder: Path, target: ModelConfig | None = None) -> Checkpoint:
    """A block draft (DFlash, DSpark) in any published layout."""
    config, tensors, rules, ignored = dflash.open_dflash(folder, target)
    return Checkpoint(folder, f"{config.algorithm} draft", Part(config, shapes_of(config), tuple(rules)), tensors, ignored)


def open_peft(folder: Path, target: ModelConfig | None = None) -> Checkpoint:
    """A UNO adapter in PEFT's format."""
    config, tensors, rules = peft.open_peft(folder, target)
    return Checkpoint(folder, "UNO adapter", Part(config, shapes_of(config), tuple(rules)), tensors)


def open_gguf(file: Path, target: ModelConfig | None = None) -> Checkpoint:
    """A GGUF file, dequantised to float32 as it is read."""
    del target
    reader, config = gguf.read(file)
    main = Part(config, shapes_of(config), tuple(gguf.model_rules(config)))
    tokenizer = gguf_tokenizer.tokenizer_files(reader.metadata)
    return Checkpoint(file, "GGUF file", main, reader, gguf.IGNORED, tokenizer)


SHAPES: dict[type, Callable[[Any], Mapping]] = {
    ModelConfig: param_shapes,
    MtpConfig: mtp_shapes,
    EagleConfig: eagle_shapes,
    DFlashConfig: dflash_shapes,
    UnoConfig: uno_shapes,
}
"""Configuration class → the shapes of its parameter tree."""


def shapes_of(config: Any) -> Mapping:
    """The parameter tree of a configuration as shapes."""
    return SHAPES[type(config)](config)


RECOGNISERS: list[Recogniser] = [
    Recogniser("converted folder", lambda p: p.is_dir() and store.is_converted(p), open_converted),
    Recogniser("MTP draft", lambda p: p.is_dir() and mtp_alone.is_alone(p), open_mtp),
    Recogniser("Qwen3-Next folder", lambda p: p.is_dir() and mtp.has_hybrid_mtp(p), open_hybrid_mtp),
    Recogniser("PEFT adapter", peft.matches, open_peft),
    Recogniser("block draft", dflash.matches, open_dflash),
    Recogniser("EAGLE draft head", eagle.matches, open_eagle),
    Recogniser("Hugging Face folder", lambda p: p.is_dir() and (p / "config.json").exists(), open_hf),
    Recogniser("GGUF file", gguf_reader.is_gguf, open_gguf),
]
"""Tried in this order; the special ones stand before the general ones."""


def open_checkpoint(path: str | Path, target: ModelConfig | None = None) -> Checkpoint:
    """Recognises and opens a source.

    Args:
      path: a file or folder.
      target: the target's configuration, which some draft formats need.

    Raises:
      MissingFileError: nothing is there.
      ConversionError: it is nothing that is known, or not well formed.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise MissingFileError(f"{path} does not exist")
    recogniser = next((r for r in RECOGNISERS if r.matches(path)), None)
    if recogniser is None:
        found = ", ".join(sorted(p.name for p in path.iterdir())[:8]) if path.is_dir() else f"a file named {path.name}"
        known = ", ".join(r.format for r in RECOGNISERS)
        raise ConversionError(f"{path} is none of: {known} (found: {found or 'an empty folder'})")
    return recogniser.open(path, target)
