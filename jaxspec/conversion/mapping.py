"""The mapping engine: a table of rules says which stored tensors fill which parameter, and back.

A rule names a path of our parameter tree, the tensors it is made of, and a `Transform`: a pair of functions, one each way.
`check` proves that a table covers everything in both directions (each tensor used once, each parameter filled once, each
shape right) before a byte is read; `build` streams parameters, `unbuild` streams tensors for export. A format is nothing
but a function that returns rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.files.errors import ConversionError
from jaxspec.files.readers import TensorSource

FLOAT32_LEAVES = frozenset({"correction_bias"})
"""Parameters that stay float32 whatever type the others are converted to: rounding them changes discrete choices."""

PIECE = 1 << 20


@dataclass(frozen=True)
class Transform:
    """``join`` makes a parameter of its tensors, ``split`` gives them back.

    ``split`` must be made of views and slices: it also runs on a stand-in without memory, to tell the expected shapes.
    """

    name: str
    join: Callable[[Sequence[np.ndarray]], np.ndarray]
    split: Callable[[np.ndarray], Sequence[np.ndarray]]


@dataclass(frozen=True)
class Rule:
    """The parameter at `target` (``layers/0/attention/qkv/kernel``) is `transform` of the tensors `sources`."""

    target: str
    sources: tuple[str, ...]
    transform: Transform


@dataclass(frozen=True)
class Ignored:
    """Tensors that are left out on purpose: those whose whole name matches `pattern`, and why.

    With `same_as`, each of them must equal that tensor, otherwise the checkpoint says two different things.
    """

    pattern: str
    why: str
    same_as: str | None = None

    def matches(self, name: str) -> bool:
        """Whether `name` is one of them."""
        return re.fullmatch(self.pattern, name) is not None


COPY = Transform("copy", lambda t: t[0], lambda p: [p])
TRANSPOSE = Transform("transpose", lambda t: t[0].T, lambda p: [p.T])


def concatenate(*sizes: int) -> Transform:
    """Linear weights [out_i, in] → one kernel [in, Σ out]; biases [out_i] → [Σ out]."""
    cuts = np.cumsum(sizes)[:-1]
    return Transform(
        "concatenate" if len(sizes) < 3 else f"concatenate {len(sizes)}",
        lambda t: np.concatenate(t, axis=0).T,
        lambda p: np.split(p.T, cuts, axis=0),
    )


def stack(inner: Transform, count: int) -> Transform:
    """`count` groups of tensors, each joined by `inner`, stacked in front (experts)."""

    def join(tensors):
        width = len(tensors) // count
        return np.stack([inner.join(tensors[i * width : (i + 1) * width]) for i in range(count)])

    return Transform(f"stack {count} × {inner.name}", join, lambda p: [t for part in p for t in inner.split(part)])


def shifted(inner: Transform, offset: float) -> Transform:
    """`inner`, then the stored value minus `offset` (GGUF stores Gemma's norms as 1 + w)."""
    return Transform(
        f"{inner.name}, − {offset:g}",
        lambda t: inner.join(t) - np.asarray(offset, t[0].dtype),
        lambda p: inner.split(p + np.asarray(offset, p.dtype)),
    )


def flatten(tree: Mapping) -> dict[str, Any]:
    """Nested dicts → {"a/b/c": leaf}, in their own order."""
    return flatten_dict(tree, sep="/")


def unflatten(flat: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict:
    """The inverse of `flatten`."""
    return unflatten_dict(dict(flat), sep="/")


def expected_shapes(rule: Rule, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes that the tensors of a rule must have so that its parameter has `shape`."""
    stand_in = np.broadcast_to(np.zeros((), np.int8), shape)
    return [tuple(part.shape) for part in rule.transform.split(stand_in)]


def check(rules: Sequence[Rule], shapes: Mapping, tensors: TensorSource, ignored: Sequence[Ignored] = ()) -> None:
    """Proves full coverage in both directions; raises ConversionError naming the first few offenders.

    Args:
      rules: the table.
      shapes: the parameter tree with shapes as leaves (`jaxspec.models.decoder.param_shapes`).
      tensors: what the checkpoint holds.
      ignored: tensors that may be left out.
    """
    wanted = flatten(shapes)
    filled, used = {}, {}
    problems = []
    for rule in rules:
        if rule.target in filled:
            problems.append(f"parameter {rule.target} is filled twice")
        filled[rule.target] = rule
        if rule.target not in wanted:
            problems.append(f"the table fills {rule.target}, which the model does not have")
            continue
        sizes = expected_shapes(rule, wanted[rule.target])
        if len(sizes) != len(rule.sources):
            problems.append(f"parameter {rule.target} takes {len(sizes)} tensors, the table names {len(rule.sources)}")
            continue
        for name, shape in zip(rule.sources, sizes, strict=True):
            if name in used:
                problems.append(f"tensor {name} is used twice: for {used[name]} and {rule.target}")
            used[name] = rule.target
            if name not in tensors.info:
                problems.append(f"missing tensor {name} (shape {shape}), needed for {rule.target}")
            elif tuple(tensors.info[name].shape) != shape:
                problems.append(
                    f"tensor {name} has shape {tuple(tensors.info[name].shape)}, expected {shape} for {rule.target}"
                )
    problems += [f"parameter {path} is filled by no tensor" for path in wanted if path not in filled]
    for name, info in tensors.info.items():
        if name in used:
            continue
        reason = next((i for i in ignored if i.matches(name)), None)
        if reason is None:
            problems.append(f"extra tensor {name} (shape {tuple(info.shape)}, in {info.file}) that nothing uses")
        elif reason.same_as is not None and not _equal(tensors, name, reason.same_as):
            problems.append(f"tensor {name} differs from {reason.same_as}, but: {reason.why}")
    if problems:
        shown = "\n  ".join(problems[:8])
        more = f"\n  … and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ConversionError(f"the checkpoint does not fit its configuration:\n  {shown}{more}")


def _equal(tensors: TensorSource, name: str, other: str) -> bool:
    if other not in tensors.info or tensors.info[name][:2] != tensors.info[other][:2]:
        return False
    first, second = tensors.read(name), tensors.read(other)
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def cast(path: str, array: np.ndarray, dtype) -> np.ndarray:
    """A contiguous copy in `dtype` (None: as stored); integers and `FLOAT32_LEAVES` keep their type."""
    if path.rsplit("/", 1)[-1] in FLOAT32_LEAVES:
        dtype = np.float32
    elif dtype is None or not is_float(array.dtype):
        dtype = array.dtype
    with np.errstate(over="ignore"):  # `check_finite` says which parameter it is
        return np.array(array, dtype, order="C", copy=True)


def is_float(dtype) -> bool:
    """Whether a type is a floating one, ml_dtypes' included."""
    dtype = np.dtype(dtype)
    if np.issubdtype(dtype, np.floating):
        return True
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True


def build(rules: Iterable[Rule], tensors: TensorSource, dtype=None) -> Iterator[tuple[str, np.ndarray]]:
    """Streams (path, parameter) in the order of the rules; one parameter is in memory at a time."""
    for rule in rules:
        joined = rule.transform.join([tensors.read(name) for name in rule.sources])
        array = cast(rule.target, joined, dtype)
        check_finite(array, joined, rule)
        yield rule.target, array


def check_finite(array: np.ndarray, joined: np.ndarray, rule: Rule) -> None:
    """Raises ConversionError when a parameter holds NaN or infinity, and says whether its file or the cast put it there."""
    if not is_float(array.dtype) or all_finite(array):
        return
    if all_finite(joined):
        raise ConversionError(
            f"parameter {rule.target} holds values that are too large for {array.dtype}: take dtype=bfloat16 or float32"
        )
    raise ConversionError(
        f"parameter {rule.target} (from {', '.join(rule.sources[:3])}) holds NaN or infinity: its file is damaged"
    )


def all_finite(array: np.ndarray) -> bool:
    """Whether a floating array holds neither NaN nor infinity; a piece at a time, so that it costs no second array."""
    if array.dtype.itemsize == 2:  # the exponent's bits are looked at: ml_dtypes' own test is ten times slower
        mask = np.uint16(0x7C00 if array.dtype == np.float16 else 0x7F80)
        bits = np.ascontiguousarray(array).reshape(-1).view(np.uint16)
        return not any(((bits[i : i + PIECE] & mask) == mask).any() for i in range(0, bits.size, PIECE))
    flat = np.ascontiguousarray(array).reshape(-1)
    flat = flat if array.dtype in (np.float32, np.float64) else flat.astype(np.float32)
    return all(np.isfinite(flat[i : i + PIECE]).all() for i in range(0, flat.size, PIECE))


def unbuild(rules: Iterable[Rule], parameters: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Streams (tensor name, tensor): the inverse of `build`. `parameters` maps paths to arrays."""
    for rule in rules:
        parts = rule.transform.split(np.asarray(parameters[rule.target]))
        for name, part in zip(rule.sources, parts, strict=True):
            yield name, np.ascontiguousarray(part)


def table(rules: Sequence[Rule], shapes: Mapping, tensors: TensorSource, ignored: Sequence[Ignored] = (), dtype=None) -> str:
    """The mapping as text, a line for each parameter, then the tensors left out and why."""
    wanted = flatten(shapes)
    lines = []
    for rule in rules:
        infos = [tensors.info[name] for name in rule.sources]
        names = [f"{n} {list(i.shape)} {i.dtype}" for n, i in zip(rule.sources, infos, strict=True)]
        if len(names) > 4:
            names = [names[0], names[1], f"… {len(names) - 3} more …", names[-1]]
        stored = infos[0].dtype if dtype is None or not is_float(infos[0].dtype) else np.dtype(dtype)
        if rule.target.rsplit("/", 1)[-1] in FLOAT32_LEAVES:
            stored = np.dtype(np.float32)
        lines.append(f"{rule.target} {list(wanted[rule.target])} {stored}  ←  {rule.transform.name}({', '.join(names)})")
    used = {name for rule in rules for name in rule.sources}
    for name in tensors.info:
        if name not in used:
            why = next((i.why for i in ignored if i.matches(name)), "unknown")
            lines.append(f"(left out) {name}: {why}")
    return "\n".join(lines)
