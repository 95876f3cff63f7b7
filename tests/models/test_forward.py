"""`forward`: shapes with and without a batch, causality, refusals. Its numbers are checked by the golden targets."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.config import ConfigError
from jaxspec.models import decoder
from tests import tiny


@pytest.fixture(scope="module")
def params():
    return jaxspec.load(Path(__file__).parents[1] / "fixtures" / "target_llama_tied")


def test_batch_and_single(params):
    tokens = np.arange(10).reshape(2, 5)
    batch, single = jaxspec.forward(params, tokens), jaxspec.forward(params, list(tokens[1]))
    assert batch.logits.shape == (2, 5, 120) and single.logits.shape == (5, 120)
    assert batch.hidden_states.shape == (4, 2, 5, 32) and single.hidden_states.shape == (4, 5, 32)
    assert batch.final_norm.shape == (2, 5, 32)
    for a, b in ((batch.logits[1], single.logits), (batch.hidden_states[:, 1], single.hidden_states)):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_position_sees_nothing_behind_it(params):
    first, second = (jaxspec.forward(params, [1, 2, 3, last]).logits for last in (4, 5))
    assert jnp.array_equal(first[:3], second[:3]) and not jnp.allclose(first[3], second[3])


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([], "not empty"),
        ([1.5], "must be integer ids"),
        ([[[1]]], r"\[T\] or \[B, T\]"),
        ([0, 120], r"must lie in 0 … 119; got 0 … 120"),
        ([-1], "must lie in 0 … 119"),
        (np.zeros(1025, np.int32), "1025 tokens exceed the model's context of 1024"),
    ],
)
def test_refusals(params, tokens, message):
    with pytest.raises(ConfigError, match=message):
        jaxspec.forward(params, tokens)


@pytest.mark.parametrize("tied", [False, True])
def test_exact_logits_are_not_rounded(tied):
    config = tiny.config(tie_embeddings=tied)
    params = decoder.init_params(config, jax.random.key(0), jnp.bfloat16)
    hidden = jax.random.normal(jax.random.key(1), (5, config.hidden_size), jnp.bfloat16)
    rounded, exact = (np.asarray(decoder.unembed(params, config, hidden, exact=e)) for e in (False, True))
    assert rounded.dtype == exact.dtype == np.float32
    table = np.asarray(params["embedder"]["embedding"].T if tied else params["head"]["kernel"], np.float64)
    np.testing.assert_allclose(exact, np.asarray(hidden, np.float64) @ table, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rounded, np.asarray(jnp.asarray(exact).astype(jnp.bfloat16), np.float32))
