"""Rows of one batch join and leave between programs: what every drafter must then leave alone, and what it may share.

Checked for every drafter: rows that take no part change nothing, a prompt may be taken in as several rows of one program,
and a row may begin behind pages that another row filled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.drafters.base import Drafter, check_tree
from jaxspec.drafters.ngram.history import NgramHistory
from jaxspec.engine.batch import Batch, open_batch
from jaxspec.kvcache import PagedKVCache, is_pool, take_rows
from jaxspec.models import decoder
from jaxspec.models.paged import paged_forward
from jaxspec.round import RoundState, context
from jaxspec.sampling import SamplingParams
from jaxspec.trees.tree import chain
from tests import tiny
from tests.drafters import dflash_cases, eagle_cases, mtp_cases, uno_cases
from tests.drafters.batch_checks import pools_of
from tests.specs import spec_of

PAGE_SIZE, CHUNK = 4, 5

TREE = dict(num_steps=3, topk=2, num_draft_tokens=6)
CASES = {
    "none": lambda: (tiny.target(), None, {}),
    "ngram": lambda: (tiny.target(), NgramHistory(), dict(num_draft_tokens=5)),
    "eagle": lambda: (eagle_cases.tiny_target(), eagle_cases.random_head("eagle"), TREE),
    "eagle3": lambda: (eagle_cases.tiny_target(), eagle_cases.random_head("eagle3"), dict(static_tree="0 1 00 01 000")),
    "speculators": lambda: (
        eagle_cases.tiny_target(),
        eagle_cases.random_head("speculators"),
        dict(num_steps=3, topk=1, num_draft_tokens=4, use_rejection_sampling=True),
    ),
    "peagle": lambda: (eagle_cases.tiny_target(), eagle_cases.random_head("peagle"), {}),
    "mtp tree": lambda: (mtp_cases.target("raw"), None, TREE),
    "mtp sampled": lambda: (
        mtp_cases.target("two layers"),
        None,
        dict(num_steps=3, topk=1, num_draft_tokens=4, use_rejection_sampling=True),
    ),
    "mtp in turn": lambda: (mtp_cases.target("three layers"), None, dict(num_steps=5, topk=1, num_draft_tokens=6)),
    "standalone": lambda: (tiny.target(), tiny.small_draft(), TREE),
    "dflash": lambda: (dflash_cases.target(), dflash_cases.random_draft("sliding"), dict(topk=2, num_draft_tokens=6)),
    "dspark": lambda: (dflash_cases.target(), dflash_cases.random_draft("dspark"), {}),
    "uno": lambda: (uno_cases.target(), uno_cases.random_adapter(), dict(num_draft_tokens=4)),
}
SEPARATE = [name for name in CASES if name != "mtp in turn"]
KEY_LOOKAHEAD = {"eagle": 1, "eagle3": 1, "speculators": 1, "peagle": 1, "mtp tree": 1, "mtp sampled": 1, "mtp in turn": 3}


def batch_of(case: str, prompts) -> Batch:
    """A batch before prefill; requests are sampled where the case draws its drafts."""
    target, draft, spec = CASES[case]()
    sampled = spec.get("use_rejection_sampling", False) or case == "dspark"
    return open_batch(
        target,
        prompts,
        draft=draft,
        algorithm="auto" if draft or target.drafts else "none",
        spec=spec_of(**spec),
        sampling=[SamplingParams(temperature=float(sampled), seed=i) for i in range(len(prompts))],
        ignore_eos=True,
        max_new_tokens=24,
        page_size=PAGE_SIZE,
        prefill_chunk=CHUNK,
    )


def prompts_of(case: str) -> list[list[int]]:
    vocab = CASES[case]()[0].config.vocab_size
    return [np.random.default_rng(n).integers(0, min(vocab, 8), n).tolist() for n in (21, 9, 1)]


@cache
def prefilled(case: str) -> Batch:
    """A batch behind prefill, chunk after chunk; nothing here uses its state up."""
    batch = batch_of(case, prompts_of(case))
    batch.prefill()
    return batch


@partial(jax.jit, static_argnames=("program", "width"))
def take_in(program, params, draft_params, state: RoundState, rows, starts, counts, continued, *, width: int):
    """One prefill program of R rows: row j holds `counts[j]` <= width tokens of sequence `rows[j]` from `starts[j]` on.

    Returns the state of the R rows, the target's and the drafter's pools with everything that the rows wrote.
    """
    part, drafter = take_rows(state, rows), program.drafter
    part = dataclasses.replace(part, cache=PagedKVCache(part.cache.layers, part.cache.page_table, starts))
    positions = starts[:, None] + jnp.arange(width)
    valid = jnp.arange(width)[None] < counts[:, None]
    inside = jnp.minimum(positions, part.tokens.shape[1] - 1)
    tokens = jnp.where(valid, jnp.take_along_axis(part.tokens, inside, 1), 0)
    out = paged_forward(
        params,
        program.config,
        decoder.embed(params, program.config, tokens),
        part.cache.layers,
        part.cache.page_table,
        starts,
        positions,
        valid,
        taps=drafter.taps,
    )
    following = jnp.take_along_axis(part.tokens, (starts + counts)[:, None] + jnp.arange(drafter.lookahead), 1)
    ctx = dataclasses.replace(context(program, params, part, counts > 0), continued=continued)
    draft = drafter.prefill(draft_params, part.draft, ctx, tokens, following, out.features, counts)
    cache = PagedKVCache(out.layers, part.cache.page_table, starts + counts)
    return dataclasses.replace(part, cache=cache, draft=draft)


def in_rows(batch, state, rows: Sequence[int], starts, counts, continued, width: int) -> RoundState:
    """`take_in` for a batch."""
    numbers = [jnp.asarray(x, jnp.int32) for x in (rows, starts, counts)]
    return take_in(batch.program, batch.tree, batch.draft_tree, state, *numbers, jnp.asarray(continued), width=width)


@partial(jax.jit, static_argnames="program")
def propose(program, params, draft_params, state, active):
    """Drafts with some of the rows."""
    ctx = context(program, params, state, active)
    return program.drafter.propose(draft_params, state.draft, ctx)


@partial(jax.jit, static_argnames="program")
def update(program, params, draft_params, state, active):
    """Draft extend with two tokens of every row that takes part."""
    ctx = context(program, params, state, active)
    rows, drafter = active.shape[0], program.drafter
    width = sum(program.config.hidden_size for _ in drafter.taps)
    features = jnp.ones((rows, 2, width)) if width else None
    count = jnp.where(active, min(2, drafter.max_accept), 0)
    return drafter.update(draft_params, state.draft, ctx, jnp.ones((rows, 2), jnp.int32), features, count)


def row_leaves(state, row: int) -> list[np.ndarray]:
    """What a drafter's state holds of one row, beside the pools."""
    return [np.asarray(x) for x in jax.tree.leaves(take_rows(state, jnp.array([row]))) if x.shape[:1] == (1,)]


