"""Errors of reading and writing checkpoints; every message names the file or tensor and says what would be right."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

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


@contextlib.contextmanager
def reading(where: object) -> Iterator[None]:
    """Errors of Python inside it become a ConversionError that names `where`: a file made them, not the caller.

    What is known to go wrong has a message of its own; this is for what no check foresaw.
    """
    try:
        yield
    except ConfigError:
        raise
    except RecursionError:
        raise ConversionError(f"{where} is nested too deeply to be read") from None
    except MemoryError as error:
        raise ConversionError(f"{where} needs more memory than there is ({shown(error)})") from error
    except OSError as error:
        raise ConversionError(f"{where} cannot be read or written ({shown(error)})") from error
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, EOFError, struct.error) as error:
        raise ConversionError(
            f"{where} is damaged or of a layout that is not known ({type(error).__name__}: {shown(error)})"
        ) from error
