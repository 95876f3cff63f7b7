"""One round of any algorithm, timed on the product's own compiled program and taken apart.

The time is (n2 rounds − n1 rounds) / (n2 − n1) of `jaxspec.round.run_rounds`, so that launch and prefill drop out; the
context is set by writing the length over random KV, without a prefill.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.benchmarking import profile
from jaxspec.benchmarking.bandwidth import Bandwidth
from jaxspec.benchmarking.parts import PARTS
from jaxspec.benchmarking.reads import round_reads
from jaxspec.benchmarking.simulated import SimulatedAcceptance
from jaxspec.config import ConfigError, SpecConfig
from jaxspec.engine.batch import Batch, open_batch
from jaxspec.kvcache import LayerKV, is_pool
from jaxspec.round import RoundState, run_rounds
from jaxspec.runtime import compiled
from jaxspec.speculation import Speculation

PROGRAM = "jit_run_rounds"
PROFILED_ROUNDS = 4
ALPHABET = 64
"""Token ids of the random texts: few, so that n-grams find something."""


@dataclasses.dataclass(frozen=True)
class RoundCase:
    """What to measure.

    Attributes:
      name: of the row, e.g. "eagle3 3/1/4".
      algorithm: SGLang's name of the algorithm.
      spec: the tree's parameters.
      batch: sequences.
      context: committed tokens of each sequence when the timing begins.
      accept_length: tokens that a round is made to emit (`SimulatedAcceptance`); None leaves it to the target.
      page_size: positions per KV page.
    """

    name: str
    algorithm: str
    spec: SpecConfig
    batch: int = 1
    context: int = 512
    accept_length: float | None = 3.0
    page_size: int = 16


@dataclasses.dataclass(frozen=True)
class RoundResult:
    """A measured round.

    Attributes:
      name, batch, context: the case.
      ms: median milliseconds of a round.
      spread_ms: largest minus smallest of the repeats.
      floor_ms: bytes that must be read / copy bandwidth.
      copy_tbps, read_tbps: bandwidths of the same run, TB/s.
      parts: part → {ms, bytes, share}: device time of a round, bytes to be read, their floor's share of the time. "gaps" is
        what the round takes beyond the device time of all parts; empty when no trace could be had.
      accept_length: tokens that a sequence emitted per round.
      tokens_per_second: of the whole batch at that length.
      compile_seconds: what compiling the round took.
    """

    name: str
    batch: int
    context: int
    ms: float
    spread_ms: float
    floor_ms: float
    copy_tbps: float
    read_tbps: float
    parts: dict[str, dict[str, float]]
    accept_length: float
    tokens_per_second: float
    compile_seconds: float

    def to_json(self) -> dict:
        """Plain JSON types."""
        return dataclasses.asdict(self)


def prepare(case: RoundCase, target: Any, draft: Any, max_rounds: int) -> Batch:
    """A batch that stands behind `case.context` random tokens, with random KV, ready for `max_rounds` rounds.

    Raises:
      ConfigError: the case cannot work with this target and draft, or its context does not fit.
    """
    if case.batch < 1 or case.context < 1:
        raise ConfigError(f"batch={case.batch} and context={case.context} must be at least 1")
    drafter = Speculation.choose(target, draft, case.algorithm, case.spec).program.drafter
    simulated = None
    if (
        case.accept_length is not None and drafter.max_accept > 1
    ):  # tokens that are settled while drafting are emitted beside the accepted path
        simulated = SimulatedAcceptance(max(1.0, case.accept_length - drafter.num_exact))
    emitted = drafter.max_accept
    if simulated is not None:
        emitted = min(emitted, math.ceil(simulated.length) + drafter.num_exact)
    room = 2 + max_rounds * emitted
    if case.context + room > target.config.max_positions:
        raise ConfigError(
            f"context={case.context} and {max_rounds} rounds need {case.context + room} positions, the target has "
            f"{target.config.max_positions}: shorten the context or run fewer rounds"
        )
    rng = np.random.default_rng(0)
    text = rng.integers(0, min(ALPHABET, target.config.vocab_size), (case.batch, case.context + 1))
    batch = open_batch(
        target,
        text[:, :-1].tolist(),
        draft=draft,
        algorithm=case.algorithm,
        spec=case.spec,
        seed=list(range(case.batch)),
        ignore_eos=True,
        max_new_tokens=room,
        page_size=case.page_size,
    )
    if simulated is not None:
        batch.program = dataclasses.replace(batch.program, verifier=simulated)
    batch.state = at_context(fill_pools(batch.state), case.context, text)
    return batch


@partial(jax.jit, donate_argnums=0)
def _random_like(pool: jax.Array, key: jax.Array) -> jax.Array:
    return (jax.random.bits(key, pool.shape, jnp.uint8).astype(jnp.float32) / 74 - 1.72).astype(pool.dtype)


def fill_pools(state: RoundState) -> RoundState:
    """Random keys and values in every pool, written in place."""
    keys = iter(jax.random.split(jax.random.key(0), 2 * len(jax.tree.leaves(state))))

    def fill(node):
        return LayerKV(*(_random_like(x, next(keys)) for x in node)) if is_pool(node) else node

    return jax.tree.map(fill, state, is_leaf=is_pool)


def at_context(state: RoundState, context: int, text: np.ndarray | None = None) -> RoundState:
    """The state with `context` committed tokens in every row and nothing done; `text` [B, context + 1] if it is new."""
    batch = state.tokens.shape[0]
    zeros = np.zeros(batch, np.int32)
    tokens = state.tokens if text is None else state.tokens.at[:, : context + 1].set(text)
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(state.cache, length=jnp.asarray(zeros + context)),
        tokens=tokens,
        done=jnp.zeros(batch, bool),
        stopped=jnp.zeros(batch, bool),
        broken=jnp.zeros(batch, bool),
        rounds=jnp.asarray(zeros),
        fill=jnp.asarray(zeros + context),
    )


class Runner:
    """The compiled round of a batch and its arguments; every call starts from the same context."""

    def __init__(self, batch: Batch, context: int):
        self.batch, self.context = batch, context
        self.executable, self.compile_seconds = compiled(run_rounds, *self._arguments(1), program=batch.program)

    def _arguments(self, rounds: int) -> tuple:
        self.batch.allow(rounds)
        return self.batch.tree, self.batch.draft_tree, self.batch.state

    def __call__(self, rounds: int) -> float:
        """Runs `rounds` rounds from the context on; returns seconds, waiting included."""
        self.reset()
        arguments = jax.block_until_ready(self._arguments(rounds))
        start = time.perf_counter()
        self.launch(arguments)
        return time.perf_counter() - start

    def reset(self) -> None:
        """Puts every sequence back to the context."""
        self.batch.state = at_context(self.batch.state, self.context)

    def launch(self, arguments: tuple, executable: Any = None) -> None:
        """Runs the program, which takes the state's memory over, and waits for it."""
        self.batch.state = (executable or self.executable)(*arguments)
        jax.block_until_ready(self.batch.state.tokens)

    def without_graphs(self) -> Any:
        """The same program, but every operation is launched by itself and seen by a profiler."""
        self.reset()
        return compiled(run_rounds, *self._arguments(1), graphs=False, program=self.batch.program)[0]

    def record(self, rounds: int, *, graphs: bool = False, **options: Any) -> list[profile.Operation]:
        """What the device does in `rounds` rounds: `profile.record` around the program alone, without CUDA graphs or with."""
        program = self.executable if graphs else self.without_graphs()
        self.reset()
        self.launch(jax.block_until_ready(self._arguments(1)), program)
        self.reset()
        arguments = jax.block_until_ready(self._arguments(rounds))
        return profile.record(lambda: self.launch(arguments, program), **options)

    @property
    def emitted(self) -> float:
        """Tokens a sequence emitted per round in the last run."""
        length, rounds = jax.device_get((self.batch.state.cache.length, self.batch.state.rounds))
        return float(np.mean((length - self.context) / np.maximum(rounds, 1)))


