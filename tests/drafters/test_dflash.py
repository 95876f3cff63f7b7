"""The block drafter inside the round: an oracle, what the cache holds, trees grown by heads, confidence, parameters."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ConfigError, DraftParams, DSparkOptions, SpecConfig, generate
from jaxspec.drafters import registry
from jaxspec.drafters.base import RoundContext
from jaxspec.drafters.dflash import drafter as dflash
from jaxspec.drafters.dflash import heads as dflash_heads
from jaxspec.drafters.dflash import model as dflash_model
from jaxspec.drafters.dflash.drafter import DFlashDrafter
from jaxspec.engine.batch import Batch, open_batch
from jaxspec.kvcache import LayerKV, PagedKVCache
from jaxspec.sampling import SamplingParams, row_keys, sampling_state
from tests.drafters.batch_checks import assert_caches_are_updated_in_place, assert_every_draft_is_accepted, count_traces
from tests.drafters.dflash_cases import VARIANTS, VOCAB, draft_config, random_draft, target
from tests.drafters.eagle_cases import prompts, tiny_target
from tests.specs import spec_of

PAGE_SIZE, PAGES, LENGTH = 4, 9, 13


class OracleDrafter(DFlashDrafter):
    """Knows the target's answers: the output of a slot is its position."""

    def run(self, params, layers, ctx):
        positions = ctx.cache.length[:, None] + jnp.arange(self.draft.block_size)
        return jnp.broadcast_to(positions[..., None], (*positions.shape, self.draft.hidden_size)).astype(jnp.float32), layers


def batch_for(ids, **options) -> Batch:
    return open_batch(target(), ids, **{"max_new_tokens": 24, "ignore_eos": True, **options})


@pytest.mark.parametrize("variant, topk, nodes", [("dflash", None, None), ("deepspec", 3, 40)])
def test_an_oracle_draft_is_always_accepted(variant, topk, nodes, monkeypatch):
    ids, draft = prompts(VOCAB), random_draft(variant)
    steps = draft.config.num_drafts
    new = 1 + 6 * (steps + 1)
    answers = generate(target(), ids, algorithm="none", max_new_tokens=new, ignore_eos=True)
    batch = batch_for(ids, draft=draft, max_new_tokens=new, prefill_chunk=4, topk=topk, num_draft_tokens=nodes)
    table = np.zeros((len(ids), batch.state.tokens.shape[1]), np.int32)
    for row, prompt, answer in zip(table, ids, answers, strict=True):
        row[: len(prompt) + new] = prompt + answer.tokens

    def logits(params, config, *rest):
        index = rest[-1][..., 0].astype(jnp.int32) + config.anchor_predicts
        return 9.0 * jax.nn.one_hot(jnp.take_along_axis(jnp.asarray(table), index, 1), VOCAB)

    monkeypatch.setattr(dflash_model, "logits", logits)
    fields = {f.name: getattr(batch.program.drafter, f.name) for f in dataclasses.fields(DFlashDrafter)}
    batch.program = dataclasses.replace(batch.program, drafter=OracleDrafter(**fields))
    assert_every_draft_is_accepted(batch, answers, steps)


def context(length: int) -> RoundContext:
    """Two sequences of LENGTH known tokens, `length` of them committed, their pages in no particular order."""
    pages = np.random.default_rng(0).permutation(np.arange(1, 2 * PAGES - 1)).reshape(2, -1)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (2, LENGTH + 1)), jnp.int32)
    return RoundContext(
        params=target().tree,
        cache=PagedKVCache((), jnp.asarray(pages, jnp.int32), jnp.full(2, length, jnp.int32)),
        tokens=tokens,
        prompt_length=jnp.zeros(2, jnp.int32),
        active=jnp.ones(2, bool),
        bonus=tokens[:, length],
        keys=row_keys([0, 1]),
        sampling=sampling_state([SamplingParams()] * 2, VOCAB, [[]] * 2, [True] * 2),
        config=target().config,
    )


