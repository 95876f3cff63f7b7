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


def shown(value: object, limit: int = 120) -> str:
    """A value of a file as a piece of one line of an error message: never long, whatever the value is.

    Only plain values and errors are shown; of a container, whose text may be as large as memory, its kind and length.
    """
    if isinstance(value, (list, tuple, dict, set)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = value[:limit] if isinstance(value, str) else str(value)
    text = "".join(c if c.isprintable() else "\ufffd" for c in text[: limit + 1])
    return text if len(text) <= limit and not (isinstance(value, str) and len(value) > limit) else f"{text[:limit]}…"
