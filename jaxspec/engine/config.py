"""What an engine is set up with: one frozen record, from which its signature and its help follow."""

from __future__ import annotations

import dataclasses

from jaxspec.config import MAX_PAGE, MAX_PREFILL, ConfigError


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of `jaxspec.Engine` under SGLang's names.

    Attributes:
      max_running_requests: most requests that run at once; None: 64 on a GPU, 8 on a CPU.
      max_total_tokens: positions of the page pool; None: what `mem_fraction_static` leaves, but no more than all running
        requests can use.
      mem_fraction_static: part of the device's memory that weights and pools may take together.
      context_length: most positions of a request, prompt and output; None: the model's.
      page_size: positions a page.
      chunked_prefill_size: prompt positions taken in at once while nobody waits for a token.
      prefill_budget: prompt positions taken in between two rounds while somebody does.
      prefill_decode_interval: launches of rounds between two of prefill while somebody decodes.
      num_continuous_decode_steps: rounds between two looks at the device.
      schedule_policy: "fcfs" (by arrival) or "lpm" (longest cached prefix first).
      schedule_conservativeness: above 1 admits fewer requests at once, below 1 more (which may then lose their pages again).
      max_queued_requests: requests that may wait; None for any number.
      disable_radix_cache: never reuse the pages of earlier requests.
      schedule_low_priority_values_first: lower values of `priority` go first.
      random_seed: seeds of requests that name none follow from it; None: they are drawn.
      warmup: "eager" compiles, before the engine is there, all programs that greedy and sampled requests can come to need;
        "lazy" each one when a request first needs it.

    Raises:
      ConfigError: a value out of its range.
    """

    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    mem_fraction_static: float = 0.85
    context_length: int | None = None
    page_size: int = 16
    chunked_prefill_size: int = 8192
    prefill_budget: int = 512
    prefill_decode_interval: int = 1
    num_continuous_decode_steps: int = 1
    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    max_queued_requests: int | None = None
    disable_radix_cache: bool = False
    schedule_low_priority_values_first: bool = False
    random_seed: int | None = None
    warmup: str = "lazy"

    def __post_init__(self):
        for name in ("max_running_requests", "max_total_tokens", "context_length", "max_queued_requests"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1, or None")
        for name in (
            "page_size",
            "chunked_prefill_size",
            "prefill_budget",
            "prefill_decode_interval",
            "num_continuous_decode_steps",
        ):
            value = getattr(self, name)
            most = MAX_PAGE if name == "page_size" else MAX_PREFILL
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1 and at most {most}")
        if not 0 < self.mem_fraction_static <= 1:
            raise ConfigError(f"mem_fraction_static={self.mem_fraction_static!r} must be in (0, 1]")
        if self.warmup not in ("eager", "lazy"):
            raise ConfigError(f"warmup={self.warmup!r} must be 'eager' or 'lazy'")
