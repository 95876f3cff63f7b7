import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import verify
from jaxspec.config import ConfigError
from jaxspec.sampling import SamplingParams, row_keys, sampling_state
from jaxspec.trees.tree import DraftTree, chain, from_parents, root_only

NODES, V = 6, 9


@partial(jax.jit, static_argnames=("mode",))
def accept(tree, logits, sampling, keys, length, mode="target_only"):
    return verify.Verifier(mode)(tree, logits, sampling, keys, length)


build = jax.jit(from_parents, static_argnames="max_depth")


def state_of(*params, vocab=V):
    return sampling_state(params, vocab, [()] * len(params), [False] * len(params))


def random_trees(seed, batch, nodes=NODES, vocab=V):
    """Random trees with distinct siblings, and random logits that like the drafts."""
    random = np.random.default_rng(seed)
    parent = np.array([[-1] + [random.integers(0, i) for i in range(1, nodes)] for _ in range(batch)], np.int32)
    order = np.argsort(random.random((batch, vocab)), axis=1)
    tokens = np.stack([row[:nodes] for row in order]).astype(np.int32)
    tree = build(jnp.asarray(tokens), jnp.asarray(parent), jnp.ones((batch, nodes), bool), max_depth=nodes - 1)
    logits = random.normal(size=(batch, nodes, vocab)).astype(np.float32) * 2
    logits[np.arange(batch)[:, None], parent[:, 1:], tokens[:, 1:]] += 2
    return tree, jnp.asarray(logits)


def with_draft_probs(seed, batch, nodes=NODES, vocab=V):
    tree, logits = random_trees(seed, batch, nodes, vocab)
    q = jax.nn.softmax(jnp.asarray(np.random.default_rng(seed).normal(size=logits.shape).astype(np.float32)))
    return chain(tree.tokens, draft_probs=q), logits


def assert_consistent(tree, accepted, vocab=V):
    """Paths run over valid parent links, tokens are those of the path, everything is in range."""
    path, count, tokens = (np.asarray(x) for x in accepted)
    parent, valid, drafted = (np.asarray(x) for x in (tree.parent, tree.valid, tree.tokens))
    assert path.shape == tokens.shape == (len(count), tree.max_depth + 1)
    for b, n in enumerate(count):
        assert 0 <= n <= tree.max_depth
        assert path[b, 0] == 0 and (path[b, n + 1 :] == -1).all() and (tokens[b, n + 1 :] == 0).all()
        for i in range(n):
            node = path[b, i + 1]
            assert path[b, i] < node < tree.num_nodes and valid[b, node] and parent[b, node] == path[b, i]
            assert tokens[b, i] == drafted[b, node]
        assert ((tokens[b, : n + 1] >= 0) & (tokens[b, : n + 1] < vocab)).all()


def test_greedy_takes_the_targets_choices():
    tree, logits = random_trees(0, 64)
    accepted = accept(tree, logits, state_of(*[SamplingParams()] * 64), row_keys(range(64)), jnp.arange(64))
    assert_consistent(tree, accepted)
    target = np.argmax(logits, -1)
    for b in range(64):
        node, emitted = 0, []
        while True:
            emitted.append(target[b, node])
            child = [i for i in range(NODES) if tree.parent[b, i] == node and tree.tokens[b, i] == emitted[-1]]
            if not child:
                break
            node = child[0]
        assert accepted.tokens[b, : len(emitted)].tolist() == emitted
        assert accepted.num_drafts[b] == len(emitted) - 1
    assert np.asarray(accepted.num_drafts).max() >= 2


@pytest.mark.parametrize("mode", verify.MODES)
def test_greedy_rows_of_a_mixed_batch_get_the_argmax(mode):
    batch = 32
    tree, logits = with_draft_probs(1, batch)
    params = [SamplingParams(temperature=1.0, top_p=0.9) if b % 2 else SamplingParams() for b in range(batch)]
    mixed = accept(tree, logits, state_of(*params), row_keys(range(batch)), jnp.arange(batch), mode=mode)
    greedy = verify.accept_greedy(tree, jnp.argmax(logits, -1))
    assert_consistent(tree, mixed)
    for one, other in zip(mixed, greedy, strict=True):
        np.testing.assert_array_equal(one[::2], other[::2])
    assert any((one[1::2] != other[1::2]).any() for one, other in zip(mixed, greedy, strict=True))


