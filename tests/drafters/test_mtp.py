"""The MTP drafter: an oracle, several layers in a chain, what it remembers, parameters, compilation, what it refuses."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ModelParams, SpecConfig, generate
from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters import registry
from jaxspec.drafters.base import RoundContext
from jaxspec.drafters.mtp import drafter as mtp
from jaxspec.drafters.mtp import model as mtp_model
from jaxspec.drafters.mtp.config import MtpConfig, mtp_config
from jaxspec.drafters.mtp.drafter import MtpDrafter
from jaxspec.engine.batch import Batch, open_batch
from jaxspec.kvcache import PagedKVCache
from jaxspec.loading import DraftParams
from jaxspec.models import decoder
from jaxspec.models.attend import causal_attend
from jaxspec.sampling import SamplingParams, row_keys, sampling_state
from tests.drafters.batch_checks import assert_caches_are_updated_in_place, assert_every_draft_is_accepted, count_traces
from tests.drafters.mtp_cases import dense_target, prompts, target

PAGE_SIZE, PAGES = 4, 9


def drafter_of(params: ModelParams, **changes) -> tuple[MtpDrafter, dict]:
    spec = registry.resolve("NEXTN", SpecConfig(**changes), params.config)
    return mtp.build(params, None, spec)


def context(params: ModelParams, tokens, length: int) -> RoundContext:
    pages = np.random.default_rng(0).permutation(np.arange(1, 2 * PAGES - 1)).reshape(2, -1)
    tokens = jnp.asarray(tokens)
    return RoundContext(
        params=params.tree,
        cache=PagedKVCache((), jnp.asarray(pages, jnp.int32), jnp.full(2, length, jnp.int32)),
        tokens=jnp.pad(tokens, ((0, 0), (0, 8))),
        bonus=tokens[:, length],
        keys=row_keys([0, 1]),
        sampling=sampling_state([SamplingParams()] * 2, params.config.vocab_size, [[]] * 2, [True] * 2),
        prompt_length=jnp.zeros(2, jnp.int32),
        active=jnp.ones(2, bool),
        config=params.config,
    )


@jax.jit
def features_of(params: ModelParams, tokens) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = decoder.embed(params.tree, params.config, tokens)
    none = [None] * params.config.num_layers
    return decoder.decode(params.tree, params.config, x, positions, causal_attend(positions), none).hidden


WIDTH = 13


@partial(jax.jit, static_argnames=("drafter", "first"))
def feed(drafter, tree, state, ctx, tokens, features, count, *, first: bool):
    """`count` pairs from position ctx.cache.length on; what stands behind them in a chunk is NaN."""
    at, order = ctx.cache.length[0], jnp.arange(WIDTH)
    real = (order < count)[None]
    index = jnp.minimum(at + order, WIDTH)
    fed = jnp.where(real[..., None], features[:, index], jnp.nan)
    n = jnp.full(2, count)
    if first:
        return drafter.prefill(tree, state, ctx, jnp.where(real, tokens[:, index], 5), tokens[:, at + count][:, None], fed, n)
    ahead = jnp.where(real, tokens[:, jnp.minimum(index + 1, WIDTH)], 5)
    return drafter.update(tree, state, ctx, ahead, fed, n)


def feed_in_pieces(drafter, tree, params, tokens, features, pieces):
    """Prefill of the first piece, then one update for each of the others; the pools hold NaN where nothing was written."""
    state = drafter.init(tree, 2, 2 * PAGES - 1, PAGE_SIZE, tokens.shape[1], jnp.float32)
    state = state._replace(layers=jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), state.layers))
    at = 0
    for i, count in enumerate(pieces):
        state = feed(drafter, tree, state, context(params, tokens, at), tokens, features, jnp.int32(count), first=i == 0)
        at += count
    return state


@partial(jax.jit, static_argnames="drafter")
def propose(drafter, tree, state, ctx):
    return drafter.propose(tree, state, ctx)


@partial(jax.jit, static_argnames="drafter")
def dense_drafts(drafter, tree, params, tokens, features) -> jax.Array:
    """The chain of several layers without any cache: layer s over all pairs (state of layer s - 1, token at p + 1 + s).

    Where more steps are asked for than there are layers, their states and drafts are taken for features and tokens.
    """
    length, used = tokens.shape[1] - 1, min(drafter.num_steps, drafter.draft.num_layers)
    positions = jnp.broadcast_to(jnp.arange(length), (2, length))
    ids, hidden, drafts, states = tokens[:, 1:], features[:, :length], [], []
    for layer in range(used):
        embedding = mtp_model.embed(tree, drafter.draft, params.tree, params.config, ids, positions)
        out = mtp_model.step(tree, drafter.draft, layer, embedding, hidden, positions, causal_attend(positions), None)
        logits = mtp_model.logits(tree, drafter.draft, layer, params.tree, params.config, out.normed[:, -1])
        drafts.append(jnp.argmax(logits, -1))
        ids = jnp.concatenate([ids[:, 1:], drafts[-1][:, None]], 1)
        states.append(out.normed[:, -1])
        hidden = out.normed if drafter.draft.chain_states else features[:, :length]
    drafts = jnp.stack(drafts, 1)
    if used == drafter.num_steps:
        return drafts
    further = dataclasses.replace(drafter, num_steps=drafter.num_steps - used)
    longer = jnp.concatenate([tokens, drafts], 1), jnp.concatenate([features[:, :length], jnp.stack(states, 1)], 1)
    return jnp.concatenate([drafts, dense_drafts(further, tree, params, *longer)], 1)


class OracleDrafter(MtpDrafter):
    """Knows the target's answers (parameter "answers" [B, max_len]): layer s guesses right if fed the true pair there.

    A pair of layer s is (state at position p, token at p + 1 + s). Whatever feeds it a wrong pair, position or row of the
    batch makes it guess wrong.
    """

    def run(self, params, ctx, layer, tokens, hidden, pool, base, positions, valid, *entries):
        del base, entries
        pair = jnp.take_along_axis(params["answers"], jnp.minimum(positions + 1 + layer, params["answers"].shape[1] - 1), 1)
        found = jnp.where((pair == tokens) & valid, positions, 0)
        found = jnp.broadcast_to(found[..., None].astype(hidden.dtype), hidden.shape)
        return mtp_model.Step(found, found, pool)

    def logits(self, params, ctx, layer, hidden):
        position = hidden[..., 0].astype(jnp.int32).reshape(hidden.shape[0], -1)
        index = jnp.minimum(position + 2 + layer, params["answers"].shape[1] - 1)
        token = jnp.take_along_axis(params["answers"], index, 1)
        return 9.0 * jax.nn.one_hot(token.reshape(hidden.shape[:-1]), ctx.config.vocab_size)


def batch_for(params, ids, **options) -> Batch:
    return open_batch(params, ids, **{"max_new_tokens": 24, "ignore_eos": True, **options})


@pytest.mark.parametrize(
    "name, tree",
    [
        ("raw", (3, 3, 10)),
        ("three layers", (2, 1, 3)),
        ("two layers", (5, 1, 6)),
        pytest.param("raw", (3, 1, 4), marks=pytest.mark.slow),
        pytest.param("three layers", (3, 1, 4), marks=pytest.mark.slow),
    ],
)
def test_an_oracle_draft_is_always_accepted(name, tree):
    """One layer for every step, in a chain and in a tree; a layer for each step; fewer steps than layers, and more."""
    params, (steps, topk, nodes) = target(name), tree
    ids, new = prompts(24), 1 + 6 * (steps + 1)
    answers = generate(params, ids, algorithm="none", max_new_tokens=new, ignore_eos=True)
    batch = batch_for(params, ids, max_new_tokens=new, prefill_chunk=4, spec=SpecConfig(steps, topk, nodes))
    table = np.zeros((len(ids), batch.state.tokens.shape[1]), np.int32)
    for row, prompt, answer in zip(table, ids, answers, strict=True):
        row[: len(prompt) + new] = prompt + answer.tokens
    fields = {f.name: getattr(batch.program.drafter, f.name) for f in dataclasses.fields(MtpDrafter)}
    batch.program = dataclasses.replace(batch.program, drafter=OracleDrafter(**fields))
    batch.draft_tree = batch.draft_tree | {"answers": jnp.asarray(table)}
    assert_every_draft_is_accepted(batch, answers, steps)


@pytest.mark.parametrize(
    "name, tree",
    [("raw", (3, 3, 8)), ("three layers", (3, 1, 4)), pytest.param("two layers", (3, 1, 4), marks=pytest.mark.slow)],
)
def test_caches_are_updated_in_place(name, tree):
    params = target(name)
    batch = batch_for(params, prompts(24)[:2], spec=SpecConfig(*tree), max_new_tokens=200, page_size=64)
    assert len(batch.state.draft.layers) == {"raw": 1, "two layers": 2, "three layers": 3}[name]
    assert_caches_are_updated_in_place(batch)


@pytest.mark.parametrize("name", [pytest.param("raw", marks=pytest.mark.slow), "two layers"])
def test_one_program_for_each_batch_and_tree(name, monkeypatch):
    traces = count_traces(monkeypatch)
    params, options = target(name), dict(spec=SpecConfig(3, 1, 4), max_new_tokens=6, prefill_chunk=8)
    for seed in range(3):
        generate(params, prompts(24, (3, 7), seed=seed), **options)
    assert traces["rounds"] == [2]
    generate(params, prompts(24)[:1], **options)
    assert traces["rounds"] == [2, 1]
    assert len(set(traces["prefill"])) == len(traces["prefill"])


@pytest.mark.parametrize(
    "name, steps",
    [
        ("three layers", 2),
        ("three layers", 7),
        ("three layers, no chain", 3),
        pytest.param("three layers", 3, marks=pytest.mark.slow),
        pytest.param("two layers", 3, marks=pytest.mark.slow),
    ],
)
def test_a_layer_per_step_drafts_what_the_dense_layers_say(name, steps):
    """Fewer steps than layers use the first ones, more steps the same ones again."""
    params = target(name)
    drafter, tree = drafter_of(params, num_steps=steps, topk=1)
    assert drafter.layer_per_step
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 24, (2, 14)), jnp.int32)
    features = features_of(params, tokens)
    for pieces in [[13], [1, 1, 11], [5, 1, 1, 4, 2]][: 3 if steps == 3 else 1]:
        state = feed_in_pieces(drafter, tree, params, tokens, features, pieces)
        got = propose(drafter, tree, state, context(params, tokens, 13)).tree
        np.testing.assert_array_equal(got.tokens[:, 1:], dense_drafts(drafter, tree, params, tokens, features), str(pieces))
        np.testing.assert_array_equal(got.tokens[:, 0], tokens[:, 13])


@pytest.mark.parametrize("name", ["three layers", "raw"])
def test_a_row_without_new_tokens_keeps_its_state(name):
    params = target(name)
    drafter, tree = drafter_of(params)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 24, (2, 14)), jnp.int32)
    features = features_of(params, tokens)
    before = feed_in_pieces(drafter, tree, params, tokens, features, [9])
    update = jax.jit(drafter.update)
    after = update(tree, before, context(params, tokens, 9), tokens[:, 10:13], features[:, 9:12], jnp.array([0, 2]))
    pages = np.asarray(context(params, tokens, 9).cache.page_table)
    changed = False
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if new.ndim == 4:
            np.testing.assert_array_equal(old[pages[0]], new[pages[0]])
        else:
            np.testing.assert_array_equal(old[0], new[0])
            changed |= bool(np.any(old[1] != new[1]))
    assert changed


def test_positions_before_a_shared_prefix_are_not_written():
    params = target("three layers")
    drafter, tree = drafter_of(params)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 24, (2, 14)), jnp.int32)
    features = features_of(params, tokens)
    fresh = drafter.init(tree, 2, 2 * PAGES - 1, PAGE_SIZE, 14, jnp.float32)
    ctx = context(params, tokens, 8)
    state = feed(drafter, tree, fresh, ctx, tokens, features, jnp.int32(3), first=True)
    prefix, behind = np.asarray(ctx.cache.page_table)[:, :2], np.asarray(ctx.cache.page_table)[:, 2]
    for layer in state.layers:
        assert not np.any(layer.k[prefix])
        assert np.all(np.any(layer.k[behind][:, :3] != 0, (2, 3)))
    assert state.remembered.tolist() == [2, 2]


def test_auto_finds_the_targets_own_layers():
    params = target("raw")
    assert registry.choose("auto", params, None) == ("NEXTN", params.drafts["mtp"])
    for name in ("nextn", "eagle"):  # SGLang's users say either
        assert registry.choose(name, params, None) == ("NEXTN", params.drafts["mtp"])
        assert registry.choose(name, dense_target(), params.drafts["mtp"]) == ("NEXTN", params.drafts["mtp"])
    with pytest.raises(ConfigError, match="algorithm='eagle' needs draft"):
        registry.choose("eagle", dense_target(), None)


@pytest.mark.parametrize(
    "name, given, tree, layer_per_step",
    [
        ("raw", {}, (3, 1, 4), False),
        ("three layers", {}, (3, 1, 4), True),
        ("three layers", {"num_steps": 2, "topk": 1}, (2, 1, 3), True),
        ("three layers", {"num_steps": 4, "topk": 1}, (4, 1, 5), True),
        ("two layers", {}, (3, 1, 4), True),
        ("three layers", {"num_steps": 2, "topk": 2, "num_draft_tokens": 5}, (2, 2, 5), False),
        ("three layers", {"use_rejection_sampling": True}, (3, 1, 4), False),
    ],
)
def test_which_layers_serve_which_step(name, given, tree, layer_per_step):
    drafter, _ = drafter_of(target(name), **given)
    assert (drafter.num_steps, drafter.topk, drafter.num_draft_tokens) == tree
    assert drafter.layer_per_step == layer_per_step
    assert drafter.max_accept == tree[0] + 1


def test_the_pre_norm_tap_reaches_the_drafter():
    drafter, _ = drafter_of(target("raw"))
    assert drafter.taps == (dense_target().config.num_layers,)


def test_what_does_not_fit_is_refused():
    params = target("three layers")
    with pytest.raises(ConfigError, match="MTP layers in its checkpoint .mimo has none"):
        mtp.build(dense_target(), None, SpecConfig(3, 1, 4))
    with pytest.raises(ConfigError, match="hidden_size is 32, the target's 16"):
        mtp.build(params, target("mtp_mimo").drafts["mtp"], SpecConfig(3, 1, 4))
    with pytest.raises(ConfigError, match="needs MTP layers; the given draft"):
        mtp.build(params, DraftParams({}, params.config), SpecConfig(3, 1, 4))
    with pytest.raises(ConfigError, match="topk=2 must be 1"):
        registry.resolve("NEXTN", SpecConfig(2, 2, 4, use_rejection_sampling=True), params.config)
    with pytest.raises(ConfigError, match="unknown MTP family 'x'; known: deepseek"):
        MtpConfig(params.config, "x")


def test_configurations_survive_json():
    for name in ("raw", "gated", "mtp_deepseek_v3"):
        config = target(name).drafts["mtp"].config
        assert MtpConfig.from_json(config.to_json()) == config
        assert ModelConfig.from_json(target(name).config.to_json()) == target(name).config
    with pytest.raises(ConfigError, match="unknown keys in an MTP config: .'tap'"):
        MtpConfig.from_json(config.to_json() | {"tap": 1})


def test_families_differ_where_their_authors_do():
    mimo, deepseek = (mtp_config(dense_target().config, family, 1) for family in ("mimo", "deepseek"))
    assert mimo.hidden_first and mimo.zero_first_embedding
    assert not deepseek.hidden_first and not deepseek.zero_first_embedding