def measure(
    case: RoundCase,
    target: Any,
    draft: Any,
    bandwidth: Bandwidth,
    *,
    rounds: tuple[int, int] = (4, 36),
    repeats: int = 5,
    parts: bool = True,
    detail: Callable[[str], None] | None = None,
) -> RoundResult:
    """Times one round of a case and takes it apart.

    Args:
      case: what to measure.
      target: `ModelParams`.
      draft: what the algorithm needs, or None.
      bandwidth: measured in this run.
      rounds: n1 and n2.
      repeats: pairs of runs; their median counts.
      parts: trace `PROFILED_ROUNDS` rounds to tell the parts apart.
      detail: receives one line for each of the costliest instructions.
    """
    few, many = rounds
    if not 0 < few < many or repeats < 1:
        raise ConfigError(f"rounds={rounds} must rise and be positive, repeats={repeats} be at least 1")
    batch = prepare(case, target, draft, many)
    reads = round_reads(batch.program, target.tree, batch.draft_tree, batch.state, case.context)
    runner = Runner(batch, case.context)
    runner(few)
    seconds = []
    for _ in range(repeats):
        shorter = runner(few)
        seconds.append((runner(many) - shorter) / (many - few))
    emitted = runner.emitted
    ms = statistics.median(seconds) * 1e3
    rate = bandwidth.copy * 1e9  # bytes per millisecond
    traced = _traced_parts(runner, detail) if parts else {}
    return RoundResult(
        name=case.name,
        batch=case.batch,
        context=case.context,
        ms=ms,
        spread_ms=(max(seconds) - min(seconds)) * 1e3,
        floor_ms=sum(reads.values()) / rate,
        copy_tbps=bandwidth.copy,
        read_tbps=bandwidth.read,
        parts=_table(traced, reads, ms, rate),
        accept_length=emitted,
        tokens_per_second=case.batch * emitted / ms * 1e3,
        compile_seconds=runner.compile_seconds,
    )


def _traced_parts(runner: Runner, detail: Callable[[str], None] | None) -> dict[str, float]:
    """Milliseconds a round spends in each part, while a profiler watches."""
    found = runner.record(PROFILED_ROUNDS, module=PROGRAM)
    sources = profile.instruction_sources(runner.without_graphs().as_text())
    if detail is not None:
        for name, scope, times, seconds in profile.largest(found, sources):
            detail(f"{seconds / PROFILED_ROUNDS * 1e3:9.4f} ms {times / PROFILED_ROUNDS:7.1f} x  {name}  {scope[-90:]}")
    return {part: s / PROFILED_ROUNDS * 1e3 for part, s in profile.seconds_by_part(found, sources).items()}


def _table(traced: dict[str, float], reads: dict[str, int], ms: float, rate: float) -> dict[str, dict[str, float]]:
    """Parts in their fixed order, with bytes and the share of the time that their floor makes up; the gaps last."""
    if not traced:
        return {}
    table = {}
    for part in PARTS:
        if part in traced or part in reads:
            took, read = traced.get(part, 0.0), reads.get(part, 0)
            table[part] = {"ms": took, "bytes": read, "share": read / rate / took if took else 0.0}
    table["gaps"] = {"ms": ms - sum(traced.values()), "bytes": 0, "share": 0.0}
    return table
