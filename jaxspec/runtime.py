"""Settings of JAX and XLA that jaxspec applies, in one place, and the cache of compiled programs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec.config import ConfigError


class PoolTooLarge(ConfigError):
    """The KV pool does not fit into the memory that is left."""


def cache_dir(given: str | Path | None = None) -> Path:
    """jaxspec's cache folder: `given`, else $JAXSPEC_CACHE, else ``jaxspec`` in the user's cache folder of the platform."""
    if given is not None:
        return Path(given).expanduser()
    if os.environ.get("JAXSPEC_CACHE"):
        return Path(os.environ["JAXSPEC_CACHE"]).expanduser()
    if sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser()
    return root / "jaxspec"


def use_compilation_cache() -> None:
    """Keeps compiled programs between processes, unless the user chose a folder (or none) through JAX's own settings.

    ``JAX_COMPILATION_CACHE_DIR`` wins; ``JAXSPEC_COMPILATION_CACHE=0`` switches it off.
    """
    if jax.config.jax_compilation_cache_dir is not None or os.environ.get("JAXSPEC_COMPILATION_CACHE") == "0":
        return
    folder = cache_dir() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a read-only home: compile anew each time
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)  # on a GPU the many small ones add up to seconds


XLA_OPTIONS: dict[str, int | str] = {
    # Any number of operations may form a CUDA graph. With XLA's own minimum of 5 a step behind a conditional counts as one
    # operation in jax 0.11 and gets no graph at all.
    "xla_gpu_graph_min_graph_size": 1,
    # XLA's own choice and the last two: the loop over rounds is one graph, whose condition the device itself evaluates. With
    # a graph per round the host reads the condition in between. Drivers without such nodes (before CUDA 12.4) do as before.
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
}
"""What jaxspec asks of XLA on a GPU, program by program; a flag of the same name in ``XLA_FLAGS`` wins.

All else stays at XLA's defaults, autotuning on. JAX keeps its outcome beside the compiled programs (`use_compilation_cache`).
"""


def compiler_options() -> dict[str, int | str]:
    """`XLA_OPTIONS` for the default device, without those that the user set in ``XLA_FLAGS``; none on a CPU."""
    if jax.default_backend() not in ("gpu", "cuda"):
        return {}
    own = {flag.lstrip("-").partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    return {name: value for name, value in XLA_OPTIONS.items() if name not in own}


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """JAX as jaxspec is written for, whatever the process has set: 32-bit types by default, ranks promoted, NaN no error.

    Its programs are the same under ``jax_enable_x64``, ``jax_numpy_rank_promotion`` and ``jax_debug_nans``. (What stands in
    padding and free pages may be NaN; a row whose own logits are ends with an error.) ``jax_default_matmul_precision`` is the
    user's.
    """
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.debug_nans(False):
        yield


def placement(leaves: Sequence[Any]) -> tuple:
    """Where arrays lie on purpose and where others go: part of what a compiled program depends on, as is the precision of
    products."""
    shardings = tuple(leaf.sharding if getattr(leaf, "committed", False) else None for leaf in leaves)
    return (*shardings, jax.config.jax_default_device, jax.config.jax_default_matmul_precision)


_COMPILED: dict[Any, Any] = {}
_COMPILED_LOCK = threading.Lock()
MAX_COMPILED = 64
"""Programs that are kept; the one that was made first goes first. Each holds memory maps, of which a process has few."""


def forget_compiled() -> None:
    """Drops all compiled programs."""
    with _COMPILED_LOCK:
        _COMPILED.clear()


def compiled(function, *args, graphs: bool = True, **static) -> tuple[Any, float]:
    """The compiled form of a jitted function for these arguments, and the seconds spent on compiling it (0 when known).

    Compiling apart from running keeps compile time out of every timing that is reported. `args` are the traced
    arguments, in order, `static` the static ones by name. Without `graphs` a GPU launches every operation by itself, so
    that a profiler sees it. Threads may ask at once; those that ask for the same program may each compile it.
    """
    leaves, tree = jax.tree.flatten(args)
    shapes = tuple((leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in leaves)
    key = (function, tree, shapes, placement(leaves), graphs, tuple(sorted(static.items())))
    with _COMPILED_LOCK:
        known = _COMPILED.get(key)
        if known is not None:
            return known, 0.0
        while len(_COMPILED) >= MAX_COMPILED:  # before compiling: a process at its limit of memory maps cannot load another
            del _COMPILED[next(iter(_COMPILED))]
    start = time.perf_counter()
    options = compiler_options()
    if options and not graphs:
        options["xla_gpu_graph_min_graph_size"] = 1 << 30
    with own_settings():
        program = function.lower(*args, **static).compile(options)
    with _COMPILED_LOCK:
        while len(_COMPILED) >= MAX_COMPILED:  # other threads have added theirs meanwhile
            del _COMPILED[next(iter(_COMPILED))]
        _COMPILED[key] = program
    return program, time.perf_counter() - start


def _says_what_it_compiles() -> bool:
    """Whether somebody sits there who waits: a terminal or a notebook, not a test or a log file."""
    return "PYTEST_CURRENT_TEST" not in os.environ and ("ipykernel" in sys.modules or sys.stderr.isatty())


@contextlib.contextmanager
def announced(names: Sequence[str]) -> Iterator[None]:
    """Says on standard error what is compiled while somebody waits, once it has taken half a second, and how long it took."""
    if not _says_what_it_compiles():
        yield
        return
    what = ", ".join(sorted({name.removesuffix("_program").replace("_", " ") for name in names}))
    begun, said = time.perf_counter(), threading.Event()

    def say() -> None:
        said.set()
        print(f"compiling {what} …", end="", file=sys.stderr, flush=True)

    timer = threading.Timer(0.5, say)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if said.is_set():
            print(f" {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)


def available_bytes(device: jax.Device | None = None) -> int | None:
    """Memory that a new pool may take: free memory of a device (None: the first), or of this machine for a CPU; None if
    unknown."""
    found = _memory(device)
    return None if found is None else found[1]


def total_bytes(device: jax.Device | None = None) -> int | None:
    """Memory of a device (None: the first), or of this machine for a CPU; None if unknown."""
    found = _memory(device)
    return None if found is None else found[0]


def _memory(device: jax.Device | None) -> tuple[int, int] | None:
    """(all, free) bytes."""
    device = device or jax.devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        return stats["bytes_limit"], stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return tuple(int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None


def check_memory(needed: int, what: str, device: jax.Device | None = None) -> None:
    """Raises PoolTooLarge unless `needed` bytes are free for a KV pool of `what`; the message says what to turn."""
    there = available_bytes(device)
    if there is not None and needed > there:
        raise PoolTooLarge(
            f"the KV pool needs {needed:,} bytes, {there:,} are available ({what}): lower max_new_tokens or shorten the "
            "prompts, give fewer prompts at once, or use a smaller tree (num_draft_tokens, topk, num_steps)"
        )


def check_activations(program: Any, name: str, device: jax.Device | None = None) -> None:
    """Raises PoolTooLarge unless what a compiled program holds while it runs is free; the message says what to turn."""
    analysis, there = program.memory_analysis(), available_bytes(device)
    if analysis is None or there is None or analysis.temp_size_in_bytes <= there:
        return
    raise PoolTooLarge(
        f"activations of {name.removesuffix('_program')!r} need {analysis.temp_size_in_bytes:,} bytes beside weights and KV "
        f"pool, {there:,} are available: give fewer prompts at once (an Engine: max_running_requests), or lower prefill_chunk "
        "or the size of the tree (num_draft_tokens, topk, num_steps)"
    )
