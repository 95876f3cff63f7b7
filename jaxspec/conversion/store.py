"""Converted folders: parameters as orbax checkpoints, ``config.json`` beside them. Orbax is used in this file only.

A tree is saved as a few orbax checkpoints, ``params/shard_00000`` …, each a nested sub-tree of whole arrays: a stream of
parameters is written without the tree ever being in memory, and merging the shards gives the tree.

    DST/config.json         format version, kind, the configuration, provenance
    DST/params/shard_*      orbax checkpoints
    DST/params/checksums.json  see `jaxspec.files.checksums`
    DST/tokenizer.json …    see `jaxspec.tokenizer.tokenizer`
    DST/drafts/<name>/      draft heads that came in the same files: converted folders of their own
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.conversion.mapping import FLOAT32_LEAVES, flatten, is_float, unflatten
from jaxspec.conversion.quantize import dequantize, quantized_paths, stored
from jaxspec.drafters.kinds import format_of, formats
from jaxspec.files.checksums import SMALL, check_arrays, checksum, read_checksums, write_checksums
from jaxspec.files.errors import ConversionError, MissingFileError, shown
from jaxspec.files.readers import TensorInfo
from jaxspec.files.values import build_config, parse_json, said

FORMAT_VERSION = 1
SHARD_BYTES = 1 << 27
MAX_SHARDS = 99999


def write_config(folder: Path, config: Any, provenance: Mapping[str, Any], num_shards: int) -> None:
    """``config.json`` of a converted folder."""
    data = {
        "jaxspec_format": FORMAT_VERSION,
        "kind": format_of(config).stored,
        "config": config.to_json(),
        "num_shards": num_shards,
        "provenance": dict(provenance),
    }
    (folder / "config.json").write_text(json.dumps(data, indent=2) + "\n")


def is_converted(folder: Path) -> bool:
    """Whether a folder was written by `save` and `write_config`."""
    try:
        return "jaxspec_format" in parse_json((folder / "config.json").read_bytes(), folder)
    except (OSError, ConversionError):
        return False


def is_quantized(folder: Path) -> bool:
    """Whether a converted folder, or a head inside it, is stored in eight bits."""
    parts = [folder, *draft_folders(folder).values()] if is_converted(folder) else []
    return any(read_config(part)[1].get("provenance", {}).get("quantized") for part in parts)


def read_config(folder: Path) -> tuple[Any, dict]:
    """The configuration of a converted folder, and the whole of its ``config.json``.

    Raises ConversionError for another format version, an unknown kind or a damaged file.
    """
    file = folder / "config.json"
    if not file.exists():
        raise MissingFileError(f"{file} does not exist")
    data = parse_json(file.read_bytes(), file)
    missing = [key for key in ("jaxspec_format", "kind", "config", "num_shards") if key not in data]
    if missing:
        raise ConversionError(f"{file} is not the configuration of a converted folder: it lacks {', '.join(missing)}")
    version, kind, known = data["jaxspec_format"], data["kind"], formats()
    if version != FORMAT_VERSION:
        raise ConversionError(
            f"{file} has format version {said(version)}, this jaxspec reads {FORMAT_VERSION}: convert it again"
        )
    if not isinstance(kind, str) or kind not in known:
        raise ConversionError(f"{file} is of the unknown kind {said(kind)}; known: {', '.join(known)}")
    count, provenance = data["num_shards"], data.get("provenance", {})
    if type(count) is not int or not 0 <= count <= MAX_SHARDS:
        raise ConversionError(f"{file}: num_shards is {said(count)}, expected a whole number from 0 to {MAX_SHARDS}")
    if not isinstance(provenance, dict):
        raise ConversionError(f"{file}: provenance is {said(provenance)}, expected an object")
    return build_config(known[kind].config, data["config"], file), data


def _checkpointer():
    import orbax.checkpoint as ocp

    for name in ("absl", "orbax"):  # progress notes of every save and restore
        logging.getLogger(name).setLevel(logging.ERROR)
    return ocp.StandardCheckpointer()


def save(
    parameters: Iterable[tuple[str, np.ndarray]], folder: Path, shard_bytes: int = SHARD_BYTES, *, quantize: str | None = None
) -> int:
    """Writes a stream of (path, array) as shards of about `shard_bytes`; returns their number.

    At most one shard is in memory beside what orbax buffers while writing it.

    Args:
      parameters: the stream.
      folder: the ``params`` folder.
      shard_bytes: size from which a new shard is begun.
      quantize: "int8" stores large parameters in eight bits (`jaxspec.conversion.quantize`); None stores all as they are.
    """
    shard: dict[str, np.ndarray] = {}
    sums: dict[str, int] = {}
    count = size = 0

    def write():
        nonlocal shard, count, size
        if not shard:
            return
        goal = folder.absolute() / f"shard_{count:05d}"
        with writing(goal), _checkpointer() as checkpointer:
            checkpointer.save(goal, unflatten(shard))
        shard, count, size = {}, count + 1, 0

    for pieces in stored(parameters, quantize):
        added = sum(array.nbytes for _, array in pieces)
        if shard and size + added > shard_bytes:
            write()
        shard |= pieces
        size += added
        sums |= {path: checksum(array) for path, array in pieces}
    write()
    with writing(folder):
        write_checksums(folder, sums)
    return count


@contextlib.contextmanager
def writing(goal: Path) -> Iterator[None]:
    """A full disk, however a library reports it, becomes a ConversionError that says so."""
    try:
        yield
    except Exception as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)
        if not full:
            raise
        raise ConversionError(f"{goal} cannot be written: the disk is full") from error


def write_folder(
    folder: Path, config: Any, tree: Mapping, provenance: Mapping[str, Any], *, quantize: str | None = None
) -> None:
    """A whole converted folder from a parameter tree in memory: trained heads are written like this.

    Args:
      folder: new or empty.
      config: its configuration (one of those that `jaxspec.drafters.kinds.formats` lists).
      tree: nested dicts of arrays.
      provenance: where it comes from, in JSON's types.
      quantize: as for `save`; goes into the provenance.
    """
    (folder / "params").mkdir(parents=True)
    stream = ((path, np.asarray(array)) for path, array in flatten(tree).items())
    shards = save(stream, folder / "params", quantize=quantize)
    write_config(folder, config, {**provenance, "quantized": quantize}, shards)


def _shards(folder: Path, num_shards: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """(path, {parameter path: metadata}) of every shard."""
    for i in range(num_shards):
        path = folder.absolute() / f"shard_{i:05d}"
        if not path.exists():
            raise MissingFileError(f"{path} does not exist: the converted folder is incomplete, convert it again")
        with _whole(path), _checkpointer() as checkpointer:
            meta = checkpointer.metadata(path)
            meta = getattr(meta, "item_metadata", meta)
            infos = flatten(getattr(meta, "tree", meta))
            if not all(hasattr(info, "shape") and hasattr(info, "dtype") for info in infos.values()):
                raise ConversionError(f"{path} is damaged (its metadata names no arrays): convert the folder again")
        yield path, infos


@contextlib.contextmanager
def _whole(shard: Path) -> Iterator[None]:
    """What orbax stumbles over in a damaged shard becomes a ConversionError that names it."""
    try:
        yield
    except ConversionError:
        raise
    except Exception as error:  # orbax and tensorstore raise errors of many kinds
        raise ConversionError(
            f"{shard} is damaged ({type(error).__name__}: {shown(error)}): convert the folder again"
        ) from error


def _as_read(infos: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """{parameter path: what reading it gives}: a pair is one float32 parameter."""
    pairs = set(quantized_paths(infos))
    found = {}
    for path, info in infos.items():
        base, _, name = path.rpartition("/")
        if base not in pairs:
            found[path] = TensorInfo(tuple(info.shape), np.dtype(info.dtype), "")
        elif name == "q":
            found[base] = TensorInfo(tuple(info.shape), np.dtype(np.float32), "")
    return found


def _restore(shard: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """{path: array} of a shard, each of the type and at the place that `like` has for it."""
    with _whole(shard), _checkpointer() as checkpointer:
        return flatten(checkpointer.restore(shard, unflatten(like)))


def check_shapes(found: Mapping[str, Any], shapes: Mapping, where: Path) -> None:
    """Stored arrays and the configuration must agree, parameter by parameter."""
    wanted = flatten(shapes)
    problems = [f"missing parameter {p} (shape {s})" for p, s in wanted.items() if p not in found]
    for path, info in found.items():
        if path not in wanted:
            problems.append(f"extra parameter {path} (shape {tuple(info.shape)})")
        elif tuple(info.shape) != tuple(wanted[path]):
            problems.append(f"parameter {path} has shape {tuple(info.shape)}, expected {tuple(wanted[path])}")
    if problems:
        raise ConversionError(f"{where} does not fit its config.json:\n  " + "\n  ".join(problems[:8]))


def load(folder: Path, num_shards: int, shapes: Mapping, dtype=None, device: jax.Device | None = None) -> dict:
    """The tree, restored straight into device arrays of `dtype` (None: as stored).

    Args:
      folder: the ``params`` folder.
      num_shards: how many shards it must have.
      shapes: the expected tree of shapes.
      dtype: for floating parameters; integers and `FLOAT32_LEAVES` keep their type. What is stored in eight bits comes
        back as `dtype`, too (None: float32).
      device: where to; None for the default device.

    Raises:
      ConversionError: a parameter is missing, extra or mis-shaped.
    """
    sharding = jax.sharding.SingleDeviceSharding(device or jax.devices()[0])
    shards = list(_shards(folder, num_shards))
    check_shapes({path: info for _, infos in shards for path, info in _as_read(infos).items()}, shapes, folder)
    tree: dict[str, Any] = {}
    sums = read_checksums(folder)
    for shard, infos in shards:
        pairs = quantized_paths(infos)
        halves = {f"{path}/{half}" for path in pairs for half in ("q", "scale")}
        small = {path for path, info in infos.items() if _bytes(info) <= SMALL} if sums else set()
        as_stored = halves | small
        like: dict[str, Any] = {path: np.empty(infos[path].shape, infos[path].dtype) for path in as_stored}
        wanted = {}
        for path in infos.keys() - halves:
            info = infos[path]
            keep = dtype is None or not is_float(info.dtype) or path.rsplit("/", 1)[-1] in FLOAT32_LEAVES
            wanted[path] = info.dtype if keep else dtype
            if path not in small:
                like[path] = jax.ShapeDtypeStruct(info.shape, wanted[path], sharding=sharding)
        found = _restore(shard, like)
        check_arrays(sums, {path: found[path] for path in as_stored}, shard)
        for path in small - halves:
            found[path] = jax.device_put(np.asarray(found[path]).astype(wanted[path]), sharding)
        for path in pairs:
            q, scale = (np.asarray(found.pop(f"{path}/{half}")) for half in ("q", "scale"))
            found[path] = jax.device_put(dequantize(q, scale, dtype), sharding)
        tree |= found
    return unflatten({path: tree[path] for path in flatten(shapes)})


def _bytes(info: Any) -> int:
    return math.prod(info.shape) * np.dtype(info.dtype).itemsize


def verify(folder: Path) -> int:
    """Reads every array of a converted folder, heads inside it included, and compares it with its checksum.

    Returns:
      How many arrays are as they were written.

    Raises:
      ConversionError: one is not, or the folder was written without checksums.
    """
    count = 0
    for part in (folder, *draft_folders(folder).values()):
        _, data = read_config(part)
        sums = read_checksums(part / "params")
        if not sums:
            raise ConversionError(f"{part} was written without checksums: convert its original again to have them")
        seen = set()
        for shard, infos in _shards(part / "params", data["num_shards"]):
            found = _restore(shard, {path: np.empty(info.shape, info.dtype) for path, info in infos.items()})
            check_arrays(sums, found, shard)
            seen |= found.keys()
        if lost := sums.keys() - seen:
            raise ConversionError(f"{part} has lost the parameter {min(lost)}: convert it again")
        count += len(seen)
    return count


class ConvertedTensors:
    """A converted folder as a tensor source: its parameters under their paths, one shard in memory at a time.

    Heads that came along are in it too, under ``drafts/<name>/`` in front of their paths.
    """

    def __init__(self, folder: Path):
        self.info: dict[str, TensorInfo] = {}
        self._where: dict[str, tuple[Path, str]] = {}
        self._stored: dict[Path, Mapping[str, Any]] = {}
        self._loaded: tuple[Path | None, dict[str, np.ndarray]] = (None, {})
        for lead, part in [("", folder), *((f"drafts/{name}/", path) for name, path in draft_folders(folder).items())]:
            _, data = read_config(part)
            for shard, infos in _shards(part / "params", data["num_shards"]):
                self._stored[shard] = infos
                for path, info in _as_read(infos).items():
                    self.info[lead + path] = info._replace(file=lead + shard.name)
                    self._where[lead + path] = shard, path

    def read(self, name: str) -> np.ndarray:
        """The parameter called `name`, as stored (float32 for one that is stored in eight bits)."""
        shard, inner = self._where[name]
        if self._loaded[0] != shard:
            self._loaded = (None, {})
            like = {path: np.empty(info.shape, info.dtype) for path, info in self._stored[shard].items()}
            self._loaded = (shard, _restore(shard, like))
            check_arrays(read_checksums(shard.parent), self._loaded[1], shard)
        found = self._loaded[1]
        return np.asarray(found[inner]) if inner in found else dequantize(found[f"{inner}/q"], found[f"{inner}/scale"])


def draft_folders(folder: Path) -> dict[str, Path]:
    """Heads inside a converted folder, by name: converted folders themselves."""
    return {path.name: path for path in sorted((folder / "drafts").glob("*")) if is_converted(path)}
