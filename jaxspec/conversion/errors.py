"""Errors of reading and writing checkpoints; every message names the file or tensor and says what would be right."""

from __future__ import annotations

from jaxspec.config import ConfigError


class ConversionError(ConfigError):
    """A checkpoint that cannot be read, does not fit its configuration, or cannot be written."""


class MissingFileError(ConversionError, FileNotFoundError):
    """A file or folder that is not there."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UnsafePickleError(ConversionError):
    """A pickle that asks for more than tensors: it is refused before anything in it can run."""
