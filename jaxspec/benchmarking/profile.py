"""Device time of a compiled round by parts, from a profiler trace of the program that is timed.

Every operation in a trace names the HLO instruction that it belongs to, and the compiled program says which scopes that
instruction came from. The program is compiled once more without CUDA graphs, so that kernels are seen one by one; the
time between kernels is therefore taken from the unwatched run, not from here.
"""

from __future__ import annotations

import glob
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from jaxspec.benchmarking.parts import part_of

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = ")
_OP_NAME = re.compile(r"op_name=\"([^\"]*)\"")
_CALLS = re.compile(r"calls=%?([\w.-]+)")
_NAMES = re.compile(r"%([\w.-]+)")
_PRODUCT = re.compile(r" dot\(|custom_call_target=\"__cublas")
_NUMBER = re.compile(r"[._]\d+$")
_CONTAINERS = re.compile(r"^(while|call|conditional|async|command_buffer|end: )")


class Operation(NamedTuple):
    """One execution of an instruction on the device: its name, start and duration in seconds, its program ("" if unknown)."""

    instruction: str
    start: float
    seconds: float
    module: str = ""


class Source(NamedTuple):
    """Where an instruction comes from: scopes and primitive separated by slashes, and whether it holds a weight's product."""

    op_name: str
    is_product: bool


def instruction_sources(hlo: str) -> dict[str, Source]:
    """Instruction name → source, from a compiled program's text.

    A fusion is a product when a matrix product is fused into it, whatever its root is. XLA drops the op_name of some
    instructions that it rewrites: these take that of what is fused into them, else that of the first instruction that
    uses them.
    """
    own: dict[str, str] = {}
    calls: dict[str, str] = {}
    user: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    products: set[str] = set()
    computation = ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif instruction := _INSTRUCTION.match(line):
            name, op_name = instruction[1], _OP_NAME.search(line)
            own[name] = op_name[1] if op_name else ""
            if own[name]:
                names.setdefault(computation, []).append(own[name])
            if own[name].endswith("dot_general") or _PRODUCT.search(line):
                products |= {name, computation}
            if called := _CALLS.search(line):
                calls[name] = called[1]
            for operand in _NAMES.findall(line)[1:]:
                user.setdefault(operand, name)

    def scope(name: str) -> str:
        for _ in range(8):
            fused = names.get(calls.get(name, ""))
            if own[name] or fused or user.get(name) not in own:
                return own[name] or (fused[-1] if fused else "")
            name = user[name]
        return ""

    return {name: Source(scope(name), name in products or calls.get(name) in products) for name in own}


def record(
    run: Callable[[], Any], module: str | None = None, read: Callable[[Any], list[Operation]] | None = None
) -> list[Operation]:
    """Runs `run` under the profiler and returns what the device did; empty where the platform reports no instructions.

    Args:
      run: the work; it must wait for its results.
      module: keep this program's operations only ("jit_run_rounds").
      read: `operations` (None) or `kernels`.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        files = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        found = [op for file in files for op in (read or operations)(jax.profiler.ProfileData.from_file(file))]
    return [op for op in found if module is None or op.module.partition("(")[0] in ("", module)]


def operations(data: Any) -> list[Operation]:
    """The operations in a trace. On a GPU they lie on the device's stream lines, on a CPU on the lines of host threads."""
    devices, lines = _lines(data)
    if devices:  # a device's other lines repeat the same operations, grouped
        streams = [op for line in lines if line.name.startswith("Stream") for op in _annotated(line)]
        return streams or [op for line in lines if line.name == "XLA Ops" for op in _named(line)]
    return [op for line in lines for op in _annotated(line)]


def kernels(data: Any) -> list[Operation]:
    """All that ran on the device under the kernels' own names, also inside CUDA graphs, where no instruction is known."""
    devices, lines = _lines(data)
    if devices:
        return [op for line in lines if line.name.startswith("Stream") for op in _named(line)]
    return operations(data)


def _lines(data: Any) -> tuple[bool, list]:
    """Whether the trace has device planes, and their lines, else those of the host."""
    planes = list(data.planes)
    devices = [p for p in planes if p.name.startswith("/device:")]
    return bool(devices), [line for plane in devices or planes for line in plane.lines]


def _named(line: Any) -> Iterable[Operation]:
    for event in line.events:
        yield Operation(event.name, event.start_ns * 1e-9, event.duration_ns * 1e-9)


def _annotated(line: Any) -> Iterable[Operation]:
    for event in line.events:
        stats = {key: str(value) for key, value in event.stats if key in ("hlo_op", "hlo_module")}
        instruction = stats.get("hlo_op")
        if instruction and not _CONTAINERS.match(instruction):
            yield Operation(instruction, event.start_ns * 1e-9, event.duration_ns * 1e-9, stats.get("hlo_module", ""))


def seconds_by_part(found: Iterable[Operation], sources: dict[str, Source]) -> dict[str, float]:
    """Adds up device time by part; a fusion belongs to the scope of its root."""
    total: Counter[str] = Counter()
    for operation in found:
        total[part_of(*sources.get(operation.instruction, Source("", False)))] += operation.seconds
    return dict(total)


def busy_seconds(found: Iterable[Operation]) -> float:
    """Length of the union of all operations' intervals."""
    busy, end = 0.0, 0.0
    for operation in sorted(found, key=lambda op: op.start):
        stop = operation.start + operation.seconds
        busy += max(0.0, stop - max(end, operation.start))
        end = max(end, stop)
    return busy


class Gap(NamedTuple):
    """Idle time of the device: when it began, how long it was in seconds, the instructions before and behind it."""

    start: float
    seconds: float
    after: str
    before: str


def idle_gaps(found: Iterable[Operation]) -> list[Gap]:
    """When the device did nothing between operations, the longest first."""
    gaps, last = [], None
    for operation in sorted(found, key=lambda op: op.start):
        end = None if last is None else last.start + last.seconds
        if end is not None and operation.start > end:
            gaps.append(Gap(end, operation.start - end, last.instruction, operation.instruction))
        if end is None or operation.start + operation.seconds >= end:
            last = operation
    return sorted(gaps, key=lambda gap: -gap.seconds)


def largest(found: Iterable[Operation], sources: dict[str, Source], count: int = 24) -> list[tuple[str, str, int, float]]:
    """What takes most time: (name, scopes, executions, seconds), instructions of one name and origin together.

    Names end in a number (``gemm_fusion_dot.386``): the same operation of all layers is one line.
    """
    time: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    unknown = Source("", False)
    for operation in found:
        key = _NUMBER.sub("", operation.instruction), sources.get(operation.instruction, unknown).op_name
        time[key] += operation.seconds
        times[key] += 1
    return [(*key, times[key], seconds) for key, seconds in time.most_common(count)]
