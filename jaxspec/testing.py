"""Checks that hold for every drafter: for the tests of one's own, and for those of the drafters that come with jaxspec.

    from jaxspec.testing import check_drafter

    def test_mine():
        check_drafter(params, prompts, algorithm=MyDrafter(num_steps=3), draft=my_parameters)

Each raises AssertionError with what is wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import generation
from jaxspec.config import SpecConfig
from jaxspec.drafters.base import Drafter, Proposal
from jaxspec.engine.batch import Batch, open_batch
from jaxspec.kvcache import is_pool
from jaxspec.round import Program, context

PAGE_SIZE = 4
ROUNDS = 4
"""Rounds after which `check_state` looks."""


def check_drafter(
    params,
    prompts: Sequence[Sequence[int]],
    *,
    algorithm: str | Drafter = "auto",
    draft: Any = None,
    spec: SpecConfig | None = None,
    max_new_tokens: int = 24,
) -> float:
    """All checks of this module.

    Args:
      params: the target, small and in float32.
      prompts: token ids; at least two prompts, best of different lengths.
      algorithm: a drafter, or a name.
      draft: its parameters.
      spec: parameters of the speculation.
      max_new_tokens: of each answer.

    Returns:
      The mean accept length: a drafter that never guesses right passes every check with 1.0.
    """
    given = {"algorithm": algorithm, "draft": draft, "spec": spec, "max_new_tokens": max_new_tokens}
    check_proposal(params, prompts, **given)
    check_rows(params, prompts, **given)
    check_state(params, prompts, **given)
    return check_lossless(params, prompts, **given)


def start(params, prompts, algorithm, draft, spec: SpecConfig | None, max_new_tokens: int) -> Batch:
    """Greedy answers to `prompts`, with the prompts taken in: every sequence stands before its first round."""
    batch = open_batch(
        params,
        [list(prompt) for prompt in prompts],
        draft=draft,
        algorithm=algorithm,
        spec=spec,
        seed=list(range(len(prompts))),
        ignore_eos=True,
        max_new_tokens=max_new_tokens,
        page_size=PAGE_SIZE,
        prefill_chunk=PAGE_SIZE,
    )
    batch.prefill()
    return batch


def check_lossless(
    params,
    prompts: Sequence[Sequence[int]],
    *,
    algorithm: str | Drafter = "auto",
    draft: Any = None,
    spec: SpecConfig | None = None,
    max_new_tokens: int = 24,
) -> float:
    """Greedy answers equal those of plain decoding: all prompts at once and the first one alone.

    Returns:
      The mean accept length.
    """
    shared = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "page_size": PAGE_SIZE, "prefill_chunk": PAGE_SIZE}
    prompts = [list(prompt) for prompt in prompts]
    plain = generation.generate(params, prompts, algorithm="none", **shared)
    lengths = []
    for asked in (prompts, prompts[:1]):
        answers = generation.generate(params, asked, algorithm=algorithm, draft=draft, spec=spec, **shared)
        for i, (answer, expected) in enumerate(zip(answers, plain, strict=False)):
            name = answer.stats.algorithm
            assert answer.tokens == expected.tokens, (
                f"prompt {i} of {len(asked)}: {name} answers {answer.tokens}, plain decoding {expected.tokens}"
            )
            lengths.append(answer.stats.accept_length)
    return float(np.mean(lengths))


def check_proposal(
    params,
    prompts: Sequence[Sequence[int]],
    *,
    algorithm: str | Drafter = "auto",
    draft: Any = None,
    spec: SpecConfig | None = None,
    max_new_tokens: int = 24,
) -> None:
    """The first proposal is a tree, `slack` and `max_accept` have room for it, and the state keeps its shapes."""
    begun = start(params, prompts, algorithm, draft, spec, max_new_tokens)
    drafter, state, batch = begun.program.drafter, begun.state, len(prompts)
    made = _propose(begun.program, begun.tree, begun.draft_tree, state)
    tree = made.tree
    tokens, parent, valid = (np.asarray(x) for x in (tree.tokens, tree.parent, tree.valid))
    nodes, exact = tokens.shape[1], made.exact.shape[1]
    assert tokens.shape[0] == batch, f"the tree has {tokens.shape[0]} rows for {batch} sequences"
    assert exact == drafter.num_exact, f"{exact} exact tokens are proposed, num_exact says {drafter.num_exact}"
    assert valid[:, 0].all() and (parent[:, 0] == -1).all(), "node 0 is the root: valid, with parent -1"
    if not exact:
        assert (tokens[:, 0] == np.asarray(state.bonus)).all(), "the root is ctx.bonus, the last token that was emitted"
    row, node = np.nonzero(valid[:, 1:])
    above = parent[row, node + 1]
    assert ((above >= 0) & (above <= node)).all(), "parents stand before their children"
    assert valid[row, above].all(), "the parent of a valid node is valid"
    vocab = params.config.vocab_size
    assert (tokens[valid] >= 0).all() and (tokens[valid] < vocab).all(), f"token ids lie below {vocab}"
    assert nodes + exact <= drafter.slack, f"slack={drafter.slack} has no room for {nodes} nodes and {exact} exact tokens"
    longest = min(tree.max_depth, nodes - 1) + 1 + exact
    assert longest <= drafter.max_accept, f"max_accept={drafter.max_accept}, but a round can emit {longest} tokens"
    assert int(np.asarray(tree.depth).max()) <= tree.max_depth, f"a node lies deeper than max_depth={tree.max_depth}"
    before, after = (jax.tree.map(lambda x: (x.shape, x.dtype), s) for s in (state.draft, made.state))
    assert before == after, f"propose changes the state from {before} to {after}"


def check_rows(
    params,
    prompts: Sequence[Sequence[int]],
    *,
    algorithm: str | Drafter = "auto",
    draft: Any = None,
    spec: SpecConfig | None = None,
    max_new_tokens: int = 24,
) -> None:
    """A round changes nothing of a row that is done, and of the others nothing behind `slack` slots."""
    begun = start(params, prompts, algorithm, draft, spec, max_new_tokens)
    drafter, batch = begun.program.drafter, len(prompts)
    for leaf in _rows(begun.state.draft):
        assert leaf.shape[:1] == (batch,), f"a leaf of the state has shape {leaf.shape}: {batch} sequences stand in front"
    begun.state = dataclasses.replace(begun.state, done=begun.state.done.at[0].set(True))
    before = jax.tree.map(_host, (begun.state.draft, begun.state.cache))
    begun.run(1)
    after = jax.tree.map(_host, (begun.state.draft, begun.state.cache))
    for old, new in zip(_rows(before), _rows(after), strict=True):
        assert np.array_equal(old[0], new[0], equal_nan=True), "a leaf changed in a row that takes no part"
    lengths = np.asarray(before[1].length)
    for old, new in zip(_pools(before), _pools(after), strict=True):
        for row, pages in enumerate(before[1].page_table):
            kept = 0 if row == 0 else int(lengths[row]) + drafter.slack
            was, now = (x[pages[pages > 0]].reshape(-1, *x.shape[2:])[kept:] for x in (old, new))
            what = "that takes no part" if row == 0 else f"behind length + slack={drafter.slack} slots"
            assert np.array_equal(was, now, equal_nan=True), f"keys or values changed in row {row}, {what}"


def check_state(
    params,
    prompts: Sequence[Sequence[int]],
    *,
    algorithm: str | Drafter = "auto",
    draft: Any = None,
    spec: SpecConfig | None = None,
    max_new_tokens: int = 24,
) -> int:
    """After each of the first rounds the drafter proposes what it would propose had it taken in the same text as a prompt.

    So `update` was given the right tokens and features and made the right thing of them; answers alone do not show that, since
    verification makes them right whatever is drafted. A twentieth of the nodes may differ: rounding decides near ties.

    Returns:
      In how many rounds of a sequence the accepted nodes were not the tree's first ones, as they are in a chain.
    """
    given = {"algorithm": algorithm, "draft": draft, "spec": spec}
    begun, branched, same, nodes = start(params, prompts, **given, max_new_tokens=max_new_tokens), 0, 0, 0
    for _ in range(ROUNDS):
        before = np.asarray(begun.state.cache.length)
        tree = jax.tree.map(np.asarray, _propose(begun.program, begun.tree, begun.draft_tree, begun.state).tree)
        begun.run(1)
        state = begun.state
        tokens, lengths = np.asarray(state.tokens), np.asarray(state.cache.length)
        if np.asarray(state.done).any():
            break
        for row, (old, new) in enumerate(zip(before, lengths, strict=True)):
            branched += _path(tree, row, tokens[row, old + 1 : new]) not in (None, [*range(1, new - old)])
        texts = [tokens[row, : lengths[row]].tolist() for row in range(len(prompts))]
        left = max(len(p) for p in prompts) + max_new_tokens - max(map(len, texts))
        fresh = start(params, texts, **given, max_new_tokens=left)
        ours, theirs = (
            jax.tree.map(np.asarray, _propose(b.program, b.tree, b.draft_tree, b.state).tree) for b in (begun, fresh)
        )
        assert (np.asarray(fresh.state.bonus) == np.asarray(state.bonus)).all(), "the target continues the text otherwise"
        equal = (ours.tokens == theirs.tokens) & (ours.parent == theirs.parent) & ours.valid & theirs.valid
        same, nodes = same + int(equal.sum()), nodes + int((ours.valid | theirs.valid).sum())
    assert nodes, f"max_new_tokens={max_new_tokens} ends an answer with its first round"
    assert same >= 0.95 * nodes, (
        f"{nodes - same} of {nodes} nodes are not those that a drafter proposes which took in the same text as a prompt: "
        "`update` gets or keeps something else than `prefill`"
    )
    return branched


def _path(tree, row: int, tokens: np.ndarray) -> list[int] | None:
    """The nodes whose tokens were emitted below the root; None where a token is no node's."""
    node, path = 0, []
    for token in tokens:
        below = (tree.parent[row] == node) & (tree.tokens[row] == token) & tree.valid[row]
        if not below.any():
            return None
        node = int(np.argmax(below))
        path.append(node)
    return path


@partial(jax.jit, static_argnums=0)
def _propose(program: Program, params, draft_params, state) -> Proposal:
    """What the drafter proposes to all rows."""
    active = jnp.ones(state.done.shape, bool)
    return program.drafter.propose(draft_params, state.draft, context(program, params, state, active))


def _host(x) -> np.ndarray:
    """A copy that a donated program cannot take over; 16-bit floats and keys as what they are made of."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.array(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x)


def _rows(state) -> list:
    """The leaves that have the sequences in front."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_pool) if not is_pool(x)]


def _pools(state) -> list:
    """The arrays of all page pools."""
    return jax.tree.leaves([x for x in jax.tree.leaves(state, is_leaf=is_pool) if is_pool(x)])
