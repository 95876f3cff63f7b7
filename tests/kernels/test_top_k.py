"""The kernels for the largest logits, against a sort and the reference."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device
from pallas_kernels.vocabulary import api, reference
from pallas_kernels.vocabulary import triton as kernels
from tests.kernels.attention_cases import pretend_h200


@pytest.mark.parametrize(("rows", "size", "k"), [(3, 5000, 8), (1, 2048, 1), (2, 2051, 5), (40, 16387, 16)])
def test_the_largest_come_first_and_ties_by_index(rows, size, k):
    values = np.random.default_rng(0).integers(0, 40, (rows, size)).astype(np.float32) / 4  # many ties
    best, where, mass = kernels.top_k(jnp.asarray(values), k, interpret=True)
    order = np.argsort(-values, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(where, order)
    np.testing.assert_array_equal(best, np.take_along_axis(values, order, 1))
    exact = np.exp(values.astype(np.float64) - values.max(1, keepdims=True)).sum(1)
    np.testing.assert_allclose(mass, exact, rtol=1e-5)


def test_rows_with_less_than_k_candidates():
    """A mask that leaves few tokens: what follows them are other indices, each once."""
    values = jnp.full((2, 2500), -jnp.inf).at[0, 2300].set(1.0).at[1, 7].set(-3.0).at[1, 2499].set(2.0)
    best, where, mass = kernels.top_k(values, 4, interpret=True)
    assert where.tolist() == [[2300, 0, 1, 2], [2499, 7, 0, 1]]
    assert best[:, :2].tolist() == [[1.0, -np.inf], [2.0, -3.0]]
    np.testing.assert_allclose(mass, [1, 1 + np.exp(-5)], rtol=1e-6)


def test_they_are_taken_where_they_run(monkeypatch):
    logits = jax.random.normal(jax.random.key(0), (2, 3, 4096)) * 3
    calls, run = [], kernels.top_k
    monkeypatch.setattr(device, "capability", lambda: 9.0)
    monkeypatch.setattr(kernels, "top_k", lambda *args: calls.append(args) or run(*args, interpret=True))
    for ours, theirs in ((api.top_k_probabilities, reference.top_k_probabilities), (api.top_k, reference.top_k)):
        found, expected = ours(logits, 4), theirs(logits, 4)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        np.testing.assert_array_equal(found[1], expected[1])
    assert len(calls) == 2
    api.top_k(logits.astype(jnp.bfloat16), 4)
    assert len(calls) == 2


@pytest.mark.parametrize(("rows", "size", "k"), [(64, 32000, 8), (1, 128256, 4), (8, 151936, 16)])
def test_they_lower_for_cuda(rows, size, k):
    values = jax.ShapeDtypeStruct((rows, size), jnp.float32)
    assert kernels.serves(values, k)
    with pretend_h200(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Triton.*", DeprecationWarning)
        text = jax.jit(lambda x: kernels.top_k(x, k)).trace(values).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 2
