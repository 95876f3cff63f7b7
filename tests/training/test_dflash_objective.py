"""Losses of DFlash and DSpark against numpy, and what training with them gives."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ConfigError, SpecConfig, generate
from jaxspec.config import MoEConfig
from jaxspec.drafters.dflash import model as dflash_model
from jaxspec.training import block_draft, dflash, dspark
from jaxspec.training.blocks import block_attend, sample_anchors
from pallas_kernels.attention.cudnn import TRIAL_SCALE, agrees, apart, fused_blocks
from pallas_kernels.attention.rows_reference import blocks
from tests import tiny
from tests.training.block_cases import block_outputs, double, greedy_text, greedy_view, random_view, shaken, softmax, train

KEY = jax.random.key(7)
DFLASH = {
    "SpecForge's loss": dict(soft=0.0, off_path=1.0),
    "soft labels": dict(soft=0.6, off_path=0.25, label_temperature=0.7, causal=True, layers=2, taps=2, gamma=2.0),
}
DSPARK = {
    "the paper's loss": dict(off_path=1.0),
    "gated": dict(markov="gated", soft=0.5, label_temperature=0.6, off_path=0.5, ce=0.4, tv=0.2, estimate=0.3),
    "without an estimate": dict(confidence=False, markov_rank=2),
}


def target(**changes):
    return tiny.target(layers=3, **changes)


def log_softmax(x):
    return np.log(softmax(x))


def kernels(objective, params, view):
    """Everything of a case in float64."""
    head = np.asarray(view.tree["head"]["kernel"], np.float64)
    return double(params), double({k: view.tree[k] for k in ("embedder",)}), head, np.asarray(view.hidden, np.float64) @ head


def restated(objective, params, view, key):
    """(loss, accept) of a batch, one draft at a time."""
    config, D = objective.config, objective.config.num_drafts
    tokens, supervised = np.asarray(view.tokens), np.asarray(view.supervised)
    p, tree, head, target_logits = kernels(objective, params, view)
    T = tokens.shape[1]
    allowed = np.zeros(tokens.shape, bool)
    allowed[:, :-1] = supervised[:, :-1] & supervised[:, 1:]
    anchors, kept = map(np.asarray, sample_anchors(key, jnp.asarray(allowed), objective.anchors))
    spark = config.anchor_predicts
    total = weight = 0.0
    accepted, counted = np.zeros(D), 0
    for b in range(tokens.shape[0]):
        for a in anchors[b][kept[b]]:
            out = block_outputs(p, config, tree, np.asarray(view.features[b], np.float64), tokens[b, a], int(a))
            logits = out[0 if spark else 1 :] @ head
            on_path, alive, matches = True, True, []
            for m in range(D):
                at = a + 1 + m
                if at >= T:
                    break
                alive &= bool(supervised[b, at])
                if spark and config.markov is not None:
                    x = p["markov"]["predecessor"]["embedding"][tokens[b, at - 1]]
                    if config.markov == "gated":
                        gate = np.concatenate([out[m], x]) @ p["markov"]["gate"]["kernel"] + p["markov"]["gate"]["bias"]
                        x = x / (1 + np.exp(-gate))
                    logits[m] += x @ p["markov"]["out"]["kernel"]
                truth, log_q = target_logits[b, at - 1], log_softmax(logits[m])
                soft = softmax(truth / objective.label_temperature)
                loss = -objective.soft * soft @ log_q - (1 - objective.soft) * log_q[tokens[b, at]]
                decay = np.exp(-m / (4.0 if spark else objective.gamma))
                if spark:
                    distance = np.abs(soft - np.exp(log_q)).sum()
                    loss = objective.ce * loss + objective.tv * distance
                    if config.confidence is not None:
                        read = np.concatenate([out[m], p["markov"]["predecessor"]["embedding"][tokens[b, at - 1]]])
                        estimate = 1 / (1 + np.exp(-(read @ p["confidence"]["kernel"][:, 0] + p["confidence"]["bias"][0])))
                        rate = 1 - distance / 2
                        loss -= objective.estimate * (rate * np.log(estimate) + (1 - rate) * np.log(1 - estimate))
                if alive if spark else supervised[b, at]:
                    w = decay * (1.0 if on_path else objective.off_path)
                    total, weight = total + w * loss, weight + w
                matches.append(logits[m].argmax() == truth.argmax())
                on_path &= bool(truth.argmax() == tokens[b, at])
            if a + D < T and supervised[b, a + 1 : a + 1 + D].all():
                counted += 1
                accepted += np.cumprod(matches)
    return total / weight, accepted / max(counted, 1)


@pytest.mark.parametrize(
    "module, options",
    [
        *(pytest.param(dflash, o, id=f"dflash: {n}") for n, o in DFLASH.items()),
        *(pytest.param(dspark, o, id=f"dspark: {n}") for n, o in DSPARK.items()),
    ],
)
def test_loss_equals_numpy(module, options):
    model = target()
    objective = module.build(model.config, **{"block": 4, "anchors": 6, "taps": 1} | options)
    params, _ = objective.init(jax.random.key(0), model.tree, jnp.ones(tiny.VOCAB, jnp.int32))
    params, view = shaken(params), random_view(model, objective)
    loss, metrics = jax.jit(objective.loss)(params, view, KEY, jnp.int32(0))
    expected, accept = restated(objective, params, view, KEY)
    np.testing.assert_allclose(loss, expected, rtol=2e-5)
    np.testing.assert_allclose(metrics["accept"], accept, atol=1e-6)


@pytest.mark.parametrize(
    "module, tied",
    [
        (dflash, True),
        pytest.param(dflash, False, marks=pytest.mark.slow),
        (dspark, False),
        pytest.param(dspark, True, marks=pytest.mark.slow),
    ],
)
def test_candidates_stand_for_all_tokens(module, tied):
    """With sampled candidates the loss is that of all tokens on average, and no label is lost."""
    model = target(tie_embeddings=tied)
    options = {"block": 4, "anchors": 6, "taps": 1, "soft": 0.7} | ({"tv": 0.0, "estimate": 0.0} if module is dspark else {})
    full = module.build(model.config, **options)
    params, _ = full.init(jax.random.key(0), model.tree, jnp.ones(tiny.VOCAB, jnp.int32))
    # mild logits: the mean of a logarithm is not that of its argument
    params = jax.tree.map(lambda x: 0.3 * x, shaken(params))
    few = jnp.asarray([3, 7, 9, 11])
    view = random_view(model, full)
    view = dataclasses.replace(view, tokens=few[view.tokens % 4], hidden=0.3 * view.hidden)
    some = module.build(model.config, **options, candidates=tiny.VOCAB // 2)
    losses = [jax.jit(lambda key, o=o: o.loss(params, view, key, jnp.int32(0))) for o in (full, some)]
    found = [[loss(key) for key in jax.random.split(KEY, 40)] for loss in losses]  # a key gives both the same anchors
    all_of_them, sampled = (np.array([float(loss) for loss, _ in x]) for x in found)
    assert (np.abs(all_of_them - sampled) > 1e-4).any()
    np.testing.assert_allclose(sampled.mean(), all_of_them.mean(), rtol=0.02)
    first = [np.mean([float(metrics["accept"][0]) for _, metrics in x]) for x in found]
    assert first[1] >= first[0]  # rivals may be absent, the right one never is


def test_which_tokens_are_candidates():
    model = target()
    objective = dspark.build(model.config, block=3, anchors=4, taps=1, candidates=60)
    params, _ = objective.init(jax.random.key(0), model.tree, jnp.ones(tiny.VOCAB, jnp.int32))
    view = random_view(model, objective)
    rows, _ = objective.blocks(params, view, KEY)
    narrowed = objective.narrow(params, view, rows, KEY)
    head = np.asarray(model.tree["head"]["kernel"])
    kept = np.asarray(narrowed.tree["head"]["kernel"])
    assert kept.shape == (head.shape[0], 60) == (head.shape[0], narrowed.target.vocab_size)
    np.testing.assert_array_equal(kept[:, narrowed.rows.label], head[:, rows.label])
    best = jnp.argmax(view.hidden @ head, -1)
    ids = np.array([np.flatnonzero((head == column[:, None]).all(0))[0] for column in kept.T])
    texts = {*np.asarray(view.tokens).ravel().tolist(), *np.asarray(best).ravel().tolist()}
    assert texts <= set(ids.tolist())
    drawn = np.array([i not in texts for i in ids])
    weight = np.exp(narrowed.offset)
    np.testing.assert_allclose(weight[~drawn], 1)
    np.testing.assert_allclose(weight.sum(), tiny.VOCAB, rtol=1e-5)  # those drawn stand for all that are absent


def test_labels_that_are_no_candidates_do_not_count():
    model = target()
    objective = dspark.build(model.config, block=3, anchors=4, taps=1, candidates=2)
    params, _ = objective.init(jax.random.key(0), model.tree, jnp.ones(tiny.VOCAB, jnp.int32))
    view = random_view(model, objective)
    rows, _ = objective.blocks(params, view, KEY)
    assert (objective.narrow(params, view, rows, KEY).rows.label < 0).any()
    assert np.isfinite(objective.loss(params, view, KEY, jnp.int32(0))[0])


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 6), (6, 2), (2, 1)])
def test_heads_beyond_the_targets_begin_with_its_heads(heads, kv_heads):
    model = target(heads=4, num_kv_heads=2, head_dim=8)
    objective = dflash.build(model.config, taps=(0, 2), heads=heads, kv_heads=kv_heads, ffn=24, block=3)
    made = objective.init(jax.random.key(0), model.tree, jnp.ones(tiny.VOCAB, jnp.int32))[0]["layers"]["0"]["attention"]
    theirs = model.tree["layers"]["2"]
    norm, given = np.asarray(theirs["input_norm"]["scale"]), theirs["attention"]
    ours = made["qkv"]["kernel"].reshape(len(norm), kv_heads, heads // kv_heads + 2, 8)
    source = norm[:, None, None, None] * given["qkv"]["kernel"].reshape(len(norm), 2, 4, 8)
    q, wanted = ours[:, :, :-2].reshape(len(norm), heads, 8), source[:, :, :-2].reshape(len(norm), 4, 8)
    both = min(heads, 4)
    np.testing.assert_allclose(q[:, :both], wanted[:, :both], rtol=1e-5)
    np.testing.assert_allclose(made["out"]["kernel"][: 8 * both], given["out"]["kernel"][: 8 * both], rtol=1e-6)
    for head in range(0, both, heads // kv_heads):  # each with the keys and values that it reads in the target
        ours_read, theirs_read = ours[:, head // (heads // kv_heads), -2:], source[:, head // 2, -2:]
        np.testing.assert_allclose(ours_read, theirs_read, rtol=1e-5)


def test_shapes_of_a_draft_are_checked():
    config = target().config
    for options, complaint in (
        ({"heads": 3, "kv_heads": 2}, "multiple of kv_heads=2"),
        ({"taps": (0, 9)}, r"0 … 3"),
        ({"candidates": -1}, "candidates=-1"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            dflash.build(config, **options)
    assert block_draft.tap_choice("2") == 2 and block_draft.tap_choice("2,15,29") == (2, 15, 29)


@pytest.mark.parametrize("module", [dflash, dspark])
def test_every_parameter_is_trained(module):
    """Along its gradient the loss rises as fast as the gradient says (the estimate's label is a constant for it)."""
    model = target()
    objective = module.build(model.config, block=4, anchors=6, taps=2, **{"estimate": 0.0} if module is dspark else {})
    params, _ = objective.init(jax.random.key(0), model.tree, jnp.ones(tiny.VOCAB, jnp.int32))
    params, view = shaken(params), random_view(model, objective)
    loss = jax.jit(lambda p: objective.loss(p, view, KEY, jnp.int32(0))[0])
    gradient = jax.jit(jax.grad(loss))(params)
    for path, g in jax.tree_util.tree_flatten_with_path(gradient)[0]:
        assert float(jnp.abs(g).max()) > 0 or path[0].key == "confidence"
    squares = sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(gradient))
    size = 1e-2 / squares**0.5
    ahead = loss(jax.tree.map(lambda p, g: p + size * g, params, gradient))
    behind = loss(jax.tree.map(lambda p, g: p - size * g, params, gradient))
    np.testing.assert_allclose(squares, float(ahead - behind) / (2 * size), rtol=2e-2)