def drafter_of(draft: DraftParams, **spec) -> DFlashDrafter:
    return registry.prepare("auto", target(), draft, spec_of(**spec))[2]


@partial(jax.jit, static_argnames="drafter")
def fed(drafter, params, state, ctx, features, count):
    """`count` [B] features from the committed length on."""
    index = jnp.minimum(ctx.cache.length[:, None] + jnp.arange(features.shape[1]), features.shape[1] - 1)
    chunk = jnp.take_along_axis(features, index[..., None], 1)
    real = (jnp.arange(features.shape[1]) < count[:, None])[..., None]
    return drafter.update(params, state, ctx, None, jnp.where(real, chunk, jnp.nan), count)


OUTPUTS = jax.jit(
    lambda drafter, params, state, ctx: drafter.predictions(params, ctx, drafter.run(params, state.layers, ctx)[0]),
    static_argnums=0,
)
PROPOSE = jax.jit(lambda drafter, params, state, ctx: drafter.propose(params, state, ctx), static_argnums=0)


def test_context_enters_once_and_blocks_leave_no_trace():
    draft = random_draft("sliding")
    drafter, params = drafter_of(draft), draft.tree
    features = jax.random.normal(jax.random.key(7), (2, LENGTH, draft.config.feature_size))
    empty = drafter.init(params, 2, 2 * PAGES - 1, PAGE_SIZE, 64, jnp.float32)
    whole = fed(drafter, params, empty, context(0), features, jnp.full(2, LENGTH))
    expected = PROPOSE(drafter, params, whole, context(LENGTH)).tree.tokens
    # Free slots may hold anything; a block is drafted behind every piece and its entries stay where they are.
    state = dflash.DFlashState(tuple(LayerKV(*(jnp.full_like(pool, jnp.nan) for pool in layer)) for layer in empty.layers))
    at, before = 0, None
    for count in (5, 1, 0, 3, 4):
        state = fed(drafter, params, state, context(at), features, jnp.full(2, count))
        at += count
        proposal = PROPOSE(drafter, params, state, context(at))
        if count == 0:
            np.testing.assert_array_equal(proposal.tree.tokens, before)
        before, state = proposal.tree.tokens, proposal.state
    np.testing.assert_array_equal(proposal.tree.tokens, expected)
    assert len(np.unique(expected)) > 2


def test_a_finished_row_keeps_its_entries():
    draft = random_draft("dflash")
    drafter, params = drafter_of(draft), draft.tree
    features = jax.random.normal(jax.random.key(7), (2, LENGTH, draft.config.feature_size))
    state = drafter.init(params, 2, 2 * PAGES - 1, PAGE_SIZE, 64, jnp.float32)
    after = fed(drafter, params, state, context(3), features, jnp.array([4, 0]))
    pages = np.asarray(context(3).cache.page_table)
    for layer in after.layers:
        assert np.asarray(layer.k)[pages[0]].any()
        assert not np.asarray(layer.k)[pages[1]].any()


@pytest.mark.parametrize("variant", ["dflash2", "dspark rnn"])
def test_trees_of_heads_follow_their_own_path(variant):
    """Every node is one of the best continuations of its own parent, in that parent's own state."""
    draft = random_draft(variant)
    config, params, topk = draft.config, draft.tree, 2
    drafter = drafter_of(draft, topk=topk, num_draft_tokens=11)
    state = drafter.init(params, 2, 2 * PAGES - 1, PAGE_SIZE, 64, jnp.float32)
    features = jax.random.normal(jax.random.key(7), (2, LENGTH, config.feature_size))
    state = fed(drafter, params, state, context(0), features, jnp.full(2, LENGTH))
    ctx = context(LENGTH)
    tree = PROPOSE(drafter, params, state, ctx).tree
    assert bool(tree.valid.all())
    hidden, base = OUTPUTS(drafter, params, state, ctx)
    step = jax.jit(dflash_heads.step, static_argnums=1)
    contrasts = 0
    for row in range(2):
        states = {0: dflash_heads.initial_state(config, 1)}
        for node in range(tree.num_nodes):
            children = np.flatnonzero(np.asarray(tree.parent[row]) == node)
            slot = int(tree.depth[row, node])
            if not children.size or slot == config.num_drafts:
                continue
            token = tree.tokens[row, node].reshape(1, 1)
            out = step(params, config, hidden[row : row + 1, slot], base[row : row + 1, slot], token, states[node])
            ids = (
                jnp.argsort(-out.logits[0, 0])[:topk]
                if out.ids is None
                else out.ids[0, 0, jnp.argsort(-out.logits[0, 0])[:topk]]
            )
            assert {int(tree.tokens[row, c]) for c in children} <= set(ids.tolist())
            states |= {int(c): out.state for c in children}
            contrasts += int(jnp.argmax(out.logits[0, 0]) != jnp.argmax(base[row, slot])) if out.ids is None else 1
    assert contrasts, "the heads change nothing, so this shows nothing"


