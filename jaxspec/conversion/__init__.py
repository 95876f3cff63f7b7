"""Checkpoints of every kind → Flax parameter trees on disk, and back. See `convert` and `jaxspec.load`."""

from jaxspec.conversion.errors import ConversionError, MissingFileError, UnsafePickleError
from jaxspec.conversion.pipeline import convert

__all__ = ["ConversionError", "MissingFileError", "UnsafePickleError", "convert"]
