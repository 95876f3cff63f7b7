"""`forward`: shapes with and without a batch, causality, refusals. Its numbers are checked by the golden targets."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.config import ConfigError


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
