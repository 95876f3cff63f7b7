"""The EAGLE-3 objective: its losses against numpy, its attention, its start, and that what it learns can draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.drafters.eagle import model as eagle_model
from jaxspec.models.attend import causal_attend
from jaxspec.training import attention, eagle3
from jaxspec.training.objective import View, merge
from pallas_kernels.attention import rows_reference
from tests import tiny
from tests.training.numpy_model import Layer, accept_shares, chains, double, log_softmax, rms

COUNTS = jnp.arange(tiny.VOCAB)[::-1] % 40
TAPS = (0, 1, 2)


def made(target, **options):
    objective = eagle3.build(target.config, **{"taps": TAPS, "draft_vocab": 40, **options})
    return objective, merge(*objective.init(jax.random.key(0), target.tree, COUNTS))


def random_view(target, rows=2, length=14, seed=0):
    """Features that no target made: nothing in the loss may depend on their fitting together."""
    rng = np.random.default_rng(seed)
    E = target.config.hidden_size
    return View(
        target.tree,
        jnp.asarray(rng.integers(0, tiny.VOCAB, (rows, length)), jnp.int32),
        jnp.asarray(rng.random((rows, length)) < 0.8),
        jnp.asarray(rng.normal(size=(rows, length, 3 * E)), jnp.float32),
        jnp.asarray(rng.normal(size=(rows, length, E)), jnp.float32),
    )


def official(objective, params, view):
    """(one loss per step, accept shares): EAGLE-3's own rules, written down for one chain at a time.

    Its loss mask stands at index i in step 0 and moves left with the targets; here it says that token i + 2 is answered.
    """
    p, table = double(params), np.asarray(view.tree["embedder"]["embedding"], np.float64)
    head = np.asarray(view.tree["head"]["kernel"], np.float64)
    layer, ids = Layer(p["layers"]["0"]), np.asarray(params["target_ids"])
    weights = p["layers"]["0"]

    def step(token, g, position, entries):
        x = np.concatenate([rms(table[token], weights["input_norm"]["scale"]), rms(g, weights["hidden_norm"]["scale"])])
        q, k, v = layer.projected(x, position)
        a = g + layer.attention(q, [*entries, (k, v)])
        return a + layer.mlp(a), (k, v)

    losses, hits = np.zeros(objective.steps_ahead), []
    features, tokens, marks, hidden = (np.asarray(x) for x in (view.features, view.tokens, view.supervised, view.hidden))
    for f, row, mark, h in zip(features.astype(np.float64), tokens, marks, hidden.astype(np.float64), strict=True):
        states = chains(step, f @ p["fc"]["kernel"], row, objective.steps_ahead)
        hits.append(np.zeros(states.shape[:2], bool))
        for i, s in np.ndindex(states.shape[:2]):
            if i + 1 + s >= len(row):
                continue
            logits = h[i + 1 + s] @ head
            q = log_softmax(rms(states[i, s], p["final_norm"]["scale"]) @ p["head"]["kernel"])
            hits[-1][i, s] = ids[np.argmax(q)] == np.argmax(logits)
            if i + 2 + s < len(row) and mark[i + 2 + s] and np.argmax(logits) in ids:
                losses[s] -= np.exp(log_softmax(logits[ids])) @ q
    return losses / tokens.size, accept_shares(hits, marks, 2)


@pytest.mark.parametrize("chunk", [5, 256])
def test_the_loss_is_the_official_one(chunk, monkeypatch):
    monkeypatch.setattr(rows_reference, "CHUNK", chunk)
    target = tiny.target()
    objective, params = made(target, steps_ahead=3)
    view = random_view(target)
    loss, metrics = jax.jit(objective.loss)(params, view, jax.random.key(0), 0)
    losses, accept = official(objective, params, view)
    np.testing.assert_allclose(loss, (losses * 0.8 ** np.arange(3)).sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["accept"], accept, atol=1e-6)


def plain_attend(cache, q, k, v, *, scale, window, softcap):
    """All scores at once: row i of pass s at position i + s sees entries 0 … i of pass 0 and its own of passes 1 … s."""
    passes = (*cache, (k, v))
    B, T, H, D = q.shape
    G, s = H // k.shape[2], len(cache)
    keys, values = (jnp.repeat(jnp.concatenate([entry[j] for entry in passes], 1), G, axis=2) for j in (0, 1))
    scores = jnp.einsum("BTHD,BLHD->BHTL", q, keys) * scale
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    row, column = np.arange(T)[:, None], np.arange(T * (s + 1))
    entry, place = column // T, column % T
    distance = row + s - (place + entry)
    seen = np.where(entry == 0, place <= row, place == row) & (distance < (window or 1 << 30))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("BHTL,BLHD->BTHD", weights, values), passes


@pytest.mark.parametrize("window, softcap", [(None, None), (1, 3.0), (2, None), (5, None)])
def test_attention_in_chunks_equals_attention_at_once(window, softcap, monkeypatch):
    """Values and gradients, first pass against `causal_attend`, too."""
    monkeypatch.setattr(rows_reference, "CHUNK", 4)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(3, 2, 11, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    options = {"scale": 0.3, "window": window, "softcap": softcap}

    def run(attend, q, k, v):
        cache, outs = (), []
        for s in range(3):
            out, cache = attend(cache, q[s], k[s], v[s], **options)
            outs.append(out)
        return jnp.stack(outs)

    def total(attend):
        return lambda *args: jnp.sum(jnp.sin(3 * run(attend, *args)))

    np.testing.assert_allclose(run(attention.unrolled_attend, q, k, v), run(plain_attend, q, k, v), atol=2e-6)
    ours = jax.grad(total(attention.unrolled_attend), (0, 1, 2))(q, k, v)
    theirs = jax.grad(total(plain_attend), (0, 1, 2))(q, k, v)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    positions = jnp.broadcast_to(jnp.arange(11), (2, 11))
    plain, _ = causal_attend(positions)(None, q[0], k[0], v[0], **options)
    np.testing.assert_allclose(attention.row_attend(None, q[0], k[0], v[0], **options)[0], plain, atol=2e-6)


def test_it_starts_from_the_target():
    target = tiny.target()
    objective, params = made(target)
    ids = np.asarray(params["target_ids"])
    assert ids.tolist() == sorted(np.argsort(-np.asarray(COUNTS), kind="stable")[:40].tolist())
    np.testing.assert_array_equal(params["head"]["kernel"], target.tree["head"]["kernel"][:, ids])
    last = target.tree["layers"]["1"]
    E = target.config.hidden_size
    np.testing.assert_array_equal(params["layers"]["0"]["attention"]["qkv"]["kernel"][E:], last["attention"]["qkv"]["kernel"])
    np.testing.assert_array_equal(params["layers"]["0"]["mlp"]["down"]["kernel"], last["mlp"]["down"]["kernel"])
    view = random_view(target)
    np.testing.assert_allclose(eagle_model.project(params, objective.config, view.features), view.features[..., -E:], rtol=1e-6)
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes == eagle_model.param_shapes(objective.config)


@pytest.mark.slow
def test_a_full_vocabulary_needs_no_translation():
    target = tiny.target(tie_embeddings=True)
    objective, params = made(target, draft_vocab=32000)
    assert not objective.config.reduced_vocab and "target_ids" not in params
    _, metrics = objective.loss(params, random_view(target), jax.random.key(0), 0)
    assert float(metrics["in_vocabulary"]) == 1.0


@pytest.mark.parametrize(
    "options, words",
    [
        ({"taps": (0, 3)}, "taps"),
        ({"draft_vocab": 1}, "draft_vocab"),
        ({"steps_ahead": 0}, "steps_ahead"),
        ({"taps": None}, "2 layers"),
    ],
)
def test_options_out_of_range_are_named(options, words):
    with pytest.raises(ConfigError, match=words):
        made(tiny.target(), **options)
