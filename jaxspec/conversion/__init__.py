"""Checkpoints of every kind → Flax parameter trees on disk, and back. See `convert` and `jaxspec.load`."""

from jaxspec.conversion.pipeline import convert
from jaxspec.files.errors import ConversionError, MissingFileError, UnsafePickleError

__all__ = ["ConversionError", "MissingFileError", "UnsafePickleError", "convert"]
