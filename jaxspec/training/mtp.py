"""Training an MTP layer for a target that came without: one layer, used again for every step (FastMTP, arXiv 2509.18362)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.mtp import model as mtp_model
from jaxspec.drafters.mtp.config import MtpConfig, mtp_config
from jaxspec.models import decoder
from jaxspec.training import initial
from jaxspec.training.attention import unrolled_attend
from jaxspec.training.losses import masked_mean, over_rows_frozen, soft_cross_entropy
from jaxspec.training.objective import Objective, Option, View, chain_accept
from jaxspec.training.unrolled import ahead, anchors, within

LEARNING_RATE = 1e-3

OPTIONS: dict[str, Option] = {
    "passes": Option(int, 3, "draft steps that are trained in a chain, each on the output of the one before"),
    "decay": Option(float, 0.6, "weight of a step, relative to the one before; the weights' sum is 1"),
    "soft": Option(float, 1.0, "share of the target's distribution in what is learned; the rest is the token that it wrote"),
}

FAMILY = "mimo"
"""Naming and form: MiMo's layer is a Qwen2 layer behind two norms and a projection, which any Llama-like target can have."""


@dataclass(frozen=True)
class MtpObjective(Objective):
    """Cross entropy of each draft step against the target's distribution, the written token, or a mix of both.

    Attributes:
      passes, decay, soft: see `OPTIONS`.
    """

    passes: int = 3
    decay: float = 0.6
    soft: float = 1.0

    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden half of a pair."""
        return (self.config.feature_tap,)

    def init(self, key, target_tree, token_counts) -> tuple[dict, dict]:
        """The target's last layer and final norm; the projection passes the hidden half on and adds little of the embedding.

        The hidden norm undoes the final norm's scale, so that the layer reads x / |x| of the residual stream x; outputs of
        attention and MLP, which were added to x, are divided by |x|.
        """
        target, layers = self.target, self.config.layers
        key_layer, key_size, key_proj = jax.random.split(key, 3)
        w = initial.norm_scale(target, target_tree["final_norm"])
        block = initial.layer_from_target(key_layer, layers, target, target_tree, target.num_layers - 1)
        stream = initial.residual_size(key_size, target, target_tree, token_counts)
        for out in (block["attention"]["out"], block["mlp"]["down"]):
            out["kernel"] /= stream
        E = layers.hidden_size
        halves = [0.1 * E**-0.5 * jax.random.normal(key_proj, (E, E)), jnp.eye(E)]
        layer = {
            "embedding_norm": {"scale": jnp.ones(E)},
            "hidden_norm": {"scale": initial.size(w) / initial.invertible(w)},
            "proj": {"kernel": jnp.concatenate(halves[::-1] if self.config.hidden_first else halves)},
            "block": block,
            "final_norm": {"scale": w},
        }
        return {"layers": {"0": layer}}, {}

    def loss(self, params, view: View, key, step):
        """Σ over steps of weight · CE on the target's answer tokens. Metrics: "accept" [passes], the first step's "ce"."""
        del key, step
        config, target = self.config, self.target
        B, T = view.tokens.shape
        state, cache = view.features, ()

        def row(state, hidden, token):
            with jax.named_scope("head"):
                ours, theirs = (decoder.unembed(view.tree, target, x) for x in (state, hidden))
            loss = self.soft * soft_cross_entropy(ours, theirs)
            if self.soft < 1:
                loss += (1 - self.soft) * (jax.nn.logsumexp(ours) - ours[token])
            return loss, jnp.argmax(ours) == jnp.argmax(theirs)

        total, matches, first = jnp.float32(0), [], None
        weights = [self.decay**s for s in range(self.passes)]
        for s in range(self.passes):
            positions = jnp.broadcast_to(jnp.arange(T) + s, (B, T))
            embedding = mtp_model.embed(params, config, view.tree, target, ahead(view.tokens, 1 + s), positions)
            out = mtp_model.step(params, config, 0, embedding, state, positions, unrolled_attend, cache)
            state, cache = out.normed if config.recycle_normed else out.raw, out.cache
            rows = ahead(view.hidden, 1 + s).reshape(B * T, -1), ahead(view.tokens, 2 + s).reshape(B * T)
            ce, match = over_rows_frozen(row, out.normed.reshape(B * T, -1), rows)
            ce = masked_mean(ce.reshape(B, T), within(view.supervised, s))
            total += weights[s] / sum(weights) * ce
            matches.append(match.reshape(B, T))
            first = ce if first is None else first
        return total, {"ce": first, "accept": chain_accept(jnp.stack(matches), anchors(view.supervised, self.passes))}


def draft_config(target: ModelConfig) -> MtpConfig:
    """One MTP layer of the target's shape."""
    layers = initial.plain_layers(target, family=FAMILY, architecture="MiMoForCausalLM", qkv_bias=True)
    return mtp_config(layers, FAMILY, 1)


def build(target: ModelConfig, **options) -> MtpObjective:
    """The objective for a target; `options` as in `OPTIONS`.

    Raises:
      ConfigError: no step at all, or one without weight; a share outside 0 … 1.
    """
    made = MtpObjective(target, draft_config(target), **options)
    if made.passes < 1 or made.decay <= 0:
        raise ConfigError(f"passes={made.passes} must be at least 1 and decay={made.decay} above 0")
    if not 0 <= made.soft <= 1:
        raise ConfigError(f"soft={made.soft} must lie in [0, 1]")
    return made
