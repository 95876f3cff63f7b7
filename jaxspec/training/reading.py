"""What the frozen target says of training rows: one program, whose result heads on the same rows share."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec import runtime
from jaxspec.config import ModelConfig
from jaxspec.models import decoder
from jaxspec.params import ModelParams
from jaxspec.training.attention import row_attend
from jaxspec.training.objective import View


@partial(jax.jit, static_argnames=("config", "taps"))
def read_rows(tree, data, rows, *, config: ModelConfig, taps: tuple[int, ...]) -> View:
    """Runs the frozen target once over some rows: the view of a head that reads `taps`, or some of them."""
    tokens, supervised = (x[rows] for x in data)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    with decoder.full_precision(tree):
        x = decoder.embed(tree, config, tokens)
        out = decoder.decode(tree, config, x, positions, row_attend, (None,) * config.num_layers, taps)
    features = jnp.zeros((*tokens.shape, 0), out.hidden.dtype) if out.features is None else out.features
    return View(None, tokens, supervised, features, out.hidden)


class Reader:
    """`read_rows` for a data set that lies on the device; heads that read the same rows one after another share the result."""

    def __init__(self, target: ModelParams, data: tuple[Array, Array], taps: tuple[int, ...]):
        self.target, self.data, self.taps = target, data, taps
        self.last: tuple[bytes, View | None] = (b"", None)

    def __call__(self, rows: np.ndarray) -> View:
        """The view of some rows."""
        rows = np.asarray(rows, np.int32)
        name, view = self.last
        if view is None or name != rows.tobytes():
            self.last = (b"", None)  # the old one's memory first
            where = (self.target.tree, self.data, rows)
            program, _ = runtime.compiled(read_rows, *where, config=self.target.config, taps=self.taps)
            view = program(*where)
            self.last = (rows.tobytes(), view)
        return view


def narrowed(view: View, tree: Any, given: tuple[int, ...], wanted: tuple[int, ...]) -> View:
    """The view with the target's parameters, and with the wanted ones of the taps that were read."""
    if given != wanted:
        parts = jnp.split(view.features, len(given), axis=-1) if given else []
        parts = [parts[given.index(tap)] for tap in wanted]
        view = dataclasses.replace(view, features=jnp.concatenate(parts, -1) if parts else view.features[..., :0])
    return dataclasses.replace(view, tree=tree)
