"""Several heads trained at once on the same rows: the target reads every batch once for all of them."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from jaxspec.config import ConfigError
from jaxspec.params import ModelParams
from jaxspec.training.data import Data
from jaxspec.training.loop import CALIBRATION_STEPS, LAST_STEP, Run, TrainOptions
from jaxspec.training.objective import Objective
from jaxspec.training.output import Trained
from jaxspec.training.warm import Start


def train_together(
    objectives: Mapping[str, Objective],
    target: ModelParams,
    data: Data,
    options: Mapping[str, TrainOptions],
    *,
    minutes: float | None = None,
    every: Mapping[str, int] | None = None,
    storage: str | None = None,
    starts: Mapping[str, Start] | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Trained | Exception]:
    """Trains heads step by step in turn. All see the same rows at the same step, and the target reads these once for all.

    Their programs are compiled on threads of their own, at the same time.

    Args:
      objectives: heads by name.
      target: the frozen target, in the type that is computed in.
      data: rows.
      options: how each head is trained; batch, seed and held-out rows must agree. Without `minutes`, so must `steps`.
      minutes: time for all of it, compilation included: the number of steps follows.
      every: heads that take part in every n-th turn only; 1 where nothing is said. Such a head still sees the rows of its own
        step, so that the target may read twice in a turn. With `minutes` it makes fewer steps; else it only ends later.
      storage: see `jaxspec.training.loop.train`.
      starts: heads trained before, by the name of the head that begins with their weights.
      log: receives what happened in words.

    Returns:
      What `train` gives, by name; for a head that failed, what it raised. The others go on.

    Raises:
      ConfigError: no heads, options that must agree and do not, or an `every` below 1.
    """
    begin = time.perf_counter()
    if not objectives:
        raise ConfigError("objectives names no head to train")
    every = {name: (every or {}).get(name, 1) for name in objectives}
    if min(every.values()) < 1:
        raise ConfigError(f"every={every} must be 1 or more for each head")
    shared = {(o.batch, o.seed, o.held_out, None if minutes else o.steps) for o in options.values()}
    if len(shared) > 1:
        raise ConfigError(f"heads that are trained together need one batch, seed, held_out and steps, got {sorted(shared)}")
    taps = tuple(sorted({tap for objective in objectives.values() for tap in objective.taps}))
    runs: dict[str, Run] = {}
    for name, objective in objectives.items():
        reader = next((run.reader for run in runs.values()), None)
        runs[name] = Run(
            objective,
            target,
            data,
            options[name],
            None,
            lambda text, n=name: log(f"{n}: {text}"),
            taps,
            reader,
            earlier=(starts or {}).get(name),
        )
    done: dict[str, Trained | Exception] = {}

    def fail(name: str, error: Exception) -> None:
        log(f"{name} failed: {type(error).__name__}: {error}")
        done[name] = error
        runs.pop(name)

    def warm(run: Run) -> float:
        start = time.perf_counter()
        run.start = run.initial()
        jax.block_until_ready(spend(run, 1))
        return time.perf_counter() - start

    def spend(run: Run, steps: int):
        """Steps on a copy of the state, thrown away."""
        (state, constants), metrics = run.start, {}
        state = jax.tree.map(jnp.copy, state)
        for number in range(steps):
            state, metrics = run.step(state, constants, number, LAST_STEP)
        return metrics["loss"]

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
        seconds = 0.0
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(spend(run, CALIBRATION_STEPS))
            seconds += (time.perf_counter() - start) / CALIBRATION_STEPS / every[name]
        left = minutes * 60 - (time.perf_counter() - begin) - 3 * measuring
        between = min(o.evaluate_every for o in options.values())
        steps = max(int(left * between / (between + measuring) / seconds), 1)
        log(f"{seconds * 1e3:.0f} ms a turn of {', '.join(runs)}; {measuring:.1f} s a measurement: {steps} turns")
        for name, run in runs.items():
            run.options = dataclasses.replace(run.options, minutes=None, steps=max(steps // every[name], 1))
    turns = {name: run.steps(False, storage) for name, run in runs.items()}
    for turn in itertools.count():
        if not turns:
            break
        for name in [name for name in turns if turn % every[name] == 0]:
            try:
                next(turns[name])
            except StopIteration as end:
                done[name] = end.value
                del turns[name]
            except Exception as error:
                fail(name, error)
                del turns[name]
    return done
