"""What is this path? Every kind of source is one of the `recognisers`, which opens it as a `Checkpoint`.

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
from jaxspec.conversion import store
from jaxspec.conversion.drafts import mtp, peft
from jaxspec.conversion.mapping import COPY, Ignored, Rule, build, check, flatten, table
from jaxspec.conversion.targets import deepseek, gguf, gguf_tokenizer, hf, hf_config
from jaxspec.drafters.kinds import Source, algorithm_of, formats, imported, shapes_of
from jaxspec.files import gguf_reader
from jaxspec.files.errors import ConversionError, MissingFileError, reading
from jaxspec.files.folders import open_tensors
from jaxspec.files.readers import TensorSource
from jaxspec.files.values import check_config
from jaxspec.tokenizer.tokenizer import TokenizerFiles


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
            with reading(self.source):
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
    """``matches(path)`` looks at names and small JSON files only; ``open(path, target)`` may need the target's config.

    One with `needs_target` is left out where there is none.
    """

    format: str
    matches: Callable[[Path], bool]
    open: Opener
    needs_target: bool = False


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

    drafts = {name: part(store.read_config(path)[0], f"drafts/{name}/") for name, path in store.draft_folders(folder).items()}
    return Checkpoint(
        folder,
        "converted folder",
        part(store.read_config(folder)[0]),
        tensors,
        tokenizer=TokenizerFiles.of_folder(folder),
        drafts=drafts,
    )


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


def open_gguf(file: Path, target: ModelConfig | None = None) -> Checkpoint:
    """A GGUF file, dequantised to float32 as it is read."""
    del target
    reader, config = gguf.read(file)
    main = Part(config, shapes_of(config), tuple(gguf.model_rules(config)))
    tokenizer = gguf_tokenizer.tokenizer_files(reader.metadata)
    return Checkpoint(file, "GGUF file", main, reader, gguf.IGNORED, tokenizer)


def draft_recogniser(source: Source) -> Recogniser:
    """A published layout of a kind of draft as a recogniser."""

    def open_draft(path: Path, target: ModelConfig | None = None) -> Checkpoint:
        config, tensors, rules, ignored = imported(source.open)(path, target)
        check_config(config, path)
        label = source.label.format(algorithm=algorithm_of(config))
        return Checkpoint(path, label, Part(config, shapes_of(config), tuple(rules)), tensors, tuple(ignored))

    def matches(path: Path) -> bool:
        return path.is_dir() and imported(source.matches)(path)

    return Recogniser(source.name, matches, open_draft, source.needs_target)


def recognisers() -> list[Recogniser]:
    """All of them, in the order in which they are tried: the special ones before the general ones, late kinds before early."""
    drafts = [draft_recogniser(source) for form in reversed(formats().values()) for source in form.sources]
    return [
        Recogniser("converted folder", lambda p: p.is_dir() and store.is_converted(p), open_converted),
        *drafts,
        Recogniser("Hugging Face folder", lambda p: p.is_dir() and (p / "config.json").exists(), open_hf),
        Recogniser("GGUF file", gguf_reader.is_gguf, open_gguf),
    ]


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
    try:
        with reading(path):
            return _recognised(path, target)
    except ConversionError as error:
        if str(path) in str(error):
            raise
        raise ConversionError(f"{path}: {error}") from error


def _recognised(path: Path, target: ModelConfig | None) -> Checkpoint:
    known = recognisers()
    recogniser = next((r for r in known if not (r.needs_target and target is None) and r.matches(path)), None)
    if recogniser is None:
        found = ", ".join(sorted(p.name for p in path.iterdir())[:8]) if path.is_dir() else f"a file named {path.name}"
        names = ", ".join(r.format for r in known)
        raise ConversionError(f"{path} is none of: {names} (found: {found or 'an empty folder'})")
    return recogniser.open(path, target)