@pytest.mark.parametrize("mode", verify.MODES)
def test_a_row_does_not_depend_on_its_batch(mode):
    batch = 5
    tree, logits = with_draft_probs(2, batch)
    params = [SamplingParams(temperature=0.8, top_k=4), SamplingParams(), *[SamplingParams(temperature=1.0)] * 3]
    seeds, length = [7, 8, 2**33, 7, 1], jnp.asarray([4, 5, 6, 4, 8])
    whole = accept(tree, logits, state_of(*params), row_keys(seeds), length, mode=mode)
    order = jnp.asarray([3, 0, 4])
    tree2, logits2 = jax.tree.map(lambda x: x[order], (tree, logits))
    state2 = state_of(*(params[i] for i in order))
    part = accept(tree2, logits2, state2, row_keys([seeds[i] for i in order]), length[order], mode=mode)
    for one, other in zip(whole, part, strict=True):
        np.testing.assert_array_equal(one[order], other)


def test_padding_nodes_change_nothing():
    """Neither their tokens (copies of real siblings), nor NaN in their rows, nor their number."""
    batch = 64
    tree, logits = random_trees(3, batch)
    state, keys, length = state_of(*[SamplingParams(temperature=1.0)] * batch), row_keys(range(batch)), jnp.arange(batch)
    plain = accept(tree, logits, state, keys, length)
    padded = DraftTree(
        tokens=jnp.concatenate([tree.tokens, tree.tokens], 1),
        parent=jnp.concatenate([tree.parent, jnp.zeros_like(tree.parent)], 1),
        depth=jnp.pad(tree.depth, ((0, 0), (0, NODES))),
        ancestors=jnp.pad(tree.ancestors, ((0, 0), (0, NODES), (0, 0))),
        valid=jnp.pad(tree.valid, ((0, 0), (0, NODES))),
        max_depth=tree.max_depth,
    )
    poisoned = jnp.concatenate([logits, jnp.full_like(logits, jnp.nan)], 1)
    for one, other in zip(plain, accept(padded, poisoned, state, keys, length), strict=True):
        np.testing.assert_array_equal(one, other)


def test_padding_behind_a_chain_changes_nothing():
    batch = 64
    tree, logits = with_draft_probs(4, batch)
    short = jax.tree.map(lambda x: x[:, :4], (tree, logits))
    short = (chain(short[0].tokens, draft_probs=short[0].draft_probs), short[1])
    masked = chain(tree.tokens, jnp.broadcast_to(jnp.arange(NODES) < 4, (batch, NODES)), tree.draft_probs)
    state, keys, length = state_of(*[SamplingParams(temperature=1.0)] * batch), row_keys(range(batch)), jnp.arange(batch)
    for mode in ("rejection", "block"):
        one = accept(*short, state, keys, length, mode=mode)
        other = accept(masked, logits, state, keys, length, mode=mode)
        np.testing.assert_array_equal(one.num_drafts, other.num_drafts)
        np.testing.assert_array_equal(one.tokens, other.tokens[:, :4])
        assert (one.num_drafts == 3).any()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(-2, NODES + 1), min_size=NODES, max_size=NODES),
    st.lists(st.integers(-2, V + 1), min_size=NODES, max_size=NODES),
    st.lists(st.booleans(), min_size=NODES, max_size=NODES),
    st.integers(0, 2**32 - 1),
)
def test_malformed_trees_cannot_loop_or_leave_the_vocabulary(parent, tokens, valid, seed):
    """Cycles, self-links, children before parents, ids outside the vocabulary: straight into the verifiers."""
    random = np.random.default_rng(seed)
    tree = DraftTree(
        tokens=jnp.asarray([tokens] * 2, jnp.int32),
        parent=jnp.asarray([parent] * 2, jnp.int32),
        depth=jnp.asarray(random.integers(-3, 9, (2, NODES)), jnp.int32),
        ancestors=jnp.asarray(random.integers(0, 2**32, (2, NODES, 1)), jnp.uint32),
        valid=jnp.asarray([valid] * 2),
        max_depth=NODES - 1,
    )
    probs = random.dirichlet(np.full(V, 0.2), (2, NODES)).astype(np.float32)
    coins = jnp.asarray(random.random((2, NODES)), jnp.float32)
    assert_consistent(tree, greedy(tree, jnp.asarray(probs.argmax(-1))))
    assert_consistent(tree, target_only(tree, jnp.asarray(probs), coins, coins[:, 0]))
    assert_consistent(tree, target_only(tree, jnp.asarray(probs), coins, coins[:, 0], 0.0, 0.0))
    drafts = dataclasses.replace(tree, draft_probs=jnp.asarray(probs[:, ::-1]), is_chain=True)
    assert_in_range(drafts, rejection(drafts, jnp.asarray(probs), coins, coins[:, 0]))
    assert_in_range(drafts, block(drafts, jnp.asarray(probs), coins, coins[:, 0]))


