"""What a test of an objective does last: descend its loss, then draft with what came out."""

import jax

from jaxspec import generate
from tests import tiny


def descend(objective, params, view, rate: float, steps: int = 30):
    """Plain gradient descent: (parameters, loss before each step)."""
    gradient = jax.jit(jax.value_and_grad(objective.loss, has_aux=True))
    losses = []
    for i in range(steps):
        (loss, _), slope = gradient(params, view, jax.random.key(i), i)
        params = jax.tree.map(lambda p, g: p - rate * g, params, slope)
        losses.append(float(loss))
    return params, losses


def assert_loses_nothing(target, draft, algorithm: str):
    """Greedy answers with the draft are those of plain decoding."""
    prompts = tiny.prompts(3)
    plain = generate(target, prompts, algorithm="none", max_new_tokens=16, ignore_eos=True)
    ours = generate(target, prompts, draft=draft, max_new_tokens=16, ignore_eos=True)
    assert [a.tokens for a in ours] == [a.tokens for a in plain]
    assert ours[0].stats.algorithm == algorithm