def test_chains_end_where_the_draft_expects_refusal():
    draft = random_draft("dspark")
    config, params, whole = draft.config, draft.tree, drafter_of(draft)
    features = jax.random.normal(jax.random.key(7), (2, LENGTH, config.feature_size))
    state = whole.init(params, 2, 2 * PAGES - 1, PAGE_SIZE, 64, jnp.float32)
    state = fed(whole, params, state, context(0), features, jnp.full(2, LENGTH))
    ctx = context(LENGTH)
    full = PROPOSE(whole, params, state, ctx).tree
    hidden, _ = OUTPUTS(whole, params, state, ctx)
    survival = np.cumprod(jax.nn.sigmoid(dflash_heads.confidence(params, config, hidden, full.tokens[:, :-1])), axis=1)
    limit = float(survival[0, 1:3].mean())
    tree = PROPOSE(drafter_of(draft, min_draft_survival=limit), params, state, ctx).tree
    np.testing.assert_array_equal(tree.tokens, full.tokens)
    np.testing.assert_array_equal(tree.valid[:, 1:], survival >= limit)
    assert tree.valid[0].tolist() == [True, True, True, False, False]
    assert bool(full.valid.all())


def resolved(variant: str, **spec) -> SpecConfig:
    draft = random_draft(variant)
    return registry.resolve(draft.config.algorithm, spec_of(**spec), target().config, draft)


def test_the_tree_follows_from_the_draft():
    def shape(spec: SpecConfig) -> tuple:
        return spec.num_steps, spec.topk, spec.num_draft_tokens, spec.verification

    assert shape(resolved("dflash")) == (4, 1, 5, "target_only")
    assert shape(resolved("dflash", num_draft_tokens=5)) == (4, 1, 5, "target_only")
    assert shape(resolved("dflash", num_steps=2)) == (2, 1, 3, "target_only")
    assert shape(resolved("dflash", topk=4, num_draft_tokens=30)) == (4, 4, 30, "target_only")
    assert shape(resolved("deepspec")) == (4, 1, 5, "target_only")
    # Drafts that are made to be sampled from are, unless a tree or lossy thresholds need target-only verification.
    assert shape(resolved("dspark")) == (4, 1, 5, "rejection")
    assert shape(resolved("dflash2")) == (4, 1, 5, "rejection")
    assert shape(resolved("dspark", use_block_verification=True))[-1] == "block"
    assert shape(resolved("dspark", accept_threshold_acc=0.9))[-1] == "target_only"
    assert shape(resolved("dspark", topk=2)) == (4, 2, 5, "target_only")


