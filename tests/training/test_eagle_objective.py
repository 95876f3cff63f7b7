"""The EAGLE objective: its loss against numpy, its start, whether it learns, and that what it learns can draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ModelParams
from jaxspec.config import ConfigError
from jaxspec.drafters.eagle import model as eagle_model
from jaxspec.params import DraftParams
from jaxspec.training import eagle, initial
from jaxspec.training.objective import merge
from tests import tiny
from tests.training.descent import assert_loses_nothing, descend
from tests.training.numpy_model import Layer, accept_shares, chains, double, log_softmax, view_of

COUNTS = jnp.arange(tiny.VOCAB)


def made(target, **options):
    objective = eagle.build(target.config, **options)
    return objective, merge(*objective.init(jax.random.key(0), target.tree, COUNTS))


def numpy_loss(objective, params, view):
    """(loss, accept) without noise, from the description of EAGLE and of passes."""
    p, table = double(params), np.asarray(view.tree["embedder"]["embedding"], np.float64)
    head = np.asarray(view.tree["head"]["kernel"], np.float64)
    layer = Layer(p["layers"]["0"])

    def step(token, hidden, position, entries):
        x = np.concatenate([table[token], hidden]) @ p["fc"]["kernel"]
        q, k, v = layer.projected(x, position)
        x = x + layer.attention(q, [*entries, (k, v)])
        return x + layer.mlp(x), (k, v)

    features, tokens, marks = (np.asarray(x) for x in (view.features, view.tokens, view.supervised))
    sums, counts, hits = np.zeros((2, objective.passes)), np.zeros(objective.passes), []
    for f, ids, mark in zip(features.astype(np.float64), tokens, marks, strict=True):
        states = chains(step, f, ids, objective.passes)
        hits.append(np.zeros(states.shape[:2], bool))
        for i, s in np.ndindex(states.shape[:2]):
            if i + 1 + s >= len(ids):
                continue
            true, ours = f[i + 1 + s], states[i, s]
            hits[-1][i, s] = np.argmax(ours @ head) == np.argmax(true @ head)
            if i + 2 + s < len(ids) and mark[i + 2 + s]:
                d = np.abs(ours - true)
                sums[0, s] += np.mean(np.where(d < 1, d * d / 2, d - 0.5))
                sums[1, s] -= np.exp(log_softmax(true @ head)) @ log_softmax(ours @ head)
                counts[s] += 1
    terms = objective.feature_weight * sums[0] / counts + objective.token_weight * sums[1] / counts
    return sum(objective.decay**s * term for s, term in enumerate(terms)), accept_shares(hits, marks, 2)


@pytest.mark.parametrize("passes", [1, 3])
def test_the_loss_is_the_one_described(passes):
    target = tiny.target()
    objective, params = made(target, passes=passes, noise=0.0, token_weight=0.5)
    view = view_of(target, objective)
    loss, metrics = jax.jit(objective.loss)(params, view, jax.random.key(0), 0)
    expected, accept = numpy_loss(objective, params, view)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["accept"], accept, atol=1e-6)
    assert metrics["accept"].shape == (passes,)


def test_noise_moves_the_first_features_and_nothing_else():
    target = tiny.target()
    plain, params = made(target, passes=1, noise=0.0)
    noisy, _ = made(target, passes=1, noise=0.2)
    view = view_of(target, plain)
    losses = [float(noisy.loss(params, view, jax.random.key(i), 0)[0]) for i in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    width = 0.2 * 512 / view.tokens.shape[1]
    noise = jax.random.uniform(jax.random.key(0), view.features.shape, jnp.float32, -0.5, 0.5) * width
    moved = view.__class__(view.tree, view.tokens, view.supervised, view.features + noise, view.hidden)
    assert losses[0] != float(plain.loss(params, view, jax.random.key(0), 0)[0])
    state = eagle_model.project(params, plain.config, moved.features)
    assert float(jnp.abs(state - view.features).max()) <= width / 2


def test_training_starts_from_the_last_layer():
    """fc passes the feature on; the attention reads what the target's last layer would read of the same stream."""
    target = tiny.target()
    target = ModelParams(target.tree | {"final_norm": {"scale": jnp.linspace(0.5, 2.0, 32)}}, target.config)
    _, params = made(target)
    stream = jax.random.normal(jax.random.key(1), (5, 32)) * 3
    unit = stream / initial.size(stream)
    feature = unit * target.tree["final_norm"]["scale"]
    np.testing.assert_array_equal(params["fc"]["kernel"][32:], jnp.eye(32))
    added = target.tree["embedder"]["embedding"] @ params["fc"]["kernel"][:32]
    assert 0.05 < initial.size(added) / initial.size(feature) < 0.2
    last = target.tree["layers"]["1"]
    expected = (unit * last["input_norm"]["scale"]) @ last["attention"]["qkv"]["kernel"]
    np.testing.assert_allclose(feature @ params["layers"]["0"]["attention"]["qkv"]["kernel"], expected, rtol=1e-4, atol=1e-5)


def test_the_loss_falls_and_the_head_loses_nothing():
    target = tiny.target()
    objective, params = made(target, passes=2)
    view = view_of(target, objective, rows=4, length=24)
    params, losses = descend(objective, params, view, rate=0.1)
    assert losses[-1] < 0.7 * losses[0]
    assert_loses_nothing(target, DraftParams(params, objective.config), "EAGLE")


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="passes=0 must be at least 1"):
        eagle.build(tiny.config(), passes=0)
    with pytest.raises(ConfigError, match="decay=0.0 above 0"):
        eagle.build(tiny.config(), decay=0.0)