def committed(state: RoundState, row: int, length: int) -> list[np.ndarray]:
    """Keys and values of a row's positions in all pools of the target and the drafter, read through its page table."""
    index = np.arange(length)
    page = np.asarray(state.cache.page_table)[row, index // PAGE_SIZE]
    return [np.asarray(pool)[page, index % PAGE_SIZE] for layer in pools_of(state) for pool in layer]


def of_pages(pools, pages) -> list[np.ndarray]:
    """Everything that some pages hold."""
    return [np.asarray(pool)[np.asarray(pages)] for layer in pools for pool in layer]


def assert_equal(ours, theirs, tolerance: float = 0.0) -> None:
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_rows_that_take_no_part_change_nothing(case):
    batch = prefilled(case)
    state, args = batch.state, (batch.program, batch.tree, batch.draft_tree)
    everyone, some = jnp.ones(3, bool), jnp.array([True, False, True])
    pages = np.asarray(state.cache.page_table)[1]
    pages = pages[pages > 0]

    proposal, whole = propose(*args, state, some), propose(*args, state, everyone)
    check_tree(batch.program.drafter, proposal.tree)
    proposed = dataclasses.replace(state, draft=proposal.state, cache=dataclasses.replace(state.cache, layers=proposal.layers))
    assert_equal(of_pages(pools_of(proposed), pages), of_pages(pools_of(state), pages))
    assert_equal(row_leaves(proposal.state, 1), row_leaves(state.draft, 1))
    np.testing.assert_array_equal(proposal.tree.tokens[some], whole.tree.tokens[some])
    np.testing.assert_array_equal(proposal.num_exact, jnp.where(some, whole.num_exact, 0))

    updated = dataclasses.replace(proposed, draft=update(*args, proposed, some))
    assert_equal(of_pages(pools_of(updated), pages), of_pages(pools_of(state), pages))
    assert_equal(row_leaves(updated.draft, 1), row_leaves(state.draft, 1))


@pytest.mark.parametrize("case", SEPARATE)
def test_a_prompt_as_blocks_of_one_program_is_the_prompt_chunk_after_chunk(case):
    prompts = prompts_of(case)
    chunked, other, width = prefilled(case).state, batch_of(case, prompts), 6
    assert other.program.drafter.separate_blocks
    # Tokens with the first sampled one, which stands behind the last block; nothing else is known beforehand.
    state = dataclasses.replace(other.state, tokens=chunked.tokens)
    ends = [(row, at, len(prompt)) for row, prompt in enumerate(prompts) for at in range(0, len(prompt), width)]
    blocks = [(row, at, min(width, end - at), at + width < end) for row, at, end in ends]
    blocks.reverse()  # so that what an earlier block should not write would be written last
    blocks.insert(2, (1, 3, 0, False))  # a row of the program that is not in use
    taken = in_rows(other, state, *zip(*blocks, strict=True), width)
    last = sorted((row, j) for j, (row, _, count, goes_on) in enumerate(blocks) if count and not goes_on)
    taken = take_rows(taken, jnp.array([j for _, j in last]))
    np.testing.assert_array_equal(taken.cache.length, [len(p) for p in prompts])
    for row, prompt in enumerate(prompts):
        assert_equal(row_leaves(taken.draft, row), row_leaves(chunked.draft, row), 1e-5)
        assert_equal(committed(taken, row, len(prompt)), committed(chunked, row, len(prompt)), 1e-5)

    # A block whose text goes on in another row writes nothing behind its own tokens.
    first = blocks.index((0, 0, width, True))
    alone = [(row, at, count * (j == first), goes_on) for j, (row, at, count, goes_on) in enumerate(blocks)]
    taken = in_rows(other, state, *zip(*alone, strict=True), width)
    assert all(x[:width].any() and not x[width:].any() for x in committed(taken, first, len(prompts[0])))


@pytest.mark.parametrize("case", CASES)
def test_a_row_behind_a_shared_prefix_drafts_as_a_cold_one(case):
    pages, ahead, (first, _, third) = 2, KEY_LOOKAHEAD.get(case, 0), prompts_of(case)
    shared = pages * PAGE_SIZE
    second = first[: shared + ahead] + [(t + 1) % 8 for t in first[shared + ahead :][:5]]
    batch = batch_of(case, [first, second, third])
    assert batch.program.drafter.key_lookahead == ahead
    assert batch.program.drafter.separate_blocks == (case in SEPARATE)
    start = batch.state
    initial = jax.tree.map(jnp.copy, take_rows(start.draft, jnp.array([1])))
    batch.prefill()
    cold, args = batch.state, (batch.program, batch.tree, batch.draft_tree)

    # The second row anew: the first one's pages in front, and garbage where its own prefix and all behind it stood.
    own = cold.cache.page_table[1]
    wrecked = own[own > 0]
    wreck = lambda pool: jax.tree.map(lambda x: x.at[wrecked].set(9.0), pool)  # noqa: E731
    table = cold.cache.page_table.at[1, :pages].set(cold.cache.page_table[0, :pages])
    draft = jax.tree.map(lambda x, y: wreck(x) if is_pool(x) else x.at[1:2].set(y), cold.draft, initial, is_leaf=is_pool)
    cache = PagedKVCache(wreck(cold.cache.layers), table, cold.cache.length)
    state = dataclasses.replace(cold, cache=cache, draft=draft)
    warm = in_rows(batch, state, [1], [shared], [len(second) - shared], [False], len(second))
    assert_equal(committed(warm, 0, len(second)), committed(cold, 1, len(second)), 1e-5)
    ours, theirs = propose(*args, warm, jnp.ones(1, bool)).tree, propose(*args, cold, jnp.ones(3, bool)).tree
    assert_equal([x[0] for x in jax.tree.leaves(ours)], [x[1] for x in jax.tree.leaves(theirs)], 1e-5)


def test_a_tree_beyond_what_its_drafter_announced_is_an_error():
    with pytest.raises(ConfigError, match="NONE: a proposal of 2 nodes .* slack=1"):
        check_tree(Drafter(), chain(jnp.zeros((1, 2), jnp.int32)))

    class Short(Drafter):
        slack = 4

    with pytest.raises(ConfigError, match="depth 1 .* emit 2 tokens a round, more than max_accept=1"):
        check_tree(Short(), chain(jnp.zeros((1, 2), jnp.int32)))
