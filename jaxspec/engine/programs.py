"""The programs that an engine launches: each a jitted function of pools and rows.

Pools and rows are separate arguments, and only programs that compute with the model see the pools; what joins, leaves or
moves is rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from jaxspec.engine import rows as table
from jaxspec.engine.rows import Layout
from jaxspec.kvcache import LayerKV, init_layers, join, split
from jaxspec.models import decoder
from jaxspec.prefill import prefill_step
from jaxspec.round import Program, run_rounds
from jaxspec.runtime import own_settings


@partial(jax.jit, static_argnames="program", donate_argnames=("pools", "rows"))
def rounds_program(params, draft_params, pools, rows, *, program: Program):
    """Rounds on the table until no row takes part any more."""
    return split(run_rounds(params, draft_params, join(pools, rows), program=program))


@partial(jax.jit, static_argnames=("program", "chunk", "fresh", "ends"), donate_argnames=("pools", "rows"))
def prefill_program(params, draft_params, pools, rows, continued, *, program: Program, chunk: int, fresh, ends: int):
    """`prefill.prefill_step` on rows from `rows.take_blocks`."""
    with decoder.full_precision(params):
        return split(prefill_step(program, params, draft_params, join(pools, rows), chunk, fresh, continued, ends))


@partial(jax.jit, static_argnames=("layout", "program", "batch", "dtype"))
def empty_program(draft_params, *, layout: Layout, program: Program, batch: int, dtype: str):
    """A table of empty rows."""
    draft = drafter_rows(program, draft_params, layout, batch, dtype)
    return table.empty_rows(layout, batch, no_pools(program), draft)


@partial(jax.jit, static_argnames=("layout", "program", "dtype"), donate_argnames="rows")
def admit_program(draft_params, rows, mail, *, layout: Layout, program: Program, dtype: str):
    """`rows.admit`, the drafter's state fresh."""
    return table.admit(layout, rows, mail, drafter_rows(program, draft_params, layout, mail.shape[0], dtype))


@partial(jax.jit, static_argnames=("program", "num_pages", "page_size", "dtype"))
def pools_program(draft_params, *, program: Program, num_pages: int, page_size: int, dtype: str):
    """Zeroed pools: the target's, then the drafter's."""
    c = program.config
    layers = init_layers(c.num_layers, num_pages, page_size, c.num_kv_heads, c.key_head_dim, c.value_head_dim, dtype)
    return layers + split(program.drafter.init(draft_params, 1, num_pages, page_size, page_size, dtype))[0]


orders_program = jax.jit(table.obey, donate_argnames="rows")
regroup_program = jax.jit(table.regroup)
take_program = jax.jit(table.take_blocks)
put_program = jax.jit(table.put_blocks, donate_argnames="rows")
report_program = jax.jit(table.report, static_argnames=("window", "rounds"), donate_argnames="rows")


@own_settings()
def pool_bytes(program: Program, draft_tree: Any, num_pages: int, page_size: int, dtype: str) -> int:
    """Bytes of pools of that many pages."""
    static = {"program": program, "num_pages": num_pages, "page_size": page_size, "dtype": dtype}
    shapes = jax.eval_shape(partial(pools_program, **static), draft_tree)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def no_pools(program: Program) -> tuple[LayerKV, ...]:
    """Empty pools in the places of the target's."""
    return (LayerKV(None, None),) * program.config.num_layers


def drafter_rows(program: Program, draft_params: Any, layout: Layout, batch: int, dtype: str) -> Any:
    """A drafter's state of `batch` fresh rows, with empty pools."""
    return split(program.drafter.init(draft_params, batch, 1, layout.page_size, layout.max_len, dtype))[1]