def test_block_attention_in_both_forms():
    B, A, M, T, H, K, D = 2, 3, 4, 10, 4, 2, 8
    keys = jax.random.split(KEY, 5)
    shapes = [(A * M, H), (A * M, K), (A * M, K), (T, K), (T, K)]
    x = [jax.random.normal(key, (B, *shape, D)) for key, shape in zip(keys, shapes, strict=True)]
    far = jnp.broadcast_to(jnp.arange(T) < 3 * jnp.arange(A)[:, None, None], (B, A, M, T))
    near = jnp.broadcast_to(jnp.tril(jnp.ones((M, M), bool)), (B, A, M, M))

    def results(function):
        @jax.jit
        def run(*x):
            value, pull = jax.vjp(lambda *x: function(*x, far, near), *x)
            return [value, *pull(jnp.ones_like(value))]

        return run(*x)

    two_parts = results(lambda *a: blocks(*a, scale=0.3, softcap=None))
    one = results(lambda *a: fused_blocks(*a, 0.3, implementation="xla"))
    for left, right in zip(two_parts, one, strict=True):
        np.testing.assert_allclose(left, right, atol=2e-6)


def test_block_attention_with_a_window_and_a_soft_cap():
    B, A, M, T, H, D = 1, 2, 3, 8, 2, 4
    q, k, v, old_k, old_v = (
        jax.random.normal(key, (B, n, H, D)) for key, n in zip(jax.random.split(KEY, 5), (A * M,) * 3 + (T,) * 2, strict=True)
    )
    anchor = jnp.array([[2, 6]])
    positions = anchor[..., None] + jnp.arange(M)
    attend = block_attend(positions, jnp.broadcast_to(anchor[..., None], (B, A, M)), jnp.ones((B, A, M, M), bool))
    out, cache = attend((old_k, old_v), q, k, v, scale=0.5, window=3, softcap=2.0)
    assert cache[0] is old_k
    for a in range(A):
        for m in range(M):
            at, row = int(positions[0, a, m]), a * M + m
            for h in range(H):
                context = [t for t in range(int(anchor[0, a])) if at - t < 3]
                own = [a * M + n for n in range(M) if m - n < 3]
                keys = np.concatenate([old_k[0, context, h], k[0, own, h]])
                values = np.concatenate([old_v[0, context, h], v[0, own, h]])
                scores = 2.0 * np.tanh(keys @ np.asarray(q[0, row, h]) * 0.5 / 2.0)
                np.testing.assert_allclose(out[0, row, h], softmax(scores) @ values, atol=1e-5)


