"""The exact distribution of sampled answers, and how well drawn answers fit it."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import ModelParams, forward
from jaxspec.engine.batch import Batch, open_batch
from tests.parity.checks.statistics import p_value

PROMPT, LENGTH = (1, 4, 2), 3


@cache
def exact(target: ModelParams, temperature: float, top_k: int | None = None) -> tuple[list[tuple], list[float]]:
    """All answers of LENGTH tokens to PROMPT, and their probabilities under the target."""
    vocab = target.config.vocab_size
    outcomes = list(itertools.product(range(vocab), repeat=LENGTH))
    prefixes = jnp.asarray([[*PROMPT, *o[:-1]] for o in outcomes], jnp.int32)
    logits = forward(target, prefixes).logits / temperature
    least = jax.lax.top_k(logits, top_k or vocab)[0][..., -1:]
    probs = np.asarray(jax.nn.softmax(jnp.where(logits >= least, logits, -jnp.inf), axis=-1))
    rows = np.arange(len(outcomes))
    steps = [probs[rows, len(PROMPT) - 1 + i, [o[i] for o in outcomes]] for i in range(LENGTH)]
    return outcomes, np.prod(steps, 0).tolist()


def fit(target: ModelParams, rows: int, temperature: float, top_k: int | None = None, **options) -> tuple[float, Batch]:
    """The p-value of `rows` answers drawn with `options` against the exact distribution, and their batch.

    It is one batch of the device layer: an engine would take them in a few at a time.
    """
    batch = open_batch(
        target,
        [list(PROMPT)] * rows,
        temperature=temperature,
        top_k=top_k or -1,
        seed=list(range(rows)),
        max_new_tokens=LENGTH,
        ignore_eos=True,
        page_size=4,
        prefill_chunk=4,
        **options,
    )
    batch.prefill()
    batch.run()
    logs = batch.logs()
    assert sum(log.from_draft.sum() for log in logs) > rows / 20
    return p_value([tuple(log.tokens) for log in logs], *exact(target, temperature, top_k)), batch
