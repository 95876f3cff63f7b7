"""Page pools, and the programs that were compiled for them."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax

from jaxspec.config import ConfigError
from jaxspec.engine.programs import pool_bytes, pools_program
from jaxspec.kvcache import LayerKV
from jaxspec.round import Program
from jaxspec.runtime import announced, check_activations, check_memory, compiled, own_settings

COMPILERS = 4
"""Programs that are compiled at once."""

LAUNCHES = threading.RLock()
"""Held by whoever compiles or launches: a program's first run on a GPU records a graph, during which no other thread may
launch anything (`cudaErrorStreamCaptureUnjoined`)."""


def device_of(tree: Any, draft_tree: Any) -> jax.Device:
    """The device that holds a target and its draft, where pools and programs go as well.

    Raises:
      ConfigError: they lie on several devices.
    """
    found = {}
    for name, part in (("target", tree), ("draft", draft_tree)):
        leaves = [x for x in jax.tree.leaves(part) if getattr(x, "committed", False)]
        found |= {device: name for leaf in leaves for device in leaf.devices()}
    if len(found) > 1:
        where = ", ".join(f"{device} ({name})" for device, name in found.items())
        raise ConfigError(f"target and draft lie on several devices: {where}; put both on one with jax.device_put")
    if found:
        return next(iter(found))
    leaf = jax.tree.leaves(tree)[0]
    return next(iter(leaf.devices())) if isinstance(leaf, jax.Array) else jax.local_devices()[0]


class Memory:
    """The page pools of a target and a drafter, and the programs that were compiled for them.

    Attributes:
      tree, draft_tree: the parameters.
      program: the static half of its programs, of any sampling class.
      page_size, num_pages: of the pools, the scratch page counted.
      dtype: the pools' type, that of the target's embedding.
      pools: the arrays, replaced at each launch; the target's first.
      compiled: when a program had been compiled (`time.perf_counter`), and the seconds that it took.
    """

    def __init__(self, tree: Any, draft_tree: Any, program: Program, *, page_size: int, num_pages: int):
        """Zeroed pools. Raises PoolTooLarge if they do not fit."""
        self.tree, self.draft_tree, self.program = tree, draft_tree, program
        self.device = device_of(tree, draft_tree)
        self.page_size, self.num_pages = page_size, num_pages
        self.dtype = str(tree["embedder"]["embedding"].dtype)
        self.compiled: list[tuple[float, float]] = []
        self.executables: dict[Any, Any] = {}
        self.static = {"program": program, "num_pages": num_pages, "page_size": page_size, "dtype": self.dtype}
        self.bytes = pool_bytes(program, draft_tree, num_pages, page_size, self.dtype)
        self.pools: tuple[LayerKV, ...] | None = None
        self.zero()

    def zero(self) -> None:
        """Zeroed pools in place of what is there."""
        self.pools = None
        check_memory(self.bytes, f"{(self.num_pages - 1) * self.page_size} positions in all", self.device)
        with LAUNCHES, own_settings(), jax.default_device(self.device):
            self.pools = pools_program(self.draft_tree, **self.static)

    def use(self, draft_tree: Any) -> None:
        """Takes other parameters of the drafter; programs stay if shapes do."""
        kind = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (self.draft_tree, draft_tree)]
        if kind[0] != kind[1]:
            self.executables.clear()
        self.draft_tree = draft_tree

    def compile_seconds(self, begin: float, end: float = math.inf) -> float:
        """Spent on compiling between two readings of `time.perf_counter`."""
        return sum(seconds for at, seconds in self.compiled if begin <= at <= end)

    def run(self, function, key: Any, *args, **static) -> Any:
        """Runs a jitted function, compiled once for `key`, which must tell all its shapes and static arguments apart."""
        program = self.executables.get((function, self._known(key)))
        if program is None:
            program = self.compile([(function, key, args, static)])[0]
        return program(*args)

    def knows(self, function, key: Any) -> bool:
        """Whether `run` would not compile."""
        return (function, self._known(key)) in self.executables

    @staticmethod
    def _known(key: Any) -> tuple:
        """A key with what its caller cannot know: the precision of products that the user wants now."""
        return key, jax.config.jax_default_matmul_precision

    def _compiled(self, function, args: tuple, static: dict) -> tuple[Any, float]:
        with jax.default_device(self.device):  # where what depends on no parameter is to go
            return compiled(function, *args, **static)

    def compile(self, wanted: list[tuple[Any, Any, tuple, dict]]) -> list[Any]:
        """Compiles what is missing of (function, key, arguments or their shapes, static arguments), all of it at once.

        Raises:
          PoolTooLarge: the device has no room for a program's activations.
        """
        wanted = [(f, self._known(key), args, static) for f, key, args, static in wanted]
        missing = [(f, key, args, static) for f, key, args, static in wanted if (f, key) not in self.executables]
        if missing:
            begun = time.perf_counter()
            with announced([f.__name__ for f, *_ in missing]), ThreadPoolExecutor(COMPILERS) as pool:
                jobs = [pool.submit(self._compiled, f, args, static) for f, _, args, static in missing]
                made = [job.result() for job in jobs]
            for (f, *_), (program, _) in zip(missing, made, strict=True):
                check_activations(program, f.__name__, self.device)
            self.executables |= {(f, key): program for (f, key, *_), (program, _) in zip(missing, made, strict=True)}
            if any(seconds for _, seconds in made):
                now = time.perf_counter()
                self.compiled.append((now, now - begun))
        return [self.executables[f, key] for f, key, *_ in wanted]


class Rehearsal:
    """Stands in for a `Memory`: programs give shapes, and are written down in `wanted` in place of being run."""

    def __init__(self, memory: Memory):
        self.tree, self.draft_tree, self.pools = memory.tree, memory.draft_tree, memory.pools
        self.program, self.page_size, self.dtype = memory.program, memory.page_size, memory.dtype
        self.wanted: dict[Any, tuple] = {}

    @own_settings()
    def run(self, function, key: Any, *args, **static) -> Any:
        """Shapes of the outputs."""
        shapes = jax.eval_shape(lambda *xs: xs, *args)
        self.wanted[function, key] = (function, key, shapes, static)
        return jax.eval_shape(partial(function, **static), *args)