def test_anchors_are_allowed_and_different():
    allowed = jnp.asarray(np.random.default_rng(0).random((5, 20)) < 0.4)
    index, kept = sample_anchors(KEY, allowed, 6)
    for row, positions, counts in zip(np.asarray(allowed), np.asarray(index), np.asarray(kept), strict=True):
        chosen = positions[counts]
        assert len(set(chosen.tolist())) == len(chosen) == min(6, row.sum())
        assert row[chosen].all()
    index, kept = sample_anchors(KEY, allowed[:, :3], 6)
    assert index.shape == kept.shape == (5, 6)
    assert np.array_equal(kept.sum(1), allowed[:, :3].sum(1))


@pytest.mark.parametrize("family", ["llama", "with q/k norms", "gemma", "experts"])
def test_training_starts_from_the_target(family):
    changes = {
        "llama": {},
        "with q/k norms": dict(qk_norm=True),
        "gemma": dict(norm_plus_one=True, sandwich_norms=True, embedding_scale=5.0, logit_softcap=9.0, tie_embeddings=True),
        "experts": dict(moe=MoEConfig(num_experts=4, num_experts_per_token=2, ffn_size=16)),
    }[family]
    model = target(**changes)
    objective = dspark.build(model.config, layers=2)
    params, constants = objective.init(jax.random.key(0), model.tree, jnp.ones(tiny.VOCAB, jnp.int32))
    shapes = dflash_model.param_shapes(objective.config)
    assert not constants
    assert jax.tree.map(lambda x: x.shape, params) == shapes
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"float32"}
    last, given = params["layers"]["1"], model.tree["layers"]["2"]
    np.testing.assert_array_equal(last["attention"]["out"]["kernel"], given["attention"]["out"]["kernel"])
    loss, _ = jax.jit(objective.loss)(params, random_view(model, objective), KEY, jnp.int32(0))
    assert np.isfinite(loss)


