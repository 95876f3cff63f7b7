"""Distilling a small student of the target's vocabulary, which then drafts on its own (Leviathan et al. 2023; the
distillation of Zhou et al. 2023, DistillSpec, with forward KL on text that the target wrote)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.models import decoder
from jaxspec.training import initial
from jaxspec.training.attention import row_attend
from jaxspec.training.losses import entropy, masked_mean, over_rows, soft_cross_entropy
from jaxspec.training.objective import Objective, Option, View, chain_accept
from jaxspec.training.unrolled import ahead

LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.01

OPTIONS: dict[str, Option] = {
    "layers": Option(int, 4, "layers of the student"),
    "hidden": Option(
        int,
        0,
        "width; 0: the widest with which it has at most 7 % of the target's weights; the target's own "
        "width: the student starts as its first layers",
    ),
    "heads": Option(int, 0, "attention heads; 0: one for every 32 channels"),
    "ffn": Option(int, 0, "feed-forward width; 0: three times the width"),
    "elsewhere": Option(float, 0.1, "weight of positions where the target did not write an answer, relative to the others"),
}

SHARE = 0.07
DEPTH = 5


@dataclass(frozen=True)
class StandaloneObjective(Objective):
    """KL(target ‖ student) at every position, with less weight where the target did not write an answer.

    Attributes:
      elsewhere: see `OPTIONS`.
    """

    elsewhere: float = 0.1

    def init(self, key, target_tree, token_counts) -> tuple[dict, dict]:
        """The target's first layers where the student is as wide; else random layers.

        A narrower student's embedding is the projection of the target's on its principal axes, tokens weighing by frequency.
        """
        target, c = self.target, self.config
        tree = decoder.init_params(c, key)
        table = target_tree["embedder"]["embedding"].astype(jnp.float32)
        scale = initial.norm_scale(target, target_tree["final_norm"])
        if c.hidden_size == target.hidden_size:
            keys = jax.random.split(key, c.num_layers)
            for i in range(min(c.num_layers, target.num_layers)):
                tree["layers"][str(i)] = initial.layer_from_target(keys[i], c, target, target_tree, i, i)
            tree["embedder"]["embedding"] = table * target.embedding_scale if not c.tie_embeddings else table
            tree["final_norm"]["scale"] = scale
            if not c.tie_embeddings and not isinstance(target_tree["head"]["kernel"], dict):
                tree["head"]["kernel"] = target_tree["head"]["kernel"].astype(jnp.float32)
            return tree, {}
        weights = token_counts.astype(jnp.float32) + 0.01 * jnp.mean(token_counts.astype(jnp.float32)) + 1e-6
        _, axes = jnp.linalg.eigh((table * weights[:, None]).T @ table)
        tree["embedder"]["embedding"] = table @ axes[:, ::-1][:, : c.hidden_size]
        tree["final_norm"]["scale"] = jnp.full(c.hidden_size, initial.size(scale))
        return tree, {}

    def loss(self, params, view: View, key, step):
        """The weighted mean of KL(target ‖ student). Metrics: "accept" [5], "kl" of the answers alone."""
        del key, step
        c, target = self.config, self.target
        B, T = view.tokens.shape
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        out = decoder.decode(params, c, decoder.embed(params, c, view.tokens), positions, row_attend, (None,) * c.num_layers)

        def row(hidden, theirs):
            with jax.named_scope("head"):
                ours = decoder.unembed(params, c, hidden)
                theirs = decoder.unembed(view.tree, target, theirs)
            kl = soft_cross_entropy(ours, theirs) - entropy(theirs)
            return kl, jnp.argmax(ours) == jnp.argmax(theirs)

        kl, match = over_rows(row, (out.hidden.reshape(B * T, -1), view.hidden.reshape(B * T, -1)))
        kl, match, answer = kl.reshape(B, T), match.reshape(B, T), ahead(view.supervised, 1)
        exists = jnp.arange(T) < T - 1
        loss = masked_mean(kl, jnp.where(answer, 1.0, self.elsewhere) * exists)
        matches, following = (jnp.stack([ahead(x, d) for d in range(DEPTH)]) for x in (match, answer))
        return loss, {"kl": masked_mean(kl, answer), "accept": chain_accept(matches, jnp.all(following, 0))}


def weights(layers: int, width: int, ffn: int, vocab: int) -> int:
    """About how many weights a student has."""
    return vocab * width + layers * (4 * width * width + 3 * width * ffn)


def count_weights(config: ModelConfig) -> int:
    """How many weights a model has."""
    shapes = jax.tree.leaves(decoder.param_shapes(config), is_leaf=lambda x: isinstance(x, tuple))
    return sum(math.prod(shape) for shape in shapes)


def default_width(target: ModelConfig, layers: int, ffn: int) -> int:
    """The widest student of the target's vocabulary within `SHARE` of its weights; at least 16."""
    most, width = SHARE * count_weights(target), 32
    while weights(layers, width + 32, ffn or 3 * (width + 32), target.vocab_size) <= most:
        width += 32
    return width if weights(layers, width, ffn or 3 * width, target.vocab_size) <= most else 16


def student_config(target: ModelConfig, layers: int, hidden: int, heads: int, ffn: int) -> ModelConfig:
    """A Llama of the target's vocabulary, context and rotary base; of its heads and widths, too, where it is as wide.

    Raises:
      ConfigError: a size that cannot be.
    """
    if layers < 1 or min(hidden, heads, ffn) < 0:
        raise ConfigError(f"layers={layers} must be at least 1; hidden={hidden}, heads={heads}, ffn={ffn} not negative")
    hidden = hidden or default_width(target, layers, ffn)
    if hidden == target.hidden_size:
        if heads not in (0, target.num_heads) or ffn not in (0, target.ffn_size) or layers > target.num_layers:
            raise ConfigError(
                f"a student of the target's width {hidden} is made of its first layers: at most {target.num_layers}, with "
                f"heads={target.num_heads} and ffn={target.ffn_size} (got layers={layers}, heads={heads}, ffn={ffn})"
            )
        return initial.plain_layers(target, layers)
    heads = heads or max(hidden // 32, 1)
    if hidden % heads or hidden // heads % 2:
        raise ConfigError(f"hidden={hidden} over heads={heads} must give an even whole number of channels a head")
    return initial.plain_layers(
        target,
        layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=ffn or 3 * hidden,
        tie_embeddings=True,
        qkv_bias=False,
    )


def build(
    target: ModelConfig, layers: int = 4, hidden: int = 0, heads: int = 0, ffn: int = 0, elsewhere: float = 0.1
) -> StandaloneObjective:
    """The objective for a target; arguments as in `OPTIONS`. `Objective.config` is the student's `ModelConfig`.

    Raises:
      ConfigError: see `student_config`; or a negative weight.
    """
    if elsewhere < 0:
        raise ConfigError(f"elsewhere={elsewhere} must not be negative")
    return StandaloneObjective(target, student_config(target, layers, hidden, heads, ffn), elsewhere)
