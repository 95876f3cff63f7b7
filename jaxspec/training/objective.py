"""What the training loop asks of a kind of head: initial parameters and a loss over one batch that the target has read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.pytree import pytree


class Option(NamedTuple):
    """An option of a head on the command line: ``--draft-vocab`` for a key ``draft_vocab`` of a module's ``OPTIONS``."""

    type: Callable[[str], Any]
    default: Any
    help: str


@pytree()
class View:
    """One batch as a head sees it: the frozen target has run over it once. No gradient flows into any of it.

    Attributes:
      tree: the target's parameter tree, in the type that is computed in (bfloat16 on a GPU, float32 on a CPU).
      tokens: full rows; there is no padding.
      supervised: token i was written by the target as an answer; False for what users say and what a template adds.
      features: `Objective.taps` side by side (numbering: `jaxspec.models.decoder.decode`); W is 0 without taps.
      hidden: the output of the target's final norm; `jaxspec.models.decoder.unembed` turns it into logits.
    """

    tree: Any
    tokens: Int[Array, "B T"]
    supervised: Bool[Array, "B T"]
    features: Float[Array, "B T W"]
    hidden: Float[Array, "B T E"]


@dataclass(frozen=True)
class Objective:
    """Base class of the objectives: frozen and without arrays, so that one can be a static argument of `jax.jit`.

    Attributes:
      target: the target that is trained for.
      config: the draft's configuration, which `jaxspec.load_draft` and its drafter read.
    """

    target: ModelConfig
    config: Any

    @property
    def taps(self) -> tuple[int, ...]:
        """Which features of the target `View.features` holds."""
        return ()

    @property
    def options(self) -> dict[str, Any]:
        """The objective's own options by name, without both configurations."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("target", "config")]
        return {name: getattr(self, name) for name in names}

    def init(self, key: jax.Array, target_tree: Any, token_counts: Int[Array, " V"]) -> tuple[dict, dict]:
        """Where training starts: from the target's own weights as far as they fit.

        Args:
          key: randomness for what has no such start.
          target_tree: the target's parameters.
          token_counts: how often each token was written as an answer.

        Returns:
          (trainable parameters in float32, parameters that stay as they are); `merge` of both is the draft's tree.
        """
        raise NotImplementedError

    def loss(self, params: dict, view: View, key: jax.Array, step: Int[Array, ""]) -> tuple[Float[Array, ""], dict]:
        """The loss of one batch.

        Args:
          params: the merged tree, in the type that is computed in; logits, softmax and means are float32 all the same.
          view: the batch.
          key: randomness of this step (anchors, noise).
          step: number of the optimiser's step, for curricula.

        Returns:
          (loss, metrics). ``metrics["accept"]`` [depth] is the share of supervised anchors at which drafts 1 … d all equal
          the target's most likely tokens, given the text so far; 1 + its sum estimates the greedy accept length of a chain.
          A token of the target's own that stands in front of the drafts of every round (UNO's exact row) counts in neither:
          such a round emits one token more. All other metrics are scalars.
        """
        raise NotImplementedError


def merge(trainable: dict, constants: dict) -> dict:
    """Both trees as one: nested dicts are united, no leaf may stand in both."""
    both = dict(trainable)
    for key, value in constants.items():
        if key in both and not (isinstance(both[key], dict) and isinstance(value, dict)):
            raise KeyError(f"{key} is both trainable and constant")
        both[key] = merge(both[key], value) if key in both else value
    return both


def cast(tree: Any, dtype: Any) -> Any:
    """The tree with its floating-point leaves in `dtype`."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def chain_accept(matches: Bool[Array, "depth *R"], anchors: Bool[Array, " *R"]) -> Float[Array, " depth"]:
    """`metrics["accept"]` from where each draft equals the target's argmax: all drafts before it must do so as well."""
    prefix = jnp.cumprod(matches.astype(jnp.float32), axis=0) * anchors
    return jnp.sum(prefix, axis=tuple(range(1, matches.ndim))) / jnp.maximum(jnp.sum(anchors), 1)
