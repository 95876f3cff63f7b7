"""The training loop: AdamW on float32 weights of a head, behind a frozen target, resumable to the very same losses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import runtime
from jaxspec.config import ConfigError, ModelConfig
from jaxspec.models import decoder
from jaxspec.optional import optional
from jaxspec.params import DraftParams, ModelParams
from jaxspec.training.data import Data, batch_rows
from jaxspec.training.objective import Objective, View, cast, merge
from jaxspec.training.output import Trained, as_stored, write_jsonl
from jaxspec.training.reading import Reader, narrowed
from jaxspec.training.state import differing, latest_checkpoint, load_checkpoint, save_checkpoint
from jaxspec.training.warm import Start

optax = optional("optax", "training a head", "jaxspec-decoding[train]")

LAST_STEP = 1 << 30
"""The step that measurements are made as: behind every curriculum."""

CALIBRATION_STEPS = 6
"""Steps that are timed (and thrown away) when the number of steps follows from a time budget."""


@dataclass(frozen=True)
class TrainOptions:
    """How a head is trained.

    Attributes:
      steps: optimiser steps; None: as many as `minutes` allow, measured before the first one.
      minutes: time budget in place of `steps`, compilation included.
      batch: rows per step.
      learning_rate: AdamW's peak.
      weight_decay: AdamW's.
      warmup: share of the steps in which the learning rate rises; then it falls to 0 along a cosine.
      clip: largest global norm of a gradient.
      b1, b2: AdamW's decay rates.
      seed: of the initial weights, the order of rows and what the objective draws.
      held_out: rows on which accept lengths are measured; never trained on.
      evaluate_every: seconds between measurements; steps where `evaluate_steps` is given.
      evaluate_steps: see there.
      checkpoint_every: seconds between checkpoints; steps where `checkpoint_steps` is given.
      checkpoint_steps: see there.
      stop_after: stop behind this step, as if interrupted there, with a checkpoint.
    """

    steps: int | None = None
    minutes: float | None = None
    batch: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warmup: float = 0.04
    clip: float = 1.0
    b1: float = 0.9
    b2: float = 0.95
    seed: int = 0
    held_out: int = 32
    evaluate_every: float = 20.0
    evaluate_steps: int | None = None
    checkpoint_every: float = 60.0
    checkpoint_steps: int | None = None
    stop_after: int | None = None

    def __post_init__(self):
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError(f"give either steps or minutes, got steps={self.steps}, minutes={self.minutes}")
        for name in ("steps", "minutes", "batch", "learning_rate", "clip", "held_out"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} must be positive")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"warmup={self.warmup} must lie in [0, 1)")


def learning_rate_at(step, total, peak, warmup: float):
    """Linear warm-up, then a cosine to 0 (Loshchilov & Hutter 2017)."""
    warm = jnp.maximum(jnp.floor(total * warmup), 1.0)
    progress = jnp.clip((step - warm) / jnp.maximum(total - warm, 1.0), 0.0, 1.0)
    factor = jnp.where(step < warm, (step + 1) / warm, 0.5 * (1 + jnp.cos(jnp.pi * progress)))
    return peak * factor


def optimiser(options: TrainOptions) -> optax.GradientTransformation:
    """AdamW without its learning rate, behind a clip of the global norm."""
    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.scale_by_adam(b1=options.b1, b2=options.b2),
        optax.add_decayed_weights(options.weight_decay),
    )


def merged(trainable: Any, constants: Any, dtype: Any) -> dict:
    """The head's tree in the type that is computed in."""
    return merge(cast(trainable, dtype), cast(constants, dtype))


@partial(jax.jit, static_argnames=("objective", "options", "dtype", "taps"), donate_argnums=0)
def train_step(
    state, constants, tree, view: View, plan, *, objective: Objective, options: TrainOptions, dtype: str, taps: tuple[int, ...]
):
    """One optimiser step; `state` is (trainable, optimiser's state, key). Gives the new state and the metrics before it.

    `plan` is (number of the step, number of steps, peak of the learning rate): none of them compiles anything anew. `view` is
    what `read_rows` gave for `taps`.
    """
    step, total, peak = plan
    trainable, moments, key = state
    view = narrowed(view, tree, taps, objective.taps)

    def loss_of(trainable):
        return objective.loss(merged(trainable, constants, dtype), view, jax.random.fold_in(key, step), step)

    with decoder.full_precision(tree):
        (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(gradients)))
    updates, moments = optimiser(options).update(gradients, moments, trainable)
    rate = learning_rate_at(step, total, peak, options.warmup)
    trainable = jax.tree.map(lambda w, u: w - rate * u, trainable, updates)
    return (trainable, moments, key), {**metrics, "loss": loss, "gradient_norm": norm}