greedy, target_only = jax.jit(verify.accept_greedy), jax.jit(verify.accept_target_only)
rejection, block = jax.jit(verify.accept_rejection), jax.jit(verify.accept_block)


def assert_in_range(tree, accepted):
    path, count, tokens = (np.asarray(x) for x in accepted)
    assert ((path >= -1) & (path < tree.num_nodes)).all() and ((count >= 0) & (count <= tree.max_depth)).all()
    assert ((tokens >= 0) & (tokens < V)).all()


def test_tree_of_one_node_draws_from_the_target():
    probs = jnp.asarray([[[0.1, 0.0, 0.6, 0.3]]] * 4)
    coins = jnp.asarray([0.05, 0.1, 0.69, 0.999999])
    accepted = target_only(root_only(jnp.zeros(4, jnp.int32)), probs, jnp.zeros((4, 1)), coins)
    assert accepted.num_drafts.tolist() == [0] * 4
    assert accepted.tokens[:, 0].tolist() == [0, 2, 2, 3]


def test_children_without_mass_are_never_accepted():
    tree = build(jnp.asarray([[0, 1, 2]]), jnp.asarray([[-1, 0, 0]]), jnp.ones((1, 3), bool), max_depth=1)
    probs = jnp.asarray([[[0.5, 0.0, 0.5]] * 3])
    for threshold in (0.0, 1.0):
        accepted = target_only(tree, probs, jnp.zeros((1, 3)), jnp.zeros(1), threshold, threshold)
        assert accepted.tokens[0, 0] == 2 and accepted.path[0].tolist() == [0, 2]


def test_thresholds():
    """p = 0.3 for the only child and a coin of 0.5: refused unless a threshold lets it in."""
    tree = build(jnp.asarray([[0, 1]]), jnp.asarray([[-1, 0]]), jnp.ones((1, 2), bool), max_depth=1)
    probs = jnp.asarray([[[0.7, 0.3]] * 2])
    coins = jnp.full((1, 2), 0.5)

    def drafts(single, acc):
        return int(target_only(tree, probs, coins, coins[:, 0], single, acc).num_drafts[0])

    assert drafts(1.0, 1.0) == 0
    assert drafts(0.31, 1.0) == 0 and drafts(0.3, 1.0) == 1
    assert drafts(1.0, 0.61) == 0 and drafts(1.0, 0.59) == 1


