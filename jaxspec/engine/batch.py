"""A batch of prompts on the device layer, without a scheduler: for benchmarks, parity scripts and tests that step it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SpecConfig
from jaxspec.engine import rows
from jaxspec.engine.messages import NotANumber
from jaxspec.engine.rows import Layout
from jaxspec.engine.sizes import BLOCK, platform
from jaxspec.kvcache import LayerKV, init_layers, pages_for
from jaxspec.prefill import prefill_chunk
from jaxspec.requests import build_requests
from jaxspec.round import Program, RoundState, run_rounds
from jaxspec.runtime import check_memory, compiled, own_settings
from jaxspec.sampling import largest_class, sampling_class
from jaxspec.speculation import Speculation

MANY_ROUNDS = 2**30


@dataclasses.dataclass
class Log:
    """What one row has emitted: tokens with their logs (`round.RoundState`), and why it ended, None while it runs."""

    tokens: list[int]
    finish_reason: str | None
    from_draft: np.ndarray
    round_of: np.ndarray
    proposed_upto: np.ndarray


@dataclasses.dataclass
class Batch:
    """Rows that own all the pages they will ever need.

    Attributes:
      tree, draft_tree: parameters of target and drafter.
      program: the static half of the round.
      spec: the resolved parameters.
      state: the whole state; whoever steps the batch may change it.
      prompts: as token ids.
      chunk: prompt positions of a prefill program.
    """

    tree: Any
    draft_tree: Any
    program: Program
    spec: SpecConfig
    state: RoundState
    prompts: list[list[int]]
    chunk: int

    @own_settings()
    def prefill(self) -> None:
        """Takes in all prompts; every sequence has its first token then."""
        for _ in range(-(-max(map(len, self.prompts)) // self.chunk)):
            args = (self.tree, self.draft_tree, self.state)
            program, _ = compiled(prefill_chunk, *args, program=self.program, chunk=self.chunk)
            self.state = program(*args)

    @own_settings()
    def run(self, rounds: int = MANY_ROUNDS) -> None:
        """Runs rounds on the device until all sequences are done, at most `rounds`."""
        self.allow(rounds)
        args = (self.tree, self.draft_tree, self.state)
        program, _ = compiled(run_rounds, *args, program=self.program)
        self.state = jax.block_until_ready(program(*args))

    @own_settings()
    def allow(self, rounds: int) -> None:
        """Lets every row take part in `rounds` more rounds."""
        left = jnp.full_like(self.state.rounds_left, rounds)
        self.state = dataclasses.replace(self.state, rounds_left=left)

    def logs(self) -> list[Log]:
        """What every row has emitted so far."""
        s, found = self.state, []
        if jax.device_get(s.broken).any():
            raise NotANumber(f"activations of rows {np.flatnonzero(s.broken).tolist()} are not numbers")
        columns = (s.tokens, s.from_draft, s.round_of, s.proposed_upto, s.cache.length, s.done, s.stopped)
        for prompt, *row in zip(self.prompts, *jax.device_get(columns), strict=True):
            tokens, from_draft, round_of, proposed_upto, length, done, stopped = row
            kept = slice(len(prompt), int(length) + 1)
            reason = ("stop" if stopped else "length") if done else None
            found.append(Log(tokens[kept].tolist(), reason, from_draft[kept], round_of[kept], proposed_upto[kept]))
        return found


@own_settings()
def open_batch(params: Any, prompts: Sequence[Any], **options: Any) -> Batch:
    """A batch, ready for `Batch.prefill`; options and errors as for `jaxspec.generate`, and ``capacity``.

    Rows have room for `capacity` positions even if these prompts need fewer.
    """
    page_size, chunk, capacity = (options.pop(k, v) for k, v in (("page_size", 16), ("prefill_chunk", None), ("capacity", 0)))
    tree = {name: options.pop(name, None) for name in ("num_steps", "topk", "num_draft_tokens")}
    draft, algorithm, spec = (options.pop(k, v) for k, v in (("draft", None), ("algorithm", "auto"), ("spec", None)))
    chosen = Speculation.choose(params, draft, algorithm, spec, **tree)
    requests, _ = build_requests(params, prompts, **options)
    config, drafter = params.config, chosen.program.drafter
    of_class = largest_class(sampling_class(r.sampling) for r in requests)
    program = dataclasses.replace(chosen.program, sampling=of_class)
    limits = [min(len(r.ids) + r.max_new_tokens, config.max_positions) for r in requests]
    max_len = max(-(-max(limits) // 128) * 128, capacity)
    layout = Layout(max_len, pages_for(max_len + drafter.slack, page_size), page_size)
    num_pages, dtype = 1 + len(requests) * layout.pages, params.tree["embedder"]["embedding"].dtype
    admissions, next_page = [], 1
    for i, (request, limit) in enumerate(zip(requests, limits, strict=True)):
        count = pages_for(limit + drafter.slack, page_size)
        admissions.append(
            {
                "row": i,
                "length": 0,
                "prompt_length": len(request.ids),
                "fill": len(request.ids),
                "resumed": False,
                "limit": limit,
                "capacity": count * page_size,
                "rounds_left": MANY_ROUNDS,
                "drafting": True,
                "seen": len(request.ids),
                "rounds": 0,
                "proposed": 0,
                "sampling": request.sampling,
                "stop_ids": request.stop_ids,
                "ignore_eos": request.ignore_eos,
                "pages": list(range(next_page, next_page + count)),
                "tokens": request.ids,
            }
        )
        next_page += layout.pages
    mail = rows.pack_admissions(layout, len(requests), admissions, config.vocab_size)

    def pools() -> tuple[tuple[LayerKV, ...], Any]:
        layers = init_layers(
            config.num_layers, num_pages, page_size, config.num_kv_heads, config.key_head_dim, config.value_head_dim, dtype
        )
        return layers, drafter.init(chosen.draft_tree, len(requests), num_pages, page_size, max_len, dtype)

    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(pools)))
    check_memory(needed, f"{len(requests)} sequences of {max_len} tokens")
    state = jax.jit(partial(rows.state_of, layout), donate_argnums=(1, 2))(jnp.asarray(mail), *pools())[1]
    return Batch(
        params.tree,
        chosen.draft_tree,
        program,
        chosen.spec,
        state,
        [r.ids.tolist() for r in requests],
        chunk or BLOCK[platform()],
    )
