"""Is what comes out distributed like the target? Chi-square tests of whole emitted sequences.

Every row is a round of its own, with its own drafts and seeds, over a Markov target with four tokens. A round's tokens are
continued with draws from the target, so that all rows have the same length; then the exact probability of every sequence
is known, whatever was drafted. One error level for all the tests of this file together: 1e-3 (Bonferroni). Seeds are fixed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import verify
from jaxspec.sampling import SamplingParams, coins, round_keys, row_keys, sampling_state
from jaxspec.trees.tree import DraftTree, chain, from_parents
from tests.parity.checks.statistics import p_value

V, LENGTH, ROUNDS, START = 4, 3, 25_000, 1
SETTINGS = {"plain": {}, "hot": {"temperature": 1.5}, "filtered": {"temperature": 0.9, "top_k": 3, "top_p": 0.9, "min_p": 0.02}}
TREES = ("wide", "deep", "random")
LEVEL = 1e-3 / (len(TREES) * len(SETTINGS) + 2 * 2 + 1)

RANDOM = np.random.default_rng(20240607)
LOGITS = (RANDOM.normal(size=(V, V)) * 1.2).astype(np.float32)
DRAFT = RANDOM.dirichlet(np.full(V, 0.8), V)


def judge_by(*arguments, mode: str) -> verify.Acceptance:
    return verify.Verifier(mode)(*arguments)


ACCEPT = jax.jit(judge_by, static_argnames="mode")


def draw(cdf_rows: np.ndarray, random: np.random.Generator) -> np.ndarray:
    cdf = np.cumsum(cdf_rows, -1)
    return np.minimum((random.random((len(cdf), 1)) * cdf[:, -1:] >= cdf).sum(1), V - 1).astype(np.int32)


@functools.cache
def target_of(setting: str) -> tuple:
    """The state of ROUNDS equal requests, and the Markov matrix that they sample from (float64)."""
    params = SamplingParams(**{"temperature": 1.0, **SETTINGS[setting]})
    state = sampling_state([params] * ROUNDS, V, [()] * ROUNDS, [False] * ROUNDS)
    rows = LOGITS.astype(np.float64) / params.temperature
    p = np.exp(rows - rows.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    if params.top_k > 0:
        p = np.where(p >= np.sort(p, 1)[:, -params.top_k][:, None], p, 0)
        p /= p.sum(1, keepdims=True)
    if params.top_p < 1:
        down = np.sort(p, 1)[:, ::-1]
        last = (np.cumsum(down, 1) < params.top_p).sum(1)
        p = np.where(p >= np.take_along_axis(down, last[:, None], 1), p, 0)
        p /= p.sum(1, keepdims=True)
    p = np.where(p >= params.min_p * p.max(1, keepdims=True), p, 0)
    return state, p / p.sum(1, keepdims=True)


def trees_of(kind: str, roots: np.ndarray | int = START) -> DraftTree:
    """Distinct siblings below these roots, drawn without replacement from the draft's row of their parent.

    The draft must have preferences: over uniformly drawn siblings many a mistake averages out.
    """
    parents = {"wide": [-1, 0, 0, 0, 1, 1], "deep": [-1, 0, 1, 1, 0, 2], "random": None}[kind]
    nodes = 6
    parent = np.zeros((ROUNDS, nodes), np.int32) - 1
    if parents is None:
        for i in range(1, nodes):
            parent[:, i] = RANDOM.integers(0, i, ROUNDS)
    else:
        parent[:] = parents
    tokens = np.full((ROUNDS, nodes), START, np.int32)
    tokens[:, 0] = roots
    valid = np.ones((ROUNDS, nodes), bool)
    taken = np.zeros((ROUNDS, nodes, V), bool)
    rows = np.arange(ROUNDS)
    for i in range(1, nodes):
        race = DRAFT[tokens[rows, parent[:, i]]] / RANDOM.exponential(size=(ROUNDS, V))
        tokens[:, i] = np.where(taken[rows, parent[:, i]], 0, race).argmax(1)
        valid[:, i] = ~taken[rows, parent[:, i], tokens[:, i]]
        taken[rows, parent[:, i], tokens[:, i]] = True
    return jax.jit(from_parents, static_argnames="max_depth")(
        jnp.asarray(tokens), jnp.asarray(parent), jnp.asarray(valid), max_depth=nodes - 1
    )


def chains_of(steps: int) -> DraftTree:
    """Chains drawn from the draft's Markov matrix, which they carry."""
    nodes, q = [np.full(ROUNDS, START, np.int32)], [np.zeros((ROUNDS, V))]
    for _ in range(steps):
        q.append(DRAFT[nodes[-1]])
        nodes.append(draw(q[-1], RANDOM))
    return chain(jnp.asarray(np.stack(nodes, 1)), draft_probs=jnp.asarray(np.stack(q, 1).astype(np.float32)))


def sequences(emitted: np.ndarray, count: np.ndarray, p: np.ndarray) -> list[tuple]:
    """The first LENGTH tokens of every row, of its `count` emitted ones or else drawn from the target."""
    random = np.random.default_rng(3)
    out, last = [], np.full(ROUNDS, START)
    for i in range(LENGTH):
        drawn = draw(p[last], random)
        own = emitted[:, i] if i < emitted.shape[1] else drawn
        last = np.where(i < count, own, drawn)
        out.append(last)
    return [tuple(row) for row in np.stack(out, 1).tolist()]


