"""Losses over single rows, their sums by chunks, and what passes of recurrent heads see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.training.attention import unrolled_attend
from jaxspec.training.losses import entropy, masked_mean, over_rows, over_rows_frozen, smooth_l1, soft_cross_entropy
from jaxspec.training.unrolled import ahead, anchors, within

ROWS, WIDTH, VOCAB = 10, 6, 17


def arrays(seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    x, theirs = (jax.random.normal(k, (ROWS, WIDTH)) for k in keys[:2])
    return x, theirs, jax.random.normal(keys[2], (WIDTH, VOCAB)), jax.random.uniform(keys[3], (ROWS,))


def loss_row(kernel, x, theirs):
    ours, theirs = x @ kernel, theirs @ (2 * jax.lax.stop_gradient(kernel))
    return soft_cross_entropy(ours, theirs), jnp.argmax(ours)


def test_terms_agree_with_torch():
    torch = pytest.importorskip("torch")
    x, theirs, kernel, _ = arrays()
    a, b = torch.tensor(np.asarray(x @ kernel)), torch.tensor(np.asarray(theirs @ kernel))
    p = torch.softmax(b, -1)
    expected = torch.nn.functional.cross_entropy(a, p, reduction="none")
    np.testing.assert_allclose(soft_cross_entropy(x @ kernel, theirs @ kernel), expected, rtol=1e-5)
    np.testing.assert_allclose(entropy(theirs @ kernel), torch.distributions.Categorical(p).entropy(), rtol=1e-4, atol=1e-6)
    expected = torch.nn.functional.smooth_l1_loss(3 * a, b, reduction="none").mean(-1)
    np.testing.assert_allclose(smooth_l1(3 * x @ kernel, theirs @ kernel), expected, rtol=1e-5)


def test_means_of_nothing_are_zero():
    assert masked_mean(jnp.ones(3), jnp.zeros(3, bool)) == 0
    assert masked_mean(jnp.array([1.0, 5.0, 9.0]), jnp.array([1.0, 0.0, 3.0])) == 7


@pytest.mark.parametrize("chunk", [1, 4, ROWS, 64])
def test_chunks_change_neither_values_nor_gradients(chunk):
    """Ten rows in chunks that divide them or not; without chunks everything is one product."""
    x, theirs, kernel, weights = arrays()

    def whole(x, kernel):
        losses, ids = jax.vmap(lambda *row: loss_row(kernel, *row))(x, theirs)
        return losses @ weights, ids

    def chunked(x, kernel):
        losses, ids = over_rows(lambda *row: loss_row(kernel, *row), (x, theirs), chunk=chunk)
        return losses @ weights, ids

    def frozen(x, kernel):
        losses, ids = over_rows_frozen(lambda *row: loss_row(kernel, *row), x, (theirs,), chunk=chunk)
        return losses @ weights, ids

    (expected, ids), gradients = jax.value_and_grad(whole, (0, 1), has_aux=True)(x, kernel)
    (value, found), ours = jax.value_and_grad(chunked, (0, 1), has_aux=True)(x, kernel)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_array_equal(found, ids)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ours, gradients)
    (value, found), ours = jax.value_and_grad(frozen, has_aux=True)(x, kernel)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_array_equal(found, ids)
    np.testing.assert_allclose(ours, gradients[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_a_pass_attends_to_first_entries_and_its_own(window):
    """Against one softmax for each row over the entries that it may see, written out."""
    B, T, H, K, D = 2, 7, 4, 2, 3
    rng = np.random.default_rng(0)
    cache, passes = (), []
    for s in range(3):
        q, k, v = (rng.normal(size=(B, T, n, D)).astype(np.float32) for n in (H, K, K))
        passes.append((k, v))
        out, cache = unrolled_attend(cache, *map(jnp.asarray, (q, k, v)), scale=0.5, window=window, softcap=5.0)
        for b, i, h in np.ndindex(B, T, H):
            seen = [(j, passes[0][0][b, j, h // 2], passes[0][1][b, j, h // 2]) for j in range(i + 1)]
            seen += [(i + n, passes[n][0][b, i, h // 2], passes[n][1][b, i, h // 2]) for n in range(1, s + 1)]
            seen = [entry for entry in seen if window is None or i + s - entry[0] < window]
            scores = 5 * np.tanh(np.array([q[b, i, h] @ key for _, key, _ in seen]) * 0.5 / 5)
            weights = np.exp(scores) / np.exp(scores).sum()
            expected = sum(w * value for w, (_, _, value) in zip(weights, seen, strict=True))
            np.testing.assert_allclose(out[b, i, h], expected, rtol=1e-4, atol=1e-6)


def test_which_rows_count():
    supervised = jnp.array([[False, False, True, True, True, False, True]])
    assert ahead(jnp.arange(1, 8)[None], 3).tolist() == [[4, 5, 6, 7, 0, 0, 0]]
    assert within(supervised, 0).tolist() == [[True, True, True, False, True, False, False]]
    assert within(supervised, 1).tolist() == [[True, True, False, True, False, False, False]]
    assert anchors(supervised, 3).tolist() == [[True, False, False, False, False, False, False]]
