"""Packages that only some uses need: imported by those, with an error that says how to install what is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from jaxspec.config import ConfigError


class MissingPackageError(ConfigError, ImportError):
    """A package that this use needs is not installed."""


def optional(module: str, purpose: str, requirement: str) -> ModuleType:
    """The module `module` of another project.

    Args:
      module: its name.
      purpose: what needs it, as the beginning of a sentence: "training a head".
      requirement: what pip is to install: a package, or an extra of this one.

    Raises:
      MissingPackageError: it is not installed; what is wrong with one that is installed is raised as it stands.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if error.name is None or error.name.split(".")[0] != package:
            raise
        raise MissingPackageError(
            f'{purpose} needs the package {package}, which is not installed: pip install "{requirement}"'
        ) from None
