"""Converted folders: parameters as orbax checkpoints, ``config.json`` beside them. Orbax is used in this file only.

A tree is saved as a few orbax checkpoints, ``params/shard_00000`` …, each a nested sub-tree of whole arrays: a stream of
parameters is written without the tree ever being in memory, and merging the shards gives the tree.

    DST/config.json         format version, kind, the configuration, provenance
    DST/params/shard_*      orbax checkpoints
    DST/tokenizer.json …    see `jaxspec.conversion.tokenizer`
    DST/drafts/<name>/      draft heads that came in the same files: converted folders of their own
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.conversion.errors import ConversionError, MissingFileError
from jaxspec.conversion.mapping import FLOAT32_LEAVES, flatten, is_float, unflatten
from jaxspec.conversion.readers import TensorInfo
from jaxspec.drafters.dflash_config import DFlashConfig
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.drafters.mtp_config import MtpConfig
from jaxspec.drafters.uno_config import UnoConfig

FORMAT_VERSION = 1
SHARD_BYTES = 1 << 27

CONFIG_TYPES: dict[str, type] = {
    "model": ModelConfig,
    "mtp": MtpConfig,
    "eagle": EagleConfig,
    "dflash": DFlashConfig,
    "uno": UnoConfig,
}
"""``kind`` of a converted folder → its configuration class, which has ``to_json`` and ``from_json``."""


def kind_of(config: Any) -> str:
    """The kind under which a configuration is stored."""
    return next(kind for kind, cls in CONFIG_TYPES.items() if type(config) is cls)


def write_config(folder: Path, config: Any, provenance: Mapping[str, Any], num_shards: int) -> None:
    """``config.json`` of a converted folder."""
    data = {
        "jaxspec_format": FORMAT_VERSION,
        "kind": kind_of(config),
        "config": config.to_json(),
        "num_shards": num_shards,
        "provenance": dict(provenance),
    }
    (folder / "config.json").write_text(json.dumps(data, indent=2) + "\n")


def is_converted(folder: Path) -> bool:
    """Whether a folder was written by `save` and `write_config`."""
    try:
        return "jaxspec_format" in json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, TypeError):
        return False


def read_config(folder: Path) -> tuple[Any, dict]:
    """The configuration of a converted folder, and the whole of its ``config.json``.

    Raises ConversionError for another format version, an unknown kind or a damaged file.
    """
    file = folder / "config.json"
    try:
        data = json.loads(file.read_text())
        version, kind, config = data["jaxspec_format"], data["kind"], data["config"]
    except FileNotFoundError:
        raise MissingFileError(f"{file} does not exist") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"{file} is not the configuration of a converted folder ({error!r})") from None
    if version != FORMAT_VERSION:
        raise ConversionError(f"{file} has format version {version}, this jaxspec reads {FORMAT_VERSION}: convert it again")
    if kind not in CONFIG_TYPES:
        raise ConversionError(f"{file} is of the unknown kind {kind!r}; known: {', '.join(CONFIG_TYPES)}")
    try:
        return CONFIG_TYPES[kind].from_json(config), data
    except (ConfigError, TypeError) as error:
        raise ConversionError(f"{file}: {error}") from None


def _checkpointer():
    import orbax.checkpoint as ocp

    for name in ("absl", "orbax"):  # progress notes of every save and restore
        logging.getLogger(name).setLevel(logging.ERROR)
    return ocp.StandardCheckpointer()


def save(parameters: Iterable[tuple[str, np.ndarray]], folder: Path, shard_bytes: int = SHARD_BYTES) -> int:
    """Writes a stream of (path, array) as shards of about `shard_bytes`; returns their number.

    At most one shard is in memory beside what orbax buffers while writing it.
    """
    shard: dict[str, np.ndarray] = {}
    count = size = 0

    def write():
        nonlocal shard, count, size
        if not shard:
            return
        with _checkpointer() as checkpointer:
            checkpointer.save(folder.absolute() / f"shard_{count:05d}", unflatten(shard))
        shard, count, size = {}, count + 1, 0

    for path, array in parameters:
        if shard and size + array.nbytes > shard_bytes:
            write()
        shard[path] = array
        size += array.nbytes
    write()
    return count


def _shards(folder: Path, num_shards: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """(path, {parameter path: metadata}) of every shard."""
    for i in range(num_shards):
        path = folder.absolute() / f"shard_{i:05d}"
        if not path.exists():
            raise MissingFileError(f"{path} does not exist: the converted folder is incomplete, convert it again")
        with _checkpointer() as checkpointer:
            meta = checkpointer.metadata(path)
        meta = getattr(meta, "item_metadata", meta)
        yield path, flatten(getattr(meta, "tree", meta))


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
      dtype: for floating parameters; integers and `FLOAT32_LEAVES` keep their type.
      device: where to; None for the default device.

    Raises:
      ConversionError: a parameter is missing, extra or mis-shaped.
    """
    sharding = jax.sharding.SingleDeviceSharding(device or jax.devices()[0])
    shards = list(_shards(folder, num_shards))
    check_shapes({path: info for _, infos in shards for path, info in infos.items()}, shapes, folder)
    tree: dict[str, Any] = {}
    for shard, infos in shards:
        like = {}
        for path, info in infos.items():
            keep = dtype is None or not is_float(info.dtype) or path.rsplit("/", 1)[-1] in FLOAT32_LEAVES
            like[path] = jax.ShapeDtypeStruct(info.shape, info.dtype if keep else dtype, sharding=sharding)
        with _checkpointer() as checkpointer:
            tree |= flatten(checkpointer.restore(shard, unflatten(like)))
    return unflatten({path: tree[path] for path in flatten(shapes)})


class ConvertedTensors:
    """A converted folder as a tensor source: its parameters under their paths, one shard in memory at a time.

    Heads that came along are in it too, under ``drafts/<name>/`` in front of their paths.
    """

    def __init__(self, folder: Path):
        self.info: dict[str, TensorInfo] = {}
        self._where: dict[str, tuple[Path, str]] = {}
        self._loaded: tuple[Path | None, dict[str, np.ndarray]] = (None, {})
        for lead, part in [("", folder), *((f"drafts/{name}/", path) for name, path in draft_folders(folder).items())]:
            _, data = read_config(part)
            for shard, infos in _shards(part / "params", data["num_shards"]):
                for path, info in infos.items():
                    self.info[lead + path] = TensorInfo(tuple(info.shape), np.dtype(info.dtype), lead + shard.name)
                    self._where[lead + path] = shard, path

    def read(self, name: str) -> np.ndarray:
        """The parameter called `name`, as stored."""
        shard, inner = self._where[name]
        if self._loaded[0] != shard:
            self._loaded = (None, {})
            like = {
                path: np.empty(self.info[full].shape, self.info[full].dtype)
                for full, (where, path) in self._where.items()
                if where == shard
            }
            with _checkpointer() as checkpointer:
                self._loaded = (shard, flatten(checkpointer.restore(shard, unflatten(like))))
        return np.asarray(self._loaded[1][inner])


def draft_folders(folder: Path) -> dict[str, Path]:
    """Heads inside a converted folder, by name: converted folders themselves."""
    return {path.name: path for path in sorted((folder / "drafts").glob("*")) if is_converted(path)}
