"""Several threads that generate at once: a first run records a graph, during which nobody else may launch anything."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.models.decoder import init_params
from tests import tiny

THREADS = 4


def model(seed: int) -> jaxspec.ModelParams:
    """Wide enough for the kernels."""
    config = tiny.config(width=256, heads=4, vocab=256, head_dim=64, ffn_size=512, max_positions=512)
    return jaxspec.ModelParams(jax.tree.map(jnp.asarray, init_params(config, jax.random.key(seed))), config)


@pytest.mark.parametrize("shared", [True, False], ids=["one model", "a model each"])
def test_four_threads_generate_at_once(shared):
    """Cold, so that all of them compile, load and record; each has lengths of its own and either drafts or not."""
    models = [model(0)] * THREADS if shared else [model(seed) for seed in range(THREADS)]
    draft, rng = model(9), np.random.default_rng(0)
    prompts = [[rng.integers(0, 256, int(n)).tolist() for n in rng.integers(3, 300, i + 1)] for i in range(THREADS)]
    hows = [
        {"algorithm": "none"},
        {"draft": draft, "num_steps": 3, "topk": 1, "num_draft_tokens": 4},
        {"algorithm": "ngram"},
        {"draft": draft, "num_steps": 3, "topk": 2, "num_draft_tokens": 6},
    ]
    found, together = [None] * THREADS, threading.Barrier(THREADS)

    def run(i: int) -> None:
        together.wait()
        for _ in range(3):
            answers = jaxspec.generate(models[i], prompts[i], max_new_tokens=24, ignore_eos=True, **hows[i])
            found[i] = [answer.tokens for answer in answers]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(THREADS):
        alone = jaxspec.generate(models[i], prompts[i], max_new_tokens=24, ignore_eos=True, algorithm="none")
        assert found[i] == [answer.tokens for answer in alone], f"thread {i}"
