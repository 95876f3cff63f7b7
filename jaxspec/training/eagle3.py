"""Training an EAGLE-3 head by test-time training (Li et al. 2025, section 3.2): steps that feed on the head's own states."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.eagle import model as eagle_model
from jaxspec.drafters.eagle.config import EagleConfig, default_taps
from jaxspec.models import decoder
from jaxspec.training import initial
from jaxspec.training.attention import unrolled_attend
from jaxspec.training.losses import over_rows
from jaxspec.training.objective import Objective, Option, View, chain_accept
from jaxspec.training.unrolled import ahead, anchors, within

LEARNING_RATE = 1e-3

CHUNK = 8192
"""Rows whose logits over the draft vocabulary are in memory at a time."""


def tap_list(text: str) -> tuple[int, ...]:
    """Taps from the command line: "2,15,27"."""
    return tuple(int(part) for part in text.split(","))


OPTIONS: dict[str, Option] = {
    "draft_vocab": Option(int, 32000, "tokens that the head can propose: the most frequent ones of the answers"),
    "steps_ahead": Option(int, 7, "draft steps that are trained in a chain"),
    "decay": Option(float, 0.8, "weight of a step, relative to the one before"),
    "taps": Option(
        tap_list, None, "hidden states of the target that the head reads, separated by commas (default: 2, L // 2, L - 3)"
    ),
    "layers": Option(int, 1, "layers of the head; 1 is EAGLE-3's"),
    "ffn": Option(int, 0, "width of the head's feed-forward part; 0 is the target's"),
}


@dataclass(frozen=True)
class Eagle3Objective(Objective):
    """Σ over steps of decay^s · CE against the target's distribution, restricted to the draft vocabulary.

    Attributes:
      steps_ahead, decay: see `OPTIONS`.
    """

    steps_ahead: int = 7
    decay: float = 0.8

    @property
    def taps(self) -> tuple[int, ...]:
        """The head's taps."""
        return self.config.taps

    def init(self, key, target_tree, token_counts) -> tuple[dict, dict]:
        """The target's last layer reading the hidden half of the doubled input; ``fc`` passes on the last tap.

        The head's output rows and final norm are the target's. Of the embedding the layer reads little at first.
        """
        target, config = self.target, self.config
        c, E = config.layers, config.hidden_size
        key_layers, key_mix = jax.random.split(key)
        ids = frequent_tokens(token_counts, config.draft_vocab_size)
        layers = {
            str(i): initial.layer_from_target(key_layers, c, target, target_tree, target.num_layers - 1, i)
            for i in range(c.num_layers)
        }
        first = layers["0"]
        first["hidden_norm"], first["input_norm"] = first["input_norm"], {"scale": jnp.ones(E)}
        kernel = first["attention"]["qkv"]["kernel"]
        mixed = 0.1 * E**-0.5 * jax.random.normal(key_mix, kernel.shape)
        first["attention"]["qkv"]["kernel"] = jnp.concatenate([mixed, kernel])
        passed = jnp.zeros((config.feature_size, E)).at[-E:].set(jnp.eye(E))
        trainable = {
            "fc": {"kernel": passed},
            "layers": layers,
            "final_norm": {"scale": initial.norm_scale(target, target_tree["final_norm"])},
            "head": {"kernel": head_columns(target, target_tree, ids).astype(jnp.float32)},
        }
        return trainable, {"target_ids": ids} if config.reduced_vocab else {}

    def loss(self, params, view: View, key, step):
        """The official loss: step s at row i predicts token i + 2 + s from its state and token i + 1 + s.

        A row counts in a step when that token is one of the target's answer and the target's most likely token is in the
        draft vocabulary; the mean is over all rows all the same. Metrics: "accept", the first step's "ce" over the rows that
        count, "in_vocabulary" (share of the target's choices that the head can propose).
        """
        del key, step
        config, target = self.config, self.target
        B, T = view.tokens.shape
        ids = params["target_ids"] if config.reduced_vocab else jnp.arange(config.draft_vocab_size)
        known = jnp.zeros(target.vocab_size, bool).at[ids].set(True)
        best = target_choices(view, target)
        columns = head_columns(target, view.tree, ids)
        hidden, state, caches = (
            view.hidden,
            eagle_model.project(params, config, view.features),
            ((),) * config.layers.num_layers,
        )
        total, matches, first = jnp.float32(0), [], {}

        def row(state, hidden):
            logits = eagle_model.logits(params, config, view.tree, target, state)
            wanted = soft_cap(target, (hidden @ columns).astype(jnp.float32))
            p = jax.nn.softmax(wanted)
            return jax.nn.logsumexp(logits) - jnp.sum(p * logits), ids[jnp.argmax(logits)]

        for s in range(self.steps_ahead):
            choice = ahead(best, 1 + s)
            counts = within(view.supervised, s) & known[choice]
            positions = jnp.broadcast_to(jnp.arange(T) + s, (B, T))
            embedding = eagle_model.embed(params, config, view.tree, ahead(view.tokens, 1 + s))
            state, caches = eagle_model.step(params, config, embedding, state, positions, unrolled_attend, caches)
            rows = (state.reshape(B * T, -1), ahead(hidden, 1 + s).reshape(B * T, -1))
            ce, drafted = over_rows(row, rows, chunk=CHUNK)
            ce = jnp.sum(ce * counts.reshape(-1))
            total = total + self.decay**s * ce / (B * T)
            matches.append(drafted.reshape(B, T) == choice)
            if s == 0:
                supervised = jnp.maximum(jnp.sum(within(view.supervised, 0)), 1)
                first = {"ce": ce / jnp.maximum(jnp.sum(counts), 1), "in_vocabulary": jnp.sum(counts) / supervised}
        return total, {"accept": chain_accept(jnp.stack(matches), anchors(view.supervised, self.steps_ahead)), **first}


