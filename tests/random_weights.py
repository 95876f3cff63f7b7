"""Random weights drawn by numpy: nothing to compile for every shape, which would be a tenth of the suite's compiling."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters import eagle_model
from jaxspec.models import decoder


def drawn_by_numpy(init):
    """`init(…, key, …)`, whose `jax.random.split` and `jax.random.normal` are numpy's where the key is no tracer."""

    @functools.wraps(init)
    def run(shapes, key, *args, **options):
        if isinstance(key, jax.core.Tracer):
            return init(shapes, key, *args, **options)

        def normal(seed, shape):
            return np.random.default_rng(seed).standard_normal(shape, np.float32)

        seeds = np.random.SeedSequence(np.asarray(jax.random.key_data(key)).tolist())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.random, "split", lambda _, n: seeds.spawn(n))
            patch.setattr(jax.random, "normal", normal)
            return jax.tree.map(jnp.asarray, init(shapes, key, *args, **options))

    return run


def install() -> None:
    """For every model and head that a test makes in this process."""
    for module, name in ((decoder, "init_tree"), (eagle_model, "init_params")):
        setattr(module, name, drawn_by_numpy(getattr(module, name)))
