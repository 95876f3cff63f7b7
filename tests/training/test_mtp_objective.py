"""The MTP objective: its loss against numpy, its start, whether it learns, and that what it learns can draft."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ModelParams
from jaxspec.config import ConfigError
from jaxspec.models.layers import rms_norm
from jaxspec.params import DraftParams
from jaxspec.training import initial, mtp
from jaxspec.training.objective import merge
from tests import tiny
from tests.training.descent import assert_loses_nothing, descend
from tests.training.numpy_model import Layer, accept_shares, chains, double, log_softmax, rms, view_of

COUNTS = jnp.arange(tiny.VOCAB)


def made(target, **options):
    objective = mtp.build(target.config, **options)
    return objective, merge(*objective.init(jax.random.key(0), target.tree, COUNTS))


def numpy_loss(objective, params, view, share, normed=True):
    """(loss, accept), from the description of MiMo's layer and of FastMTP."""
    p, table = double(params)["layers"]["0"], np.asarray(view.tree["embedder"]["embedding"], np.float64)
    head, layer = np.asarray(view.tree["head"]["kernel"], np.float64), Layer(p["block"])

    def step(token, hidden, position, entries):
        embedding = table[token] * (position > 0)
        halves = [rms(hidden, p["hidden_norm"]["scale"]), rms(embedding, p["embedding_norm"]["scale"])]
        x = np.concatenate(halves) @ p["proj"]["kernel"]
        q, k, v = layer.projected(rms(x, p["block"]["input_norm"]["scale"]), position)
        x = x + layer.attention(q, [*entries, (k, v)])
        x = x + layer.mlp(x)
        return (rms(x, p["final_norm"]["scale"]) if normed else x), (k, v)

    hidden, tokens, marks = (np.asarray(x) for x in (view.hidden, view.tokens, view.supervised))
    sums, counts, hits = np.zeros(objective.passes), np.zeros(objective.passes), []
    for f, ids, mark in zip(hidden.astype(np.float64), tokens, marks, strict=True):
        states = chains(step, f, ids, objective.passes)
        states = states if normed else rms(states, p["final_norm"]["scale"])
        hits.append(np.zeros(states.shape[:2], bool))
        for i, s in np.ndindex(states.shape[:2]):
            if i + 1 + s < len(ids):
                hits[-1][i, s] = np.argmax(states[i, s] @ head) == np.argmax(f[i + 1 + s] @ head)
            if i + 2 + s < len(ids) and mark[i + 2 + s]:
                ours, theirs = log_softmax(states[i, s] @ head), log_softmax(f[i + 1 + s] @ head)
                sums[s] -= share * np.exp(theirs) @ ours + (1 - share) * ours[ids[i + 2 + s]]
                counts[s] += 1
    weights = objective.decay ** np.arange(objective.passes)
    return (weights / weights.sum()) @ (sums / counts), accept_shares(hits, marks, 2)


@pytest.mark.parametrize("passes, share, normed", [(1, 1.0, True), (3, 0.25, True), (2, 1.0, False)])
def test_the_loss_is_the_one_described(passes, share, normed):
    target = tiny.target()
    objective, params = made(target, passes=passes, soft=share)
    if not normed:
        objective = dataclasses.replace(objective, config=dataclasses.replace(objective.config, recycle_normed=False))
    bias = jax.random.normal(jax.random.key(3), params["layers"]["0"]["block"]["attention"]["qkv"]["bias"].shape)
    params["layers"]["0"]["block"]["attention"]["qkv"]["bias"] = bias
    view = view_of(target, objective)
    loss, metrics = jax.jit(objective.loss)(params, view, jax.random.key(0), 0)
    expected, accept = numpy_loss(objective, params, view, share, normed)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["accept"], accept, atol=1e-6)
    assert metrics["accept"].shape == (passes,)


def test_training_starts_from_the_last_layer():
    """Without the embedding, the layer continues the target's own stream: its last layer, run once more."""
    target = tiny.target()
    target = ModelParams(target.tree | {"final_norm": {"scale": jnp.linspace(0.5, 2.0, 32)}}, target.config)
    _, params = made(target)
    layer = params["layers"]["0"]
    stream = jax.random.normal(jax.random.key(1), (5, 32)) * 3
    feature = rms_norm(stream, target.tree["final_norm"], 1e-6)
    unit = rms_norm(feature, layer["hidden_norm"], 1e-6)
    assert np.all(np.corrcoef(np.asarray(unit), np.asarray(stream))[np.arange(5), np.arange(5, 10)] > 0.98)
    np.testing.assert_array_equal(layer["proj"]["kernel"][:32], jnp.eye(32))
    last = target.tree["layers"]["1"]
    for leaf in ("qkv", "out"):
        ours, theirs = layer["block"]["attention"][leaf]["kernel"], last["attention"][leaf]["kernel"]
        ratio = np.asarray(ours / theirs)
        np.testing.assert_allclose(ratio, ratio.mean(), rtol=1e-4)
    np.testing.assert_array_equal(layer["block"]["mlp"]["gate_up"]["kernel"], last["mlp"]["gate_up"]["kernel"])
    np.testing.assert_array_equal(layer["final_norm"]["scale"], target.tree["final_norm"]["scale"])


def test_targets_of_other_forms_get_layers_of_this_form():
    """Experts, 1 + w norms and q/k norms cannot be taken over: what they would be is random, the rest is the target's."""
    target = tiny.target(seed=3, norm_plus_one=True, qk_norm=True, embedding_scale=2.0, tie_embeddings=True)
    objective, params = made(target, passes=2)
    assert objective.config.layers.qkv_bias and not objective.config.layers.qk_norm
    np.testing.assert_array_equal(params["layers"]["0"]["final_norm"]["scale"], 1 + target.tree["final_norm"]["scale"])
    ours, theirs = params["layers"]["0"]["block"]["attention"]["qkv"]["kernel"], target.tree["layers"]["1"]["attention"]["qkv"]
    assert not np.allclose(ours, theirs["kernel"])
    loss, _ = jax.jit(objective.loss)(params, view_of(target, objective), jax.random.key(0), 0)
    assert np.isfinite(loss)


@pytest.mark.slow
def test_the_loss_falls_and_the_layer_loses_nothing():
    target = tiny.target()
    objective, params = made(target, passes=2)
    view = view_of(target, objective, rows=4, length=24)
    params, losses = descend(objective, params, view, rate=0.3)
    assert losses[-1] < losses[0] - 0.3
    assert_loses_nothing(target, DraftParams(params, objective.config), "NEXTN")


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="passes=0 must be at least 1"):
        mtp.build(tiny.config(), passes=0)
    with pytest.raises(ConfigError, match=r"soft=1.5 must lie in \[0, 1\]"):
        mtp.build(tiny.config(), soft=1.5)


def test_the_size_helper_measures_the_stream_before_the_final_norm():
    target = tiny.target()
    size = initial.residual_size(jax.random.key(0), target.config, target.tree, COUNTS)
    doubled = {**target.tree, "embedder": {"embedding": target.tree["embedder"]["embedding"] * 100}}
    assert float(initial.residual_size(jax.random.key(0), target.config, doubled, COUNTS)) > 5 * float(size)
