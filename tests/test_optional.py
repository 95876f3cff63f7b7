"""What only some uses need is imported by them alone, and is told apart when it is missing."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxspec import hub
from jaxspec.benchmarking import sweep
from jaxspec.config import ConfigError
from jaxspec.files.gguf_reader import GGUFReader
from jaxspec.optional import MissingPackageError, optional
from jaxspec.training import loop

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def declared(requirement: str) -> list[str]:
    """The names of the packages that ``pip install requirement`` brings, beside what jaxspec always needs."""
    extra = re.fullmatch(rf"{PROJECT['name']}\[(\w+)\]", requirement)
    lines = PROJECT["optional-dependencies"][extra[1]] if extra else [requirement]
    return [re.match(r"[\w.-]+", line)[0].replace("-", "_") for line in lines]


@pytest.mark.parametrize(
    "package, use",
    [
        ("gguf", lambda folder: GGUFReader(folder / "model.gguf")),
        ("huggingface_hub", lambda folder: hub.download("someone/something")),
        ("matplotlib", lambda folder: sweep.plot([], folder / "plot.png")),
        ("optax", lambda folder: importlib.reload(loop)),
    ],
)
def test_what_to_install(package, use, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=f"needs the package {package}, which is not installed") as caught:
        use(tmp_path)
    assert isinstance(caught.value, ConfigError) and isinstance(caught.value, ImportError)
    assert declared(re.search(r'pip install "(.*)"', str(caught.value))[1]) == [package]


def test_a_package_that_lacks_another(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import no_such_package_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_anywhere") as caught:
        optional("half_installed", "a test", "half-installed")
    assert not isinstance(caught.value, MissingPackageError)


def test_importing_jaxspec_imports_none_of_them():
    program = "import sys, jaxspec; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "jaxspec.generation" in loaded
    assert not {"gguf", "huggingface_hub", "matplotlib", "optax", "orbax", "tokenizers", "torch", "transformers"} & set(loaded)