def test_refused_children_are_not_drawn_again():
    tree = build(jnp.asarray([[0, 1, 2]]), jnp.asarray([[-1, 0, 0]]), jnp.ones((1, 3), bool), max_depth=1)
    probs = jnp.asarray([[[0.25, 0.25, 0.25, 0.25]] * 3])
    for final in np.linspace(0, 0.999, 20, dtype=np.float32):
        accepted = target_only(tree, probs, jnp.full((1, 3), 0.6), jnp.asarray([final]))
        assert accepted.num_drafts[0] == 0 and accepted.tokens[0, 0] == (0 if final < 0.5 else 3)


def test_when_rounding_leaves_no_mass_a_token_with_mass_comes_out():
    tree = build(jnp.asarray([[0, 2]]), jnp.asarray([[-1, 0]]), jnp.ones((1, 2), bool), max_depth=1)
    probs = jnp.asarray([[[0.0, 0.0, 0.9999999, 0.0]] * 2])
    coins = jnp.full((1, 2), 0.99999994)
    assert target_only(tree, probs, coins, coins[:, 0]).tokens[0, 0] == 2


@pytest.mark.parametrize("vocab", [3, 256, 257, 1000])
def test_inverse_cdf_over_a_large_vocabulary(vocab):
    random = np.random.default_rng(vocab)
    weights = random.dirichlet(np.full(vocab, 0.1), 200) * (random.random((200, vocab)) < 0.5) + 1e-3 / vocab
    weights[:, 0] = weights[:, -1] = 0
    coin = random.random(200)
    cdf = np.cumsum(weights, 1)
    want = np.array([np.searchsorted(c, u * c[-1], side="right") for c, u in zip(cdf, coin, strict=True)])
    got = np.asarray(jax.jit(verify._draw)(*[jnp.asarray(weights, jnp.float32)] * 2, jnp.asarray(coin, jnp.float32)))
    sure = np.abs(cdf - (coin * cdf[:, -1])[:, None]).min(1) > 1e-6
    np.testing.assert_array_equal(got[sure], want[sure])
    assert sure.mean() > 0.9 and (np.take_along_axis(weights, got[:, None], 1) > 0).all()
    for u in (0.0, 1 - 2**-24):
        ends = jax.jit(verify._draw)(*[jnp.asarray(weights, jnp.float32)] * 2, jnp.full(200, u, jnp.float32))
        assert (np.take_along_axis(weights, np.asarray(ends)[:, None], 1) > 0).all()


def test_nan_logits_give_tokens_of_the_vocabulary():
    tree, logits = random_trees(5, 4)
    state = state_of(*[SamplingParams(temperature=1.0)] * 4)
    accepted = accept(tree, jnp.full_like(logits, -jnp.inf), state, row_keys(range(4)), jnp.arange(4))
    assert_in_range(tree, accepted)


def test_same_drafts_same_target_accepts_everything():
    tree, logits = with_draft_probs(6, 64)
    q = jnp.concatenate([jnp.zeros((64, 1, V)), jax.nn.softmax(logits)[:, :-1]], 1)
    tree = chain(tree.tokens, draft_probs=q)
    state = state_of(*[SamplingParams(temperature=1.0)] * 64)
    for mode in ("rejection", "block"):
        accepted = accept(tree, logits, state, row_keys(range(64)), jnp.arange(64), mode=mode)
        assert (accepted.num_drafts == NODES - 1).all()


@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_modes_that_need_draft_probabilities_say_so(mode):
    tree, logits = random_trees(0, 1)
    state = state_of(SamplingParams(temperature=1.0))
    call = partial(verify.Verifier(mode), sampling=state, keys=row_keys([0]), length=jnp.zeros(1, int))
    with pytest.raises(ConfigError, match="not a chain.*target_only"):
        call(tree, logits)
    with pytest.raises(ConfigError, match="no draft_probs"):
        call(chain(tree.tokens), logits)


@pytest.mark.parametrize(
    "bad, message",
    [({"mode": "typical"}, "typical.*target_only"), ({"threshold_single": 1.1}, "1.1"), ({"threshold_acc": -0.1}, "-0.1")],
)
def test_bad_settings_are_refused(bad, message):
    with pytest.raises(ConfigError, match=message):
        verify.Verifier(**bad)