def p_of(accepted: verify.Acceptance, p: np.ndarray) -> float:
    return p_of_sequences(sequences(np.asarray(accepted.tokens), np.asarray(accepted.num_drafts) + 1, p), p)


def p_of_sequences(found: list[tuple], p: np.ndarray) -> float:
    expected = list(np.ndindex(*(V,) * LENGTH))
    probs = [np.prod([p[a, b] for a, b in zip((START, *s[:-1]), s, strict=True)]) for s in expected]
    return p_value(found, expected, probs)


def run(tree: DraftTree, state, seed: int, mode: str = "target_only", judge=ACCEPT) -> verify.Acceptance:
    logits = jnp.asarray(LOGITS)[tree.tokens]
    keys = row_keys(range(seed * ROUNDS, (seed + 1) * ROUNDS))
    length = jnp.asarray(RANDOM.integers(0, 1000, ROUNDS), jnp.int32)
    return judge(tree, logits, state, keys, length, mode=mode)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", TREES)
def test_target_only_on_trees(kind, setting):
    state, p = target_of(setting)
    accepted = run(trees_of(kind), state, seed=1)
    assert p_of(accepted, p) > LEVEL
    assert 0.3 < np.asarray(accepted.num_drafts).mean() < LENGTH


def two_rounds(later: bool) -> float:
    """The p-value of what two rounds emit one behind the other; the second begins at its own length, or at the first's."""
    state, p = target_of("plain")
    keys, length = row_keys(range(9 * ROUNDS, 10 * ROUNDS)), jnp.asarray(RANDOM.integers(0, 1000, ROUNDS), jnp.int32)
    first = trees_of("wide")
    one = ACCEPT(first, jnp.asarray(LOGITS)[first.tokens], state, keys, length, mode="target_only")
    count, rows = np.asarray(one.num_drafts) + 1, np.arange(ROUNDS)
    second = trees_of("wide", np.asarray(one.tokens)[rows, count - 1])
    two = ACCEPT(second, jnp.asarray(LOGITS)[second.tokens], state, keys, length + later * count, mode="target_only")
    emitted = np.zeros((ROUNDS, one.tokens.shape[1] + two.tokens.shape[1]), np.int32)
    emitted[:, : one.tokens.shape[1]] = one.tokens
    emitted[rows[:, None], count[:, None] + np.arange(two.tokens.shape[1])] = two.tokens
    return p_of_sequences(sequences(emitted, count + np.asarray(two.num_drafts) + 1, p), p)


def test_the_coins_of_two_rounds_are_independent():
    assert two_rounds(later=True) > LEVEL
    assert two_rounds(later=False) < 1e-9, "the same coins in both rounds are seen"


@pytest.mark.parametrize("setting", ["plain", "filtered"])
@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_chains_with_draft_probabilities(mode, setting):
    state, p = target_of(setting)
    assert p_of(run(chains_of(4), state, seed=2, mode=mode), p) > LEVEL


def test_block_verification_accepts_more():
    state, _ = target_of("plain")
    tree = chains_of(4)
    means = [np.asarray(run(tree, state, seed=2, mode=m).num_drafts).mean() for m in ("rejection", "block")]
    assert means[1] > means[0] + 0.02


# The same test must find planted mistakes: otherwise it shows nothing.


def test_finds_a_duplicated_sibling():
    tree = trees_of("wide")
    tokens = tree.tokens.at[:, 2].set(tree.tokens[:, 1])
    state, p = target_of("plain")
    assert p_of(run(DraftTree(tokens, tree.parent, tree.depth, tree.ancestors, tree.valid, max_depth=5), state, 1), p) < LEVEL


@pytest.mark.parametrize("mode", verify.MODES)
def test_finds_a_missing_residual_correction(mode, monkeypatch):
    original = verify._draw
    monkeypatch.setattr(verify, "_draw", lambda left, full, coin: original(full, full, coin))
    state, p = target_of("plain")
    tree = trees_of("wide") if mode == "target_only" else chains_of(4)
    traced_anew = jax.jit(lambda *args, mode: judge_by(*args, mode=mode), static_argnames="mode")
    assert p_of(run(tree, state, 1, mode, traced_anew), p) < LEVEL


def test_finds_lossy_thresholds():
    state, p = target_of("plain")
    tree = trees_of("wide")
    drawn = coins(round_keys(row_keys(range(ROUNDS)), jnp.zeros(ROUNDS, jnp.int32)), tree.num_nodes)
    probs = jnp.asarray(p.astype(np.float32))[tree.tokens]
    judge = jax.jit(verify.accept_target_only)
    assert p_of(judge(tree, probs, *drawn, 1.0, 0.9), p) < LEVEL
    assert p_of(judge(tree, probs, *drawn, 0.3, 1.0), p) < LEVEL


def test_finds_a_random_number_used_twice():
    state, p = target_of("plain")
    tree = chains_of(4)
    probs = jnp.asarray(p.astype(np.float32))[tree.tokens]
    drawn, _ = coins(round_keys(row_keys(range(ROUNDS)), jnp.zeros(ROUNDS, jnp.int32)), tree.num_nodes)
    assert p_of(jax.jit(verify.accept_rejection)(tree, probs, drawn, drawn[:, 0]), p) < LEVEL


def test_finds_a_wrong_draft_distribution():
    state, p = target_of("plain")
    tree = chains_of(4)
    flat = chain(tree.tokens, draft_probs=jnp.full_like(tree.draft_probs, 1 / V))
    assert p_of(run(flat, state, 1, "rejection"), p) < LEVEL