@pytest.mark.parametrize(
    "variant, spec, message",
    [
        ("dflash", {"num_draft_tokens": 4}, r"num_draft_tokens=4 disagrees with the draft's block_size=5"),
        ("deepspec", {"num_draft_tokens": 4}, r"num_draft_tokens=4 disagrees .*block_size=4: .*has 5 nodes \(one more"),
        ("dflash", {"num_steps": 5}, r"num_steps=5 exceeds the 4 tokens"),
        ("dflash", {"topk": VOCAB + 1}, r"topk=9 exceeds its vocabulary of 8"),
        ("dflash2", {"topk": 5}, r"topk=5 exceeds the 4 candidates"),
        ("dflash", {"topk": 2, "num_draft_tokens": 32}, r"num_draft_tokens=32 is out of range: .* 2 to 31 nodes"),
        ("dspark", {"topk": 2, "num_draft_tokens": 16}, r"num_draft_tokens=16 is out of range: .* 2 to 15 nodes"),
        ("dflash", {"topk": 2, "use_rejection_sampling": True}, r"use_rejection_sampling checks chains only: topk=2"),
        ("dflash", {"topk": 2, "use_block_verification": True}, r"use_block_verification checks chains only"),
        ("dflash", {"draft_window_size": 4}, r"draft_window_size=4 must not be below the draft's block_size=5"),
        ("dflash", {"static_tree": "0 1"}, r"static_tree='0 1' is not an option of algorithm='dflash'"),
        ("dflash", {"token_map": (1, 2)}, r"token_map=\(1, 2\) is not an option of algorithm='dflash'"),
        ("dspark rnn", {"min_draft_survival": 0.5}, r"needs a draft with a confidence head"),
        ("dspark", {"min_draft_survival": 0.5, "topk": 2}, r"shortens chains: topk=2"),
    ],
)
def test_what_disagrees_with_the_draft_is_refused(variant, spec, message):
    with pytest.raises(ConfigError, match=message):
        resolved(variant, **spec)


def test_min_draft_survival_is_a_probability():
    with pytest.raises(ConfigError, match=r"min_draft_survival=1.5 must lie in \[0, 1\)"):
        DSparkOptions(min_draft_survival=1.5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mask_token_id": VOCAB}, r"mask_token_id=8 must lie in the vocabulary of 8"),
        ({"block_size": 1}, r"block_size=1 leaves no draft: it must be at least 2"),
        ({"block_size": 0, "anchor_predicts": True}, r"block_size=0 leaves no draft: it must be at least 1"),
        ({"width": 24}, r"width 24 cannot use the embedding of a target of width 16"),
        ({"width": 24, "own_embedding": True}, r"width 24 cannot use the head of a target of width 16"),
        ({"markov": "other", "markov_rank": 2}, r"markov='other' must be one of vanilla, gated, rnn"),
        ({"markov": "rnn", "markov_rank": 2, "selector_rank": 2}, r"a Markov head or a candidate selector, not both"),
    ],
)
def test_a_draft_that_cannot_work_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        draft_config(target().config, **change)


def test_a_draft_for_another_target_is_refused():
    for other, message in (
        (tiny_target(vocab=30), "vocabulary of 8 tokens, the target has 30"),
        (tiny_target(vocab=8, hidden_size=32), "target of hidden size 16, this one has 32"),
    ):
        with pytest.raises(ConfigError, match=message):
            generate(other, [[1]], draft=random_draft("dflash"), max_new_tokens=2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_and_random_parameters_agree(variant):
    draft = random_draft(variant)
    wanted = dflash_model.param_shapes(draft.config)
    assert jax.tree.map(jnp.shape, draft.tree) == jax.tree.map(tuple, wanted, is_leaf=lambda x: isinstance(x, tuple))


def test_caches_are_updated_in_place():
    batch = batch_for(prompts(VOCAB)[:2], draft=random_draft("dflash"), topk=2, page_size=64)
    assert_caches_are_updated_in_place(batch)


def test_one_program_for_each_batch_and_tree(monkeypatch):
    traces = count_traces(monkeypatch)
    draft, options = random_draft("causal head"), dict(num_steps=2, max_new_tokens=6, prefill_chunk=8)
    for seed in range(3):
        generate(target(), prompts(VOCAB, (3, 7), seed=seed), draft=draft, **options)
    assert traces["rounds"] == [2]
    generate(target(), prompts(VOCAB)[:1], draft=draft, **options)
    assert traces["rounds"] == [2, 1]
    assert len(set(traces["prefill"])) == len(traces["prefill"])
