"""Acceptance of a wanted length, for measuring the speed of rounds with weights that say nothing (SGLang's idea)."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.config import ConfigError
from jaxspec.sampling import ACCEPT, SamplingState, round_keys, tagged
from jaxspec.trees.tree import DraftTree, unpack_bits
from jaxspec.verify import Acceptance, Verifier


@dataclasses.dataclass(frozen=True)
class SimulatedAcceptance:
    """Emits `length` tokens a round on average, bonus token included, whatever the target says of the drafts.

    Every round accepts the floor or the ceiling of the wanted length, mixed so that the mean is met, along the path to
    the tree's deepest node; a tree that is not that deep gives what it has. The real verifier runs as well and is followed
    where it accepts enough by itself, so that its work is neither skipped nor counted twice. A value for
    `jaxspec.round.Program.verifier`; not lossless, of course.
    """

    length: float | int
    verifier: Verifier = Verifier()

    def __post_init__(self):
        if not self.length >= 1:
            raise ConfigError(f"a simulated accept length of {self.length} is impossible: a round emits at least 1 token")

    def __call__(
        self,
        tree: DraftTree,
        logits: Float[Array, "B T V"],
        sampling: SamplingState,
        keys: Key[Array, " B"],
        length: Int[Array, " B"],
    ) -> Acceptance:
        """As `jaxspec.verify.Verifier`."""
        real = self.verifier(tree, logits, sampling, keys, length)
        own = real.path.shape[1]
        wanted = jnp.full(length.shape, math.floor(self.length) - 1)
        fraction = self.length % 1
        if fraction:
            wanted += jax.vmap(jax.random.uniform)(tagged(round_keys(keys, length), ACCEPT)) < fraction

        deepest = jnp.argmax(jnp.where(tree.valid, tree.depth, -1), 1)
        words = jnp.take_along_axis(tree.ancestors, deepest[:, None, None], 1)[:, 0]
        seen = unpack_bits(words, tree.num_nodes)
        at = seen[:, None, :] & (jnp.cumsum(seen, 1)[:, None, :] - 1 == jnp.arange(own)[None, :, None])
        path = jnp.where(at.any(-1), jnp.argmax(at, -1), -1).astype(jnp.int32)
        path = jnp.where((real.num_drafts >= wanted)[:, None], real.path, path)
        count = jnp.minimum(wanted, (path >= 0).sum(1) - 1).astype(jnp.int32)
        order = jnp.arange(own)[None]
        path = jnp.where(order <= count[:, None], path, -1)

        last = jnp.take_along_axis(path, count[:, None], 1)
        bonus = jnp.take_along_axis(jnp.argmax(logits, -1), last, 1)
        following = jnp.pad(path[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        drafted = jnp.take_along_axis(tree.tokens, jnp.maximum(following, 0), 1)
        tokens = jnp.where(order == count[:, None], bonus, jnp.where(following >= 0, drafted, 0))
        return Acceptance(path, count, tokens.astype(jnp.int32))