HEADS = {
    "dflash": (dflash, dict(block=5, layers=1, taps=2, anchors=16)),
    "causal dflash": (dflash, dict(block=5, layers=1, taps=2, anchors=16, causal=True)),
    "dspark": (dspark, dict(block=4, taps=2, anchors=16, markov_rank=8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_training_makes_drafts_that_the_target_accepts(name):
    module, options = HEADS[name]
    model, asked, rows = greedy_text()
    objective = module.build(model.config, **options)
    draft, seen = train(objective, model, greedy_view(objective), 60, 5e-3)
    losses = [loss for loss, _ in seen]
    assert np.mean(losses[25:30]) < 0.8 * losses[0]
    simulated = 1 + np.mean([metrics["accept"].sum() for _, metrics in seen[-10:]])
    for spec in (SpecConfig(), SpecConfig(topk=3, num_draft_tokens=9)):
        answers = generate(model, asked, draft=draft, spec=spec, max_new_tokens=40, ignore_eos=True)
        assert [a.tokens for a in answers] == [row[8:48] for row in rows]
        accept = np.mean([a.stats.accept_length for a in answers])
        assert accept > 2.5
        if spec.topk is None:  # of the metrics the ends of the answers are missing, and tokens behind 40
            np.testing.assert_allclose(accept, simulated, atol=0.8)


@pytest.mark.parametrize(
    "module, options, said",
    [
        (dflash, dict(block=1), "block_size=1 leaves no draft"),
        (dflash, dict(layers=0), "layers=0 must be at least 1"),
        (dflash, dict(taps=0), "taps=0 must be at least 1"),
        (dflash, dict(mask_token=999), "mask_token_id=999 must lie"),
        (dflash, dict(soft=2.0), "soft=2.0"),
        (dflash, dict(gamma=0.0), "gamma=0.0"),
        (dflash, dict(anchors=0), "anchors=0"),
        (dflash, dict(off_path=-1.0), "off_path=-1.0"),
        (dspark, dict(markov="rnn"), "markov='rnn' cannot be trained"),
        (dspark, dict(markov_rank=0, confidence=False), "markov_rank=0"),
        (dspark, dict(ce=0.0, tv=0.0), "ce=0.0, tv=0.0"),
        (dspark, dict(label_temperature=0.0), "label_temperature=0.0"),
    ],
)
def test_impossible_options(module, options, said):
    with pytest.raises(ConfigError, match=said):
        module.build(target().config, **options)


@pytest.mark.parametrize("module", [dflash, dspark])
def test_options_have_the_heads_own_defaults(module):
    config = tiny.target().config
    defaults = {name: option.default for name, option in module.OPTIONS.items()}
    assert module.build(config) == module.build(config, **defaults)
    assert module.build(config).config.block_size == module.OPTIONS["block"].default
    with pytest.raises(TypeError, match="no such option: blocks; there are layers, block,"):
        module.build(config, blocks=3)


def test_fused_attention_is_tried_out_while_a_loss_is_traced():
    """Under `jit`, `grad` and `checkpoint` the trial sees values, not tracers; a wrong kernel is found out."""
    found = []

    @jax.jit
    def gradient(x):
        def loss(x):
            for scale in (TRIAL_SCALE, 0.2):
                found.append(apart(partial(agrees, partial(fused_blocks, scale=scale, implementation="xla"))))
            return jnp.sum(x)

        return jax.grad(jax.checkpoint(loss))(x)

    with pytest.warns(UserWarning, match="its results differ"):
        gradient(jnp.ones(2))
    assert found == [True, False]
