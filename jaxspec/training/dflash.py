"""DFlash (arXiv 2602.06036, appendix A.1): cross entropy over blocks behind random anchors, later slots with less weight."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.dflash import model as dflash_model
from jaxspec.models import decoder
from jaxspec.training import block_draft
from jaxspec.training.block_draft import BlockDraftObjective
from jaxspec.training.losses import masked_mean, over_rows_frozen, soft_cross_entropy
from jaxspec.training.objective import Option, View, chain_accept

LEARNING_RATE = 1e-3

OPTIONS = block_draft.OPTIONS | {
    "gamma": Option(float, None, "slot m has the weight exp(-(m - 1) / gamma) (default: 4, 5, 7 for blocks of 8, 10, 16)"),
    "soft": Option(float, 1.0, "share of the target's distribution in the labels; the rest is the text's own token"),
    "label_temperature": Option(float, 0.7, "temperature of that distribution; below 1 favours greedy decoding"),
}


@dataclass(frozen=True)
class DFlashObjective(BlockDraftObjective):
    """Σ w · CE / Σ w over the masked slots of all blocks.

    Attributes:
      gamma: slot m = 1, 2, … weighs exp(-(m - 1) / gamma).
      soft: share of the target's distribution in the labels. Text sampled at a high temperature is a noisy label; the
        distribution behind it says the same without noise.
      label_temperature: of that distribution. A draft of greedy decoding need only know the most likely token.
    """

    gamma: float
    soft: float
    label_temperature: float

    def __post_init__(self):
        super().__post_init__()
        if self.gamma <= 0 or self.label_temperature <= 0:
            raise ConfigError(f"gamma={self.gamma} and label_temperature={self.label_temperature} must be positive")
        if not 0.0 <= self.soft <= 1.0:
            raise ConfigError(f"soft={self.soft} must lie in [0, 1]")

    def loss(self, params: dict, view: View, key: jax.Array, step: Int[Array, ""]) -> tuple[Float[Array, ""], dict]:
        """The loss of one batch; metrics: "accept", and "ce", the cross entropy against the target of all drafts alike."""
        del step
        rows, valid = self.blocks(params, view, key)
        params, tree, own, offset, rows = self.narrow(params, view, rows, jax.random.fold_in(key, 1))
        valid &= (rows.label >= 0).reshape(valid.shape)

        def row(hidden, target_hidden, label):
            logits = dflash_model.logits(params, self.config, tree, own, hidden)
            target = decoder.unembed(tree, own, target_hidden)
            match, best = jnp.argmax(logits), jnp.argmax(target)
            logits, target = logits + offset, target + offset * self.label_temperature
            p = jax.nn.softmax(target / self.label_temperature)
            soft = soft_cross_entropy(logits, target / self.label_temperature) + jnp.sum(p * offset)
            hard = jax.nn.logsumexp(logits) - logits[label]
            return self.soft * soft + (1 - self.soft) * hard, (match == best, label == best, soft)

        further = (rows.target_hidden, rows.label)
        loss, (match, likely, soft) = over_rows_frozen(row, rows.hidden, further, chunk=self.chunk())
        loss, match, likely, soft = (x.reshape(valid.shape) for x in (loss, match, likely, soft))
        decay = jnp.exp(-jnp.arange(valid.shape[-1]) / self.gamma)
        accept = chain_accept(jnp.moveaxis(match, -1, 0), jnp.all(valid, -1))
        return masked_mean(loss, self.weights(valid, likely, decay)), {"accept": accept, "ce": masked_mean(soft, valid)}


def build(
    target: ModelConfig,
    *,
    gamma: float | None = None,
    soft: float = OPTIONS["soft"].default,
    label_temperature: float = OPTIONS["label_temperature"].default,
    **shared,
) -> DFlashObjective:
    """The objective of a new draft (`OPTIONS` says what the options mean).

    Raises:
      ConfigError: an option is out of range for this target.
    """
    config, fields = block_draft.shared_options(target, OPTIONS, shared)
    if gamma is None:
        gamma = float(np.interp(config.block_size, (8, 10, 16), (4, 5, 7)))
    return DFlashObjective(target, config, **fields, gamma=gamma, soft=soft, label_temperature=label_temperature)
