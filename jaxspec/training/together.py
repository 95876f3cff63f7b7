"""Several heads trained at once on the same rows: the target reads every batch once for all of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from jaxspec.config import ConfigError
from jaxspec.params import ModelParams
from jaxspec.training.data import Data
from jaxspec.training.loop import CALIBRATION_STEPS, LAST_STEP, Trained, TrainOptions, _Run
from jaxspec.training.objective import Objective


def train_together(
    objectives: Mapping[str, Objective],
    target: ModelParams,
    data: Data,
    options: Mapping[str, TrainOptions],
    *,
    minutes: float | None = None,
    storage: str | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Trained | Exception]:
    """Trains heads step by step in turn: all see the same rows at the same step, and all make equally many steps.

    Their programs are compiled on threads of their own, at the same time.

    Args:
      objectives: heads by name.
      target: the frozen target, in the type that is computed in.
      data: rows.
      options: how each head is trained; batch, seed and held-out rows must agree. Without `minutes`, so must `steps`.
      minutes: time for all of it, compilation included: the number of steps follows.
      storage: see `jaxspec.training.loop.train`.
      log: receives what happened in words.

    Returns:
      What `train` gives, by name; for a head that failed, what it raised. The others go on.

    Raises:
      ConfigError: options that must agree do not.
    """
    begin = time.perf_counter()
    shared = {(o.batch, o.seed, o.held_out, None if minutes else o.steps) for o in options.values()}
    if len(shared) > 1:
        raise ConfigError(f"heads that are trained together need one batch, seed, held_out and steps, got {sorted(shared)}")
    taps = tuple(sorted({tap for objective in objectives.values() for tap in objective.taps}))
    runs: dict[str, _Run] = {}
    for name, objective in objectives.items():
        reader = next((run.reader for run in runs.values()), None)
        runs[name] = _Run(objective, target, data, options[name], None, lambda text, n=name: log(f"{n}: {text}"), taps, reader)
    done: dict[str, Trained | Exception] = {}

    def fail(name: str, error: Exception) -> None:
        log(f"{name} failed: {type(error).__name__}: {error}")
        done[name] = error
        runs.pop(name)

    def warm(run: _Run) -> float:
        start = time.perf_counter()
        run.start = run.initial()
        jax.block_until_ready(spend(run, 0))
        return time.perf_counter() - start

    def spend(run: _Run, number: int):
        """A step on a copy of the state, thrown away."""
        state, constants = run.start
        return run.step(jax.tree.map(jnp.copy, state), constants, number, LAST_STEP)[1]["loss"]

    first = next(iter(runs.values()))
    first.reader(first.rows_of(0))  # the target's own program before the threads ask for it all at once
    with ThreadPoolExecutor(len(runs)) as pool:
        warming = {name: pool.submit(warm, run) for name, run in runs.items()}
    for name, future in warming.items():
        try:
            log(f"{name}: compiled in {future.result():.0f} s")
        except Exception as error:
            fail(name, error)
    if minutes is not None and runs:
        start = time.perf_counter()
        for run in runs.values():
            run.evaluate(*run.start[0][:2], run.start[1])
        measuring = time.perf_counter() - start
        start = time.perf_counter()
        for number in range(1, 1 + CALIBRATION_STEPS):
            jax.block_until_ready([spend(run, number) for run in runs.values()])
        seconds = (time.perf_counter() - start) / CALIBRATION_STEPS
        left = minutes * 60 - (time.perf_counter() - begin) - 3 * measuring
        every = min(o.evaluate_every for o in options.values())
        steps = max(int(left * every / (every + measuring) / seconds), 1)
        log(f"{seconds * 1e3:.0f} ms a step of {', '.join(runs)}; {measuring:.1f} s a measurement: {steps} steps")
        for run in runs.values():
            run.options = dataclasses.replace(run.options, minutes=None, steps=steps)
    turns = {name: run.steps(False, storage) for name, run in runs.items()}
    while turns:
        for name in list(turns):
            try:
                next(turns[name])
            except StopIteration as end:
                done[name] = end.value
                del turns[name]
            except Exception as error:
                fail(name, error)
                del turns[name]
    return done
