"""DSpark (arXiv 2607.05147): blocks whose anchor predicts as well, a Markov head and an estimate of acceptance.

The loss joins cross entropy, the distance that rejection sampling feels, and the estimate's own cross entropy.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.dflash import heads as dflash_heads
from jaxspec.drafters.dflash import model as dflash_model
from jaxspec.models import decoder
from jaxspec.training import block_draft
from jaxspec.training.block_draft import BlockDraftObjective
from jaxspec.training.losses import masked_mean, over_rows, soft_cross_entropy
from jaxspec.training.objective import Option, View, chain_accept

LEARNING_RATE = 1e-3
DECAY = 4.0
"""Draft m = 0, 1, … weighs exp(-m / DECAY)."""

OPTIONS = block_draft.OPTIONS | {
    "block": Option(int, 7, "slots of a block, each of which drafts a token"),
    "taps": block_draft.OPTIONS["taps"]._replace(default=2),
    "markov_rank": Option(int, 16, "rank of the correction by the token before"),
    "markov": Option(str, "vanilla", "kind of that correction: vanilla or gated"),
    "confidence": Option(bool, True, "train an estimate of acceptance, by which chains can end early"),
    "ce": Option(float, 0.1, "weight of the cross entropy"),
    "tv": Option(float, 0.9, "weight of the distance between both distributions"),
    "estimate": Option(float, 1.0, "weight of the estimate's cross entropy"),
    "soft": Option(float, 0.0, "share of the target's distribution in the labels of the cross entropy"),
    "label_temperature": Option(float, 1.0, "temperature of the target's distribution; below 1 favours greedy decoding"),
}


@dataclass(frozen=True)
class DSparkObjective(BlockDraftObjective):
    """ce · CE + tv · Σ|p - q| + estimate · BCE(estimate, 1 - Σ|p - q| / 2), each a weighted mean over drafts.

    A draft counts as long as all labels before it in its block are part of the answer.

    Attributes:
      ce, tv, estimate: weights of the three terms.
      soft: share of the target's distribution p in the labels of the cross entropy.
      label_temperature: of p, everywhere.
    """

    ce: float
    tv: float
    estimate: float
    soft: float
    label_temperature: float

    def __post_init__(self):
        super().__post_init__()
        if self.config.markov not in (None, "vanilla", "gated"):
            raise ConfigError(f"markov={self.config.markov!r} cannot be trained here; known: vanilla, gated")
        if min(self.ce, self.tv, self.estimate) < 0 or self.ce + self.tv <= 0:
            weights = f"ce={self.ce}, tv={self.tv}, estimate={self.estimate}"
            raise ConfigError(f"{weights} must not be negative, nor may ce and tv both be 0")
        if not 0.0 <= self.soft <= 1.0:
            raise ConfigError(f"soft={self.soft} must lie in [0, 1]")
        if self.label_temperature <= 0:
            raise ConfigError(f"label_temperature={self.label_temperature} must be positive")

    def loss(self, params: dict, view: View, key: jax.Array, step: Int[Array, ""]) -> tuple[Float[Array, ""], dict]:
        """The loss of one batch; metrics: "accept", "ce", "tv", and "confidence", the estimate's cross entropy.

        The Markov head is fed the text's own tokens.
        """
        del step
        config = self.config
        rows, valid = self.blocks(params, view, key)
        params, tree, own, offset, rows = self.narrow(params, view, rows, jax.random.fold_in(key, 1))
        valid = jnp.cumprod(valid & (rows.label >= 0).reshape(valid.shape), axis=-1).astype(bool)

        def row(hidden, target_hidden, previous, label):
            base = dflash_model.logits(params, config, tree, own, hidden)
            state = dflash_heads.initial_state(config, 1)
            logits = dflash_heads.step(params, config, hidden[None], base[None], previous[None, None], state).logits[0, 0]
            target = decoder.unembed(tree, own, target_hidden)
            match, best = jnp.argmax(logits), jnp.argmax(target)
            logits, target = logits + offset, target + offset * self.label_temperature
            p = jax.nn.softmax(target / self.label_temperature)
            distance = jnp.sum(jnp.abs(p - jax.nn.softmax(logits)))
            hard = jax.nn.logsumexp(logits) - logits[label]
            soft = soft_cross_entropy(logits, target / self.label_temperature) + jnp.sum(p * offset)
            ce = (1 - self.soft) * hard + self.soft * soft
            bce = jnp.zeros(())
            if config.confidence is not None:
                logit = dflash_heads.confidence(params, config, hidden[None, None], previous[None, None])[0, 0]
                bce = jax.nn.softplus(logit) - logit * jax.lax.stop_gradient(1 - distance / 2)
            terms = {"ce": ce, "tv": distance, "confidence": bce}
            total = self.ce * ce + self.tv * distance + self.estimate * bce
            return total, (terms, match == best, label == best)

        out = over_rows(row, tuple(rows), chunk=self.chunk())
        loss, (terms, match, likely) = jax.tree.map(lambda x: x.reshape(valid.shape), out)
        weights = self.weights(valid, likely, jnp.exp(-jnp.arange(valid.shape[-1]) / DECAY))
        accept = chain_accept(jnp.moveaxis(match, -1, 0), jnp.all(valid, -1))
        return masked_mean(loss, weights), {"accept": accept} | {k: masked_mean(v, weights) for k, v in terms.items()}


def build(
    target: ModelConfig,
    *,
    markov_rank: int = OPTIONS["markov_rank"].default,
    markov: str = OPTIONS["markov"].default,
    confidence: bool = OPTIONS["confidence"].default,
    ce: float = OPTIONS["ce"].default,
    tv: float = OPTIONS["tv"].default,
    estimate: float = OPTIONS["estimate"].default,
    soft: float = OPTIONS["soft"].default,
    label_temperature: float = OPTIONS["label_temperature"].default,
    **shared,
) -> DSparkObjective:
    """The objective of a new draft (`OPTIONS` says what the options mean); a Markov rank of 0 leaves that head out.

    Raises:
      ConfigError: an option is out of range for this target.
    """
    if markov_rank < 0 or not (markov_rank or confidence):
        raise ConfigError(f"markov_rank={markov_rank} must be at least 1, or 0 with confidence on: dflash has neither head")
    config, fields = block_draft.shared_options(
        target,
        OPTIONS,
        shared,
        anchor_predicts=True,
        markov_rank=markov_rank,
        markov=markov if markov_rank else None,
        confidence=("markov" if markov_rank else "hidden") if confidence else None,
    )
    return DSparkObjective(
        target, config, **fields, ce=ce, tv=tv, estimate=estimate, soft=soft, label_temperature=label_temperature
    )