def frequent_tokens(token_counts: Int[Array, " V"], size: int) -> Int[Array, " Vd"]:
    """The `size` most frequent tokens in the order of their ids (ties: the smaller id)."""
    order = jnp.argsort(-token_counts, stable=True)[:size]
    return jnp.sort(order).astype(jnp.int32)


def head_columns(target: ModelConfig, tree, ids: Int[Array, " Vd"]) -> Float[Array, "E Vd"]:
    """The columns of the target's output matrix that belong to `ids`."""
    if target.tie_embeddings:
        return tree["embedder"]["embedding"][ids].T
    kernel = tree["head"]["kernel"]
    if isinstance(kernel, dict):
        return kernel["q"][:, ids] * kernel["scale"][ids]
    return kernel[:, ids]


def soft_cap(target: ModelConfig, logits: Array) -> Array:
    """Soft-capped logits, where the target caps its own (Gemma 2)."""
    cap = target.logit_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def target_choices(view: View, target: ModelConfig) -> Int[Array, "B T"]:
    """The token that the target finds most likely behind each position."""
    B, T, E = view.hidden.shape

    def choose(hidden):
        return jnp.argmax(decoder.unembed(view.tree, target, hidden), axis=-1).astype(jnp.int32)

    return jax.lax.map(choose, view.hidden.reshape(B * T, E), batch_size=min(CHUNK, B * T)).reshape(B, T)


def build(
    target: ModelConfig,
    *,
    draft_vocab: int = 32000,
    steps_ahead: int = 7,
    decay: float = 0.8,
    taps: tuple[int, ...] | None = None,
    layers: int = 1,
    ffn: int = 0,
) -> Eagle3Objective:
    """The objective of an EAGLE-3 head for a target.

    Raises:
      ConfigError: an option is out of range, or the target has too few layers for the usual taps.
    """
    if taps is None:
        taps = default_taps(target.num_layers)
        if taps[2] < 0 or len(set(taps)) < 3:
            raise ConfigError(
                f"a target of {target.num_layers} layers has no three usual taps: give taps (hidden states 0 … L)"
            )
    outside = [tap for tap in taps if not decoder.FINAL_NORM <= tap <= target.num_layers]
    if outside or not taps:
        raise ConfigError(f"taps={taps} must be hidden states 0 … {target.num_layers} of the target")
    for name, value, least in (("draft_vocab", draft_vocab, 2), ("steps_ahead", steps_ahead, 1), ("layers", layers, 1)):
        if value < least:
            raise ConfigError(f"{name}={value} must be at least {least}")
    size = min(draft_vocab, target.vocab_size)
    changes = {"ffn_size": ffn} if ffn else {}
    config = EagleConfig(
        layers=initial.plain_layers(target, layers, family="eagle", **changes),
        fused=True,
        taps=tuple(taps),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=size,
        reduced_vocab=size < target.vocab_size,
        own_head=True,
        layout="sglang",
    )
    return Eagle3Objective(target, config, steps_ahead, decay)
