"""Training an EAGLE-1/2 head (Li et al. 2024a, section 4.2; several passes as in HASS, Zhang et al. 2024, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.eagle import model as eagle_model
from jaxspec.drafters.eagle.config import EagleConfig
from jaxspec.models import decoder
from jaxspec.models.decoder import FINAL_NORM
from jaxspec.training import initial
from jaxspec.training.attention import unrolled_attend
from jaxspec.training.losses import masked_mean, over_rows_frozen, smooth_l1, soft_cross_entropy
from jaxspec.training.objective import Objective, Option, View, chain_accept
from jaxspec.training.unrolled import ahead, anchors, within

LEARNING_RATE = 1e-3

OPTIONS: dict[str, Option] = {
    "passes": Option(
        int, 3, "draft steps that are trained in a chain, each on the output of the one before; EAGLE's own recipe: 1"
    ),
    "decay": Option(float, 0.8, "weight of a pass, relative to the one before"),
    "feature_weight": Option(float, 1.0, "weight of the smooth L1 distance of predicted features"),
    "token_weight": Option(float, 0.1, "weight of the cross entropy against the target's distribution"),
    "noise": Option(float, 0.2, "input features get uniform noise of this width times 512 / row length"),
}


@dataclass(frozen=True)
class EagleObjective(Objective):
    """Smooth L1 between predicted and true features, and cross entropy of what the target's head makes of both.

    Attributes:
      passes, decay, feature_weight, token_weight, noise: see `OPTIONS`.
    """

    passes: int = 3
    decay: float = 0.8
    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.2

    @property
    def taps(self) -> tuple[int, ...]:
        """The output of the final norm, as published heads read it."""
        return self.config.taps

    def init(self, key, target_tree, token_counts) -> tuple[dict, dict]:
        """The target's last layer in the space of features; ``fc`` passes the feature on and adds little of the embedding.

        A head's stream is the feature f = w · x / |x|, without a norm in front of the attention, where the target's last layer
        read w_in · x / |x| and added to x. So its input rows are scaled by w_in / w, its output columns by w / |x|.
        """
        target, layers = self.target, self.config.layers
        key_layer, key_size, key_fc = jax.random.split(key, 3)
        w = initial.norm_scale(target, target_tree["final_norm"])
        usable, scale = initial.invertible(w), initial.size(w)
        layer = initial.layer_from_target(key_layer, layers, target, target_tree, target.num_layers - 1)
        stream = initial.residual_size(key_size, target, target_tree, token_counts)
        before = layer.pop("input_norm")["scale"] / usable
        layer["attention"]["qkv"]["kernel"] *= before[:, None]
        layer["mlp_norm"]["scale"] *= scale / usable
        for out in (layer["attention"]["out"], layer["mlp"]["down"]):
            out["kernel"] *= w / stream
        E = layers.hidden_size
        strength = 0.1 * scale / initial.size(target_tree["embedder"]["embedding"])
        mix = strength * E**-0.5 * jax.random.normal(key_fc, (E, E))
        fc = {"kernel": jnp.concatenate([mix, jnp.eye(E)])}
        if self.config.fc_bias:
            fc["bias"] = jnp.zeros(E)
        return {"fc": fc, "layers": {"0": layer}}, {}

    def loss(self, params, view: View, key, step):
        """Σ over passes of decay^s (feature_weight · SmoothL1 + token_weight · CE); the target's answer tokens count.

        Metrics: "accept" [passes], and the first pass's "features" (smooth L1) and "ce".
        """
        del step
        config, target = self.config, self.target
        B, T = view.tokens.shape
        features = view.features.astype(eagle_model.compute_dtype(params))
        noise = jax.random.uniform(key, features.shape, features.dtype, -0.5, 0.5) * (self.noise * 512 / T)
        state = eagle_model.project(params, config, features + noise)
        caches: tuple = ((),) * config.layers.num_layers

        def row(state, hidden):
            with jax.named_scope("head"):
                ours, theirs = (decoder.unembed(view.tree, target, x) for x in (state, hidden))
            return soft_cross_entropy(ours, theirs), jnp.argmax(ours) == jnp.argmax(theirs)

        total, matches, metrics = jnp.float32(0), [], {}
        for s in range(self.passes):
            positions = jnp.broadcast_to(jnp.arange(T) + s, (B, T))
            embedding = eagle_model.embed(params, config, view.tree, ahead(view.tokens, 1 + s))
            state, caches = eagle_model.step(params, config, embedding, state, positions, unrolled_attend, caches)
            flat = [x.reshape(B * T, -1) for x in (state, ahead(view.hidden, 1 + s))]
            ce, match = over_rows_frozen(row, flat[0], (flat[1],))
            mask = within(view.supervised, s)
            distance = masked_mean(smooth_l1(state, ahead(view.features, 1 + s)), mask)
            ce = masked_mean(ce.reshape(B, T), mask)
            total += self.decay**s * (self.feature_weight * distance + self.token_weight * ce)
            matches.append(match.reshape(B, T))
            if s == 0:
                metrics = {"features": distance, "ce": ce}
        return total, metrics | {"accept": chain_accept(jnp.stack(matches), anchors(view.supervised, self.passes))}


def draft_config(target: ModelConfig) -> EagleConfig:
    """A head of one layer of the target's shape."""
    layers = initial.plain_layers(
        target, family="eagle", architecture="", bos_token_id=None, stop_token_ids=(), tie_embeddings=False
    )
    return EagleConfig(
        layers=layers,
        fused=False,
        taps=(FINAL_NORM,),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        layout="eagle",
    )


def build(target: ModelConfig, **options) -> EagleObjective:
    """The objective for a target; `options` as in `OPTIONS`.

    Raises:
      ConfigError: no pass at all, or one without weight.
    """
    made = EagleObjective(target, draft_config(target), **options)
    if made.passes < 1 or made.decay <= 0:
        raise ConfigError(f"passes={made.passes} must be at least 1 and decay={made.decay} above 0")
    return made