def train(
    objective: Objective,
    target: ModelParams,
    data: Data,
    options: TrainOptions,
    *,
    folder: Path | None = None,
    storage: str | None = None,
    store_dtype: str = "bfloat16",
    taps: tuple[int, ...] = (),
    start: Start | None = None,
    progress: bool = True,
    log: Callable[[str], None] = lambda text: None,
) -> Trained:
    """Trains one head.

    Args:
      objective: what kind of head.
      target: the frozen target, in the type that is computed in.
      data: rows (`jaxspec.training.synthesis`).
      options: see there.
      folder: where checkpoints and ``training.jsonl`` are kept while training runs; a run that was interrupted there goes on
        behind its last checkpoint, with the same losses as without the interruption. None: nothing is written.
      taps: further features that the target's pass gives. Heads that are trained one after another on the same rows compile
        that pass once when all of them get the taps of all.
      storage: how the head will be stored ("int8"): its accept length is measured as stored, too.
      store_dtype: type in which it will be stored, and from which `storage` rounds.
      start: a head trained before, whose weights are the first ones of this run (`jaxspec.training.warm.read_start`).
      progress: show a bar on stderr.
      log: receives what happened in words.

    Raises:
      ConfigError: too few rows, a target in float16, a loss that is not finite, or `folder` holds checkpoints of a run with
        other options or rows.
    """
    run = Run(objective, target, data, options, folder, log, taps, earlier=start, store_dtype=store_dtype)
    return run.run(progress, storage)


def checked_dtype(target: ModelParams) -> str:
    """The type that a target's parameters have and training computes in.

    Raises:
      ConfigError: it is float16.
    """
    dtype = str(jax.tree.leaves(target.tree["embedder"])[0].dtype)
    if dtype == "float16":
        raise ConfigError("dtype=float16 has no range for gradients, and losses are not scaled: use bfloat16 or float32")
    return dtype


