"""A core on the real device layer, stepped by hand, in which everything that nobody may read holds NaN."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine.core import Core
from jaxspec.engine.device import Device
from jaxspec.engine.memory import Memory
from jaxspec.engine.messages import Delta, Launch, Limits, Request, SchedulerConfig
from jaxspec.kvcache import pages_for
from jaxspec.requests import build_requests
from jaxspec.speculation import Speculation
from tests.engine.cases import case_of

PAGE_SIZE, MAX_LEN = 4, 96


@jax.jit
def with_nan(pools, pages):
    """The pools with NaN in some pages; ids outside the pool are dropped."""
    return jax.tree.map(lambda x: x.at[pages].set(jnp.nan, mode="drop"), pools)


@jax.jit
def with_wrecked_rows(rows, idle):
    """The rows with NaN in every floating leaf and nonsense in the tokens of those that are `idle`."""

    def wreck(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.where(idle.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)

    rows = jax.tree.map(wreck, rows)
    return dataclasses.replace(rows, tokens=jnp.where(idle[:, None], 3, rows.tokens))


class PoisonedDevice(Device):
    """A device that fills pages and rows which nobody holds with NaN before every launch.

    Attributes:
      scheduler: whose books say what is free; None poisons nothing.
      sampling_class: of all launches, if set; else what they ask for.
      launches: what was launched.
    """

    scheduler = None
    sampling_class: str | None = None
    launches: list[Launch] | None = None

    def launch(self, launch: Launch):
        if self.scheduler is not None:
            self.poison()
        if self.launches is not None:
            self.launches.append(launch)
        return super().launch(dataclasses.replace(launch, sampling_class=self.sampling_class or launch.sampling_class))

    def poison(self) -> None:
        """NaN wherever the books say that nobody reads."""
        pool, memory = self.scheduler.pool, self.memory
        pages = np.full(pool.total + 1, memory.num_pages, np.int32)
        free = [0, *pool._free]
        pages[: len(free)] = free
        memory.pools = with_nan(memory.pools, pages)
        if self.rows is not None and len(self.scheduler.rows) == self.bucket:
            idle = np.array([row is None for row in self.scheduler.rows])
            self.rows = with_wrecked_rows(self.rows, idle)


def open_core(
    name: str,
    *,
    block: int = 16,
    pages: int = 64,
    buckets: tuple[int, ...] = (2,),
    sizes: tuple[int, ...] = (1,),
    memory: Memory | None = None,
    max_len: int = MAX_LEN,
    **config: Any,
) -> Core:
    """A core for a case, all of whose launches serve greedy and sampled requests, so that programs are few."""
    made = case_of(name)
    chosen = Speculation.choose(made.params, made.draft, made.algorithm, made.spec)
    drafter = chosen.program.drafter
    if memory is None:
        memory = Memory(made.params.tree, chosen.draft_tree, chosen.program, page_size=PAGE_SIZE, num_pages=pages + 1)
    limits = Limits(
        buckets=buckets,
        prefill_sizes=sizes,
        block=block,
        long_sizes=(),
        max_len=max_len,
        total_pages=pages,
        page_size=PAGE_SIZE,
        max_accept=drafter.max_accept,
        slack=drafter.slack,
        key_lookahead=drafter.key_lookahead,
        separate_blocks=drafter.separate_blocks,
    )
    device = PoisonedDevice(memory, limits)
    device.sampling_class = "sampled"
    core = Core(device, SchedulerConfig(**config), check_pages=True)
    device.scheduler = core.scheduler
    return core


def restart(core: Core, **config: Any) -> Core:
    """Another core on the same device, whose pools are zeroed and whose table is empty."""
    device = core.device
    device.reset()
    device.launches = None
    again = Core(device, SchedulerConfig(**config), check_pages=True)
    device.scheduler = again.scheduler
    return again


_NAMES = itertools.count()


def requests_for(name: str, prompts: Sequence[list[int]], **request: Any) -> list[Request]:
    """Requests with names of their own; arguments as for `jaxspec.generate`."""
    made, _ = build_requests(case_of(name).params, [list(p) for p in prompts], **{"seed": 7, "ignore_eos": True, **request})
    return [dataclasses.replace(r, rid=f"r{next(_NAMES)}") for r in made]


def pair_for(name: str, prompt: list[int], output: int, seed: int = 7) -> list[Request]:
    """A greedy request and a sampled one for a prompt, which share no pages with each other."""
    made = requests_for(name, [prompt, prompt], max_new_tokens=output, temperature=[0.0, 1.0], seed=seed)
    return [dataclasses.replace(r, namespace=(kind, "")) for r, kind in zip(made, ("greedy", "sampled"), strict=True)]


@dataclasses.dataclass
class Told:
    """All that a core said about one request: tokens and their log, and how it ended."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    log: list[tuple[bool, int, int]] = dataclasses.field(default_factory=list)
    reason: str | None = None
    cached: int = 0
    retractions: int = 0

    def add(self, delta: Delta) -> None:
        """Takes a delta in."""
        assert self.reason is None, f"{delta.rid!r} has ended, and more was said of it"
        self.tokens += delta.tokens
        columns = (delta.from_draft, delta.round_of, delta.proposed_upto)
        self.log += list(zip(*(np.asarray(c).tolist() for c in columns), strict=True))
        self.reason, self.cached, self.retractions = delta.reason, delta.cached_tokens, delta.num_retractions

    @property
    def answer(self) -> tuple:
        """What must not depend on company, preemption or hits."""
        return self.tokens, self.log, self.reason


def run(
    core: Core, requests: Sequence[Request], each: Callable[[int], None] | None = None, most_steps: int = 2000
) -> list[Told]:
    """Steps the core until it is idle; `each` is called after every step with its number."""
    for request in requests:
        core.submit(request)
    told: dict[str, Told] = {}
    for number in itertools.count():
        if core.idle:
            break
        assert number < most_steps, "the core makes no progress"
        for delta in core.step():
            if not isinstance(delta, Delta):
                raise delta.error
            told.setdefault(delta.rid, Told()).add(delta)
        if each is not None:
            each(number)
    assert_nothing_leaks(core)
    return [told[r.rid] for r in requests]


def assert_nothing_leaks(core: Core) -> None:
    """All pages of an idle core are free or cached, and free once the cache is emptied of what it holds."""
    pool = core.scheduler.pool
    core.scheduler.check()
    assert pool.owned == pool.shared == 0 and pool.free + pool.cached == pool.total == core.scheduler.limits.total_pages
    held = {node.page for node in core.scheduler.prefix.nodes()}
    assert len(held) == pool.cached and not held & set(pool._free)


def pages_of(slots: int) -> int:
    """Pages for so many slots."""
    return pages_for(slots, PAGE_SIZE)
