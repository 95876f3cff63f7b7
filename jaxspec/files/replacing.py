"""A folder is written under a temporary name beside its own and renamed when it is complete; an old one goes last.

Whatever moment a run is killed at, the old folder or the complete one is there: under its name, or, between two renames,
beside it, from where the next run puts it back. Temporary folders are locked while they are in use, so that a later run can
tell what a killed one left behind from what another one is writing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxspec.files.errors import ConversionError

try:
    import fcntl
except ImportError:  # Windows: nobody can tell whether a folder is in use, so that leftovers stay
    fcntl = None

PARTIAL, OLD = "partial", "old"
"""What a temporary folder is: a folder being written, or the holder of one that is being replaced (``holder/folder``)."""


@contextlib.contextmanager
def replacing(dst: Path, force: bool, sources: Iterable[Path] = ()) -> Iterator[Path]:
    """A temporary folder beside `dst` that becomes `dst` when all went well and vanishes when not.

    Args:
      dst: the folder to be; a symbolic link there is itself replaced, not what it points to.
      force: replace `dst` if it exists.
      sources: files and folders that are read meanwhile: none of them, nor any file that they link to, may be lost.

    Raises:
      ConversionError: `dst` exists and not `force`, is a file, or its removal would take something of `sources` along.
    """
    sources, dst = list(sources), dst.expanduser().absolute()
    dst = dst.resolve() if dst.name in ("", "..") else dst
    check_place(dst, sources, force)
    dst.parent.mkdir(parents=True, exist_ok=True)
    tidy(dst, sources)
    check_place(dst, sources, force)  # what a killed run had moved away may be back
    with locked_folder(dst, PARTIAL) as folder:
        yield folder
        umask = os.umask(0)
        os.umask(umask)
        folder.chmod(0o777 & ~umask)  # mkdtemp makes it private
        check_place(dst, sources, force)
        if not os.path.lexists(dst):
            os.rename(folder, dst)
            return
        with locked_folder(dst, OLD) as holder:
            os.rename(dst, holder / "folder")
            try:
                os.rename(folder, dst)
            except BaseException:
                os.rename(holder / "folder", dst)
                raise


def check_place(dst: Path, sources: Iterable[Path], force: bool) -> None:
    """Raises ConversionError unless `dst` is free, or is a folder that may go."""
    if not os.path.lexists(dst):
        return
    for source in sources:
        if part := lost_with(dst, source):
            raise ConversionError(
                f"{dst} is or holds the source itself, or a part of it ({part} is needed from {source}); choose another folder"
            )
    if dst.exists() and not dst.is_dir():
        raise ConversionError(f"{dst} is a file, not a folder that could be replaced")
    if not force:
        raise ConversionError(f"{dst} exists; pass force=True (--force) to replace it")


def lost_with(dst: Path, source: Path) -> Path | None:
    """What of `source` would be gone without `dst`, under its real name; None when nothing would.

    Places are compared by what is there (device and inode), not by their spelling: links, ``..`` and the letter case of
    file systems that do not tell it apart lead to the same place. A source is lost with every folder on the way to it or to
    a file that it links to, and what lies inside it is a part of it. A link counts as what it points to.
    """
    real = source.resolve()
    if any(_same(place, dst) for place in (real, *real.parents)):
        return real
    for place in (dst.resolve(), dst.parent.resolve() / dst.name):
        if any(_same(parent, real) for parent in place.parents):
            return place
    for folder in _folders(real):
        for file in folder.iterdir():
            if file.is_symlink() and any(_same(place, dst) for place in (file.resolve(), *file.resolve().parents)):
                return file
    return None


def _folders(root: Path) -> list[Path]:
    """A folder and all below it, links not followed; nothing for a file."""
    return [Path(where) for where, _, _ in os.walk(root)]


def _same(first: Path, second: Path) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:  # one of them does not exist
        return False


@contextlib.contextmanager
def locked_folder(dst: Path, what: str) -> Iterator[Path]:
    """A temporary folder beside `dst` that nobody takes for a leftover; it is removed at the end, if still there."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{dst.name}-{what}-", dir=dst.parent))
        lock = _lock(folder, wait=True)
        if folder.exists():
            break
        _unlock(lock)  # another run took it for a leftover before it was locked
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _unlock(lock)


def _lock(folder: Path, wait: bool) -> int | None:
    """The descriptor of a folder that is locked for this process; None where it cannot be."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # in use, or a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def tidy(dst: Path, sources: Iterable[Path] = ()) -> None:
    """Removes what killed runs left beside `dst`, and puts back what they had moved away; a warning says so.

    What is in use, and what holds something of `sources`, stays.
    """
    found = [
        entry for entry in dst.parent.iterdir() if entry.name.startswith((f".{dst.name}-{PARTIAL}-", f".{dst.name}-{OLD}-"))
    ]
    for leftover in sorted(found):
        if leftover.is_symlink() or not leftover.is_dir() or any(lost_with(leftover, source) for source in sources):
            continue
        lock = _lock(leftover, wait=False)
        if lock is None:
            continue
        try:
            kept = leftover / "folder"
            if leftover.name.startswith(f".{dst.name}-{OLD}-") and os.path.lexists(kept) and not os.path.lexists(dst):
                os.rename(kept, dst)
                warnings.warn(f"{dst} was moved away by a run that was killed: it is back", stacklevel=2)
            else:
                warnings.warn(f"{leftover} was left by a run that was killed: it is removed", stacklevel=2)
            shutil.rmtree(leftover, ignore_errors=True)
        finally:
            _unlock(lock)