class Run:
    """One call of `train`: what stays the same over its steps.

    Raises:
      ConfigError: fewer rows than a batch has, or a target in float16.
    """

    def __init__(
        self,
        objective,
        target,
        data: Data,
        options: TrainOptions,
        folder,
        log,
        taps: tuple[int, ...] = (),
        reader=None,
        earlier: Start | None = None,
        store_dtype: str = "bfloat16",
    ):
        self.objective, self.target, self.options, self.folder, self.log = objective, target, options, folder, log
        self.begin = time.perf_counter()
        kept, held_out = data.split(min(options.held_out, max(len(data.tokens) // 4, 1)))
        if len(kept.tokens) < options.batch:
            raise ConfigError(
                f"batch={options.batch} is more than the {len(kept.tokens)} rows to train on: synthesise more tokens"
            )
        self.rows, self.num_rows, self.length = kept, len(kept.tokens), data.tokens.shape[1]
        self.taps = tuple(sorted({*taps, *objective.taps})) if taps else objective.taps
        self.dtype, self.store_dtype = checked_dtype(target), store_dtype
        self.num_held_out = len(held_out.tokens)
        pairs = ((kept.tokens, held_out.tokens), (kept.supervised, held_out.supervised))
        if reader is None:
            reader = Reader(target, tuple(jnp.asarray(np.concatenate(pair)) for pair in pairs), self.taps)
        self.reader = reader
        self.start, self.earlier = None, earlier
        # what must agree for a checkpoint to be gone on with
        asked = dataclasses.asdict(options)
        for name in ("stop_after", "checkpoint_every", "checkpoint_steps", "evaluate_every", "evaluate_steps"):
            del asked[name]
        self.identity = json.loads(
            json.dumps(
                {
                    "head": {"objective": type(objective).__name__, **dataclasses.asdict(objective)},
                    "options": asked,
                    "rows": self.num_rows,
                    "length": self.length,
                    "dtype": self.dtype,
                    "data": data.about,
                    "content": digest(data),
                    **({} if earlier is None else {"start": earlier.digest}),
                },
                sort_keys=True,
                default=repr,
            )
        )

    def initial(self):
        """(state, constants) before the first step."""
        if self.start is not None:
            return self.start
        key = jax.random.key(self.options.seed)
        counts = jnp.asarray(self.rows.counts(self.objective.target.vocab_size))

        @jax.jit
        def made(key, tree, counts):
            with decoder.full_precision(tree):
                trainable, constants = self.objective.init(key, tree, counts)
            return cast(trainable, jnp.float32), constants

        trainable, constants = made(jax.random.fold_in(key, 0), self.target.tree, counts)
        if self.earlier is not None:
            trainable, constants = self.earlier.replace(trainable, constants)
        return (trainable, optimiser(self.options).init(trainable), jax.random.fold_in(key, 1)), constants

    def step(self, state, constants, number: int, total: int):
        """One step of training."""
        return self.call(state, constants, self.rows_of(number), number, total)

    def rows_of(self, number: int) -> np.ndarray:
        """The rows of a step."""
        return batch_rows(self.num_rows, self.options.batch, self.options.seed, number)

    def call(self, state, constants, rows, number: int, total: int):
        """`read_rows` and `train_step`, compiled at the first call."""
        plan = (np.int32(number), np.float32(total), np.float32(self.options.learning_rate))
        arguments = (state, constants, self.target.tree, self.reader(rows), plan)
        o = self.options
        # what only says how long to run, or how often to write, shall not compile anything anew
        fixed = TrainOptions(
            steps=1, batch=o.batch, weight_decay=o.weight_decay, warmup=o.warmup, clip=o.clip, b1=o.b1, b2=o.b2
        )
        program, _ = runtime.compiled(
            train_step, *arguments, objective=self.objective, options=fixed, dtype=self.dtype, taps=self.taps
        )
        return program(*arguments)

    def calibrate(self, state, constants) -> int:
        """How many steps fit the time budget: some are run on a copy of the state and thrown away."""
        state = jax.tree.map(jnp.copy, state)
        state, metrics = self.step(state, constants, 0, LAST_STEP)
        jax.block_until_ready(metrics)
        self.evaluate(*state[:2], constants)
        start = time.perf_counter()
        self.evaluate(*state[:2], constants)
        measuring = time.perf_counter() - start
        start = time.perf_counter()
        for number in range(1, 1 + CALIBRATION_STEPS):
            state, metrics = self.step(state, constants, number, LAST_STEP)
        jax.block_until_ready(metrics)
        seconds = (time.perf_counter() - start) / CALIBRATION_STEPS
        left = self.options.minutes * 60 - (time.perf_counter() - self.begin)
        every = self.options.evaluate_every
        share = every / (every + measuring) if self.options.evaluate_steps is None else 1.0
        steps = max(int(left * share / seconds), 1)
        self.log(f"{seconds * 1e3:.0f} ms a step after {self.options.minutes * 60 - left:.0f} s of compiling: {steps} steps")
        return steps

    def evaluate(self, trainable, moments, constants) -> dict[str, Any]:
        """Means of the metrics over the held-out rows, by the program that trains, whose new state is thrown away.

        A program of its own would take as long to compile as hundreds of steps take to run. Its batches are as large as those
        of training; the last one is filled up with rows from the beginning.
        """
        count, batch, found = self.num_held_out, self.options.batch, []
        for start in range(0, count, batch):
            rows = self.num_rows + np.arange(start, start + batch) % count
            copies = jax.tree.map(jnp.copy, (trainable, moments))  # the program takes over what it is given
            _, metrics = self.call((*copies, jax.random.key(1)), constants, rows, LAST_STEP, LAST_STEP)
            found.append(metrics)
        means = jax.tree.map(lambda *x: np.mean([np.asarray(y) for y in x], axis=0), *found)
        accept, _ = means.pop("accept"), means.pop("gradient_norm")
        numbers = {f"held_out_{name}": round(float(value), 5) for name, value in means.items()}
        return {"accept_length": round(1 + float(accept.sum()), 4), "accept": [round(float(a), 4) for a in accept], **numbers}

    def run(self, progress: bool, storage: str | None) -> Trained:
        """All steps."""
        steps = self.steps(progress, storage)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    def steps(self, progress: bool, storage: str | None) -> Generator[None, None, Trained]:
        """All steps, one at a time."""
        from tqdm import tqdm

        options = self.options
        state, constants = self.initial()
        number, total, losses, curve = 0, options.steps, [], [] if self.earlier is None else list(self.earlier.curve)
        before = 0 if self.earlier is None else self.earlier.tokens
        found = latest_checkpoint(self.folder) if self.folder is not None else None
        if found is not None:
            state, kept = self.restore(found, state)
            number, total, losses, curve = kept["step"], kept["total"], kept["losses"], kept["curve"]
            self.log(f"going on behind step {number} of {total} ({found})")
        if total is None:
            total = self.calibrate(state, constants)
        end = total if options.stop_after is None else min(total, options.stop_after)
        pending: list[dict[str, Any]] = []

        def settle() -> None:
            """Moves what is pending to the losses."""
            for metrics in pending:
                losses.append(float(metrics["loss"]))
                if not np.isfinite([losses[-1], float(metrics["gradient_norm"])]).all():
                    raise ConfigError(
                        f"loss {losses[-1]} or gradient {float(metrics['gradient_norm'])} of step {len(losses)} is not finite: "
                        f"use a smaller learning rate than {options.learning_rate}"
                    )
            pending.clear()

        tokens_a_step = options.batch * self.length
        last_measured = last_saved = started = time.perf_counter()
        first = number
        with tqdm(total=total, initial=number, unit="step", desc="training", disable=not progress) as bar:
            if number == 0:
                curve.append({"step": 0, "tokens": before, "seconds": 0.0, **self.evaluate(*state[:2], constants)})
            while number < end:
                state, metrics = self.step(state, constants, number, total)
                number += 1
                pending.append({name: metrics[name] for name in ("loss", "gradient_norm")})
                if len(pending) >= 2:
                    jax.block_until_ready(pending[-2])  # one step ahead of the device is enough, and time is measured
                bar.update()
                now = time.perf_counter()
                if number == total or self.due(number, now - last_measured, options.evaluate_steps, options.evaluate_every):
                    settle()
                    speed = (number - first) * tokens_a_step / (time.perf_counter() - started)
                    curve.append(
                        {
                            "step": number,
                            "tokens": before + number * tokens_a_step,
                            "seconds": round(time.perf_counter() - self.begin, 2),
                            "loss": losses[-1],
                            "tokens_per_second": round(speed),
                            **self.evaluate(*state[:2], constants),
                        }
                    )
                    self.write_curve(curve)
                    bar.set_postfix_str(
                        f"loss {losses[-1]:.4f}, accept length {curve[-1]['accept_length']:.2f}, {speed:,.0f} tokens/s"
                    )
                    last_measured = time.perf_counter()
                if self.folder is not None and (
                    number == end or self.due(number, now - last_saved, options.checkpoint_steps, options.checkpoint_every)
                ):
                    settle()
                    self.checkpoint(state, number, total, losses, curve)
                    last_saved = time.perf_counter()
                yield
        settle()
        about = {
            "steps": number,
            "batch": options.batch,
            "length": self.length,
            "tokens": number * tokens_a_step,
            "learning_rate": options.learning_rate,
            "seed": options.seed,
            "objective": type(self.objective).__name__,
            "objective_options": self.objective.options,
            "seconds": round(time.perf_counter() - self.begin, 1),
            "device": jax.devices()[0].device_kind,
            "data": self.identity["data"],
            "distinct_tokens": self.num_rows * self.length,
        }
        if self.earlier is not None:
            about |= {"tokens_of_all_runs": before + about["tokens"], "started_from": self.earlier.provenance()}
        if curve:
            about["held_out_accept_length"] = curve[-1]["accept_length"]
        draft = None
        if number == total:
            if storage is not None:
                stored = as_stored(state[0], storage, self.store_dtype)
                about[f"held_out_accept_length_{storage}"] = self.evaluate(stored, state[1], constants)["accept_length"]
            tree = merge(state[0], constants)
            config, source = self.objective.config, f"trained for {self.target.source}"
            if isinstance(config, ModelConfig):
                draft = ModelParams(tree, config, self.target.tokenizer, source=source)
            else:
                draft = DraftParams(tree, config, source)
        return Trained(draft, tuple(losses), tuple(curve), about)

    @staticmethod
    def due(number: int, seconds: float, every_steps: int | None, every_seconds: float) -> bool:
        """Whether it is time again."""
        return number % every_steps == 0 if every_steps is not None else seconds >= every_seconds

    def write_curve(self, curve: list[dict]) -> None:
        """``training.jsonl`` so far."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_jsonl(self.folder / "training.jsonl", curve)

    def checkpoint(self, state, number: int, total: int, losses: list[float], curve: list[dict]) -> None:
        """Writes one and drops older ones."""
        trainable, moments, _ = state
        about = {"step": number, "total": total, "losses": losses, "curve": curve, "identity": self.identity}
        save_checkpoint(self.folder, number, (trainable, moments), about)

    def restore(self, found: Path, state):
        """(state, what the checkpoint says of itself); the key follows from the seed."""
        (trainable, moments), about = load_checkpoint(found, state[:2])
        if about["identity"] != self.identity:
            raise ConfigError(
                f"{self.folder} holds checkpoints of a run that differs in {differing(about['identity'], self.identity)}: "
                "remove that folder, or ask for what that run was asked for"
            )
        return (trainable, moments, state[2]), about


def digest(data: Data) -> str:
    """Sixteen hexadecimal digits that stand for the rows, and for which of them are held out."""
    found = hashlib.sha256()
    for array in (data.tokens, data.supervised, data.temperatures):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def remove_checkpoints(folder: Path) -> None:
    """Drops what `train` kept in its folder."""
    shutil.rmtree(folder, ignore_errors=True)
