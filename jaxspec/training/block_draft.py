"""The part of training that DFlash and DSpark share: the draft's configuration and start, and blocks over random anchors.

A block begins at an anchor inside a text, sees the target's features strictly before it and nothing of its own text but
the anchor's token. Its D drafts are the tokens behind the anchor (DFlash, arXiv 2602.06036, appendix A.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.dflash import model as dflash_model
from jaxspec.drafters.dflash.config import DFlashConfig
from jaxspec.training import initial
from jaxspec.training.blocks import block_attend, sample_anchors, take
from jaxspec.training.eagle3 import head_columns, target_choices
from jaxspec.training.losses import CHUNK
from jaxspec.training.objective import Objective, Option, View


class Narrowed(NamedTuple):
    """What logits over the tokens that a step looks at are made of, C of them.

    Attributes:
      params: the draft's parameters; what follows the logits has C columns.
      tree, target: the target's output matrix and configuration with C tokens.
      offset: to be added to logits before a softmax [C].
      rows: the drafts; a label is a place among the C tokens, -1 where it is none of them.
    """

    params: dict
    tree: dict
    target: ModelConfig
    offset: Float[Array, " C"]
    rows: Rows


def tap_choice(text: str) -> int | tuple[int, ...]:
    """A number of taps, or the taps themselves, from the command line: "3" or "2,15,29"."""
    return tuple(int(part) for part in text.split(",") if part) if "," in text else int(text)


OPTIONS = {
    "layers": Option(int, 1, "transformer layers of the draft"),
    "block": Option(int, 8, "slots of a block"),
    "taps": Option(tap_choice, 3, "hidden states of the target that the draft reads: how many, or which, as 2,15,29"),
    "kv_heads": Option(int, 0, "key/value heads of a layer: what it reads of a token passes through them; 0 is the target's"),
    "heads": Option(int, 0, "attention heads of a layer; 0 is the target's"),
    "ffn": Option(int, 0, "width of a layer's feed-forward part; 0 is the target's"),
    "anchors": Option(int, 64, "blocks that are drafted in every row of a batch"),
    "causal": Option(bool, False, "slots see only slots before them, as trees over one block like it"),
    "off_path": Option(float, 0.5, "weight of drafts behind a token that is not the target's most likely one"),
    "mask_token": Option(int, None, "token in the slots to be filled, one that texts do not hold (default: the last one)"),
    "candidates": Option(int, 0, "tokens whose logits a step looks at, those of its texts first; 0 is all: no sampling"),
}
"""Options of both heads."""

CAUTION = 0.3
"""First logits, beside those of the target's final norm: a layer that reads blocks it does not know is sure of nothing."""


class Rows(NamedTuple):
    """One entry for every draft of every block, R = B · A · D.

    Attributes:
      hidden: output of the slot that predicts it.
      target_hidden: output of the target's final norm where the target predicts the same token.
      previous: the text's token before it.
      label: the text's token in its place.
    """

    hidden: Float[Array, "R E"]
    target_hidden: Float[Array, "R E"]
    previous: Int[Array, " R"]
    label: Int[Array, " R"]


def spread_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """Hidden states to read: from what enters the third layer to what enters the last, evenly; one alone is the latter.

    The late ones know most about the next tokens, the early ones which tokens were read. Small targets have fewer.
    """
    if count == 1:
        return (num_layers - 1,)
    spread = np.linspace(min(2, num_layers - 1), num_layers - 1, count)
    return tuple(dict.fromkeys(int(round(t)) for t in spread))


def shared_options(
    target: ModelConfig, options: Mapping[str, Option], given: Mapping[str, Any], **parts
) -> tuple[DFlashConfig, dict[str, Any]]:
    """The configuration of a new draft, and the fields of `BlockDraftObjective`, from what is given of `OPTIONS`.

    Args:
      target: the model that it drafts for.
      options: the head's own options, whose defaults those of `OPTIONS` have that are not given.
      given: values by name.
      parts: further fields of the configuration, which one head has and the other lacks.

    Raises:
      TypeError: an option that there is not.
      ConfigError: an option is out of range for this target.
    """
    unknown = sorted(set(given) - set(OPTIONS))
    if unknown:
        raise TypeError(f"no such option: {', '.join(unknown)}; there are {', '.join(OPTIONS)}")
    values = {name: options[name].default for name in OPTIONS} | given
    fields = {name: values.pop(name) for name in ("anchors", "off_path", "candidates")}
    return draft_config(target, **values, **parts), fields


def draft_config(
    target: ModelConfig,
    *,
    layers: int,
    block: int,
    taps: int | tuple[int, ...],
    causal: bool,
    mask_token: int | None,
    heads: int = 0,
    kv_heads: int = 0,
    ffn: int = 0,
    **parts,
) -> DFlashConfig:
    """The configuration of a new draft: layers of the target's widths with q/k norms, which published formats expect.

    Args:
      target: the target.
      layers, block, taps, causal, mask_token, heads, kv_heads, ffn: see `OPTIONS`.
      parts: further fields of `DFlashConfig`.

    Raises:
      ConfigError: no layers, no taps or none that the target has, heads that do not share keys evenly, or a block too short
        for a draft.
    """
    for name, value in (("layers", layers), ("taps", taps if isinstance(taps, int) else len(taps)), ("block", block)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    taps = spread_taps(target.num_layers, taps) if isinstance(taps, int) else tuple(taps)
    if not all(0 <= tap <= target.num_layers for tap in taps):
        raise ConfigError(f"taps={taps} must be hidden states 0 … {target.num_layers} of the target")
    shape = initial.plain_layers(target, layers, family="dflash", qk_norm=True, qkv_bias=False, architecture="")
    heads, kv_heads, ffn = heads or shape.num_heads, kv_heads or shape.num_kv_heads, ffn or shape.ffn_size
    if min(heads, kv_heads, ffn) < 1 or heads % kv_heads:
        raise ConfigError(f"heads={heads} must be a multiple of kv_heads={kv_heads}, and ffn={ffn} positive")
    return DFlashConfig(
        layers=replace(
            shape,
            tie_embeddings=False,
            bos_token_id=None,
            stop_token_ids=(),
            num_heads=heads,
            num_kv_heads=kv_heads,
            ffn_size=ffn,
        ),
        taps=taps,
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
        draft_vocab_size=target.vocab_size,
        block_size=block,
        mask_token_id=target.vocab_size - 1 if mask_token is None else mask_token,
        causal_head=causal,
        embedding_scale=target.embedding_scale,
        logit_softcap=target.logit_softcap,
        **parts,
    )


@dataclass(frozen=True)
class BlockDraftObjective(Objective):
    """What is common to both heads.

    Attributes:
      anchors: blocks in every row.
      off_path: weight of drafts behind tokens of the text that greedy decoding would not have chosen.
      candidates: tokens whose logits a step looks at (`narrow`); 0 for all.
    """

    anchors: int
    off_path: float
    candidates: int

    def __post_init__(self):
        if self.anchors < 1:
            raise ConfigError(f"anchors={self.anchors} must be at least 1")
        if not 0.0 <= self.off_path <= 1.0:
            raise ConfigError(f"off_path={self.off_path} must lie in [0, 1]")
        if self.candidates < 0:
            raise ConfigError(f"candidates={self.candidates} must be a number of tokens, or 0 for all of them")

    @property
    def taps(self) -> tuple[int, ...]:
        """Those of the draft."""
        return self.config.taps

    def init(self, key: jax.Array, target_tree, token_counts: Int[Array, " V"]) -> tuple[dict, dict]:
        """Layers, final norm and projection from the target: the last draft layer reads what the target's last layer reads."""
        del token_counts
        config, c = self.config, self.config.layers
        keys = jax.random.split(key, c.num_layers + 1)
        params = dflash_model.init_params(config, keys[-1])
        sources = np.linspace(self.target.num_layers // 2, self.target.num_layers - 1, c.num_layers + 1)[1:].round()
        for i, source in enumerate(sources):
            params["layers"][str(i)] = self.layer(keys[i], target_tree, int(source), i)
        width = self.target.hidden_size
        params["fc"]["kernel"] = jnp.zeros_like(params["fc"]["kernel"]).at[-width:].set(jnp.eye(width))
        params["final_norm"]["scale"] = CAUTION * initial.norm_scale(self.target, target_tree["final_norm"])
        if config.markov is not None:
            params["markov"]["out"]["kernel"] *= 0  # no correction yet
        if config.confidence is not None:
            params["confidence"]["kernel"] *= 0  # every chance is one half
        return params, {}

    def layer(self, key: jax.Array, target_tree, source: int, index: int) -> dict:
        """A layer of the target whose keys and values are taken of features that no norm of its own has scaled.

        Its input norm therefore moves into the projection. Where the target has no q/k norms, ours begin as one factor that
        gives queries and keys the size that they have there for inputs without correlations.
        """
        c = self.config.layers
        made = initial.layer_from_target(key, c, self.target, target_tree, source, index)
        if self.target.mla is None and (c.num_heads, c.num_kv_heads) != (self.target.num_heads, self.target.num_kv_heads):
            initial.copy_heads(made["attention"], c, target_tree["layers"][str(source)]["attention"], self.target)
        attention, norm = made["attention"], made["input_norm"]
        kernel = attention["qkv"]["kernel"] * norm["scale"][:, None]
        attention["qkv"]["kernel"], norm["scale"] = kernel, jnp.ones_like(norm["scale"])
        if self.target.qk_norm:
            given = target_tree["layers"][str(source)]["attention"]
            for name in ("q_norm", "k_norm"):
                attention[name]["scale"] = initial.norm_scale(self.target, given[name])
            return made
        groups = c.num_heads // c.num_kv_heads
        sizes = jnp.sum(jnp.square(kernel), 0).reshape(c.num_kv_heads, groups + 2, c.head_dim)
        attention["q_norm"]["scale"] *= jnp.sqrt(jnp.mean(sizes[:, :groups]))
        attention["k_norm"]["scale"] *= jnp.sqrt(jnp.mean(sizes[:, groups]))
        return made

    def draft(self, params: dict, view: View, anchors: Int[Array, "B A"]) -> Float[Array, "B A D E"]:
        """Outputs of the predicting slots of one block behind every anchor."""
        config, (B, T) = self.config, view.tokens.shape
        M, A = config.block_size, anchors.shape[1]
        context = dflash_model.project(params, config, view.features)
        entries = dflash_model.context_entries(params, config, context, jnp.broadcast_to(jnp.arange(T), (B, T)))
        tokens = jnp.full((B, A, M), config.mask_token_id, jnp.int32)
        tokens = tokens.at[..., :1].set(take(view.tokens, anchors[..., None]))
        positions = anchors[..., None] + jnp.arange(M)
        before = jnp.broadcast_to(anchors[..., None], (B, A, M))
        attends = []
        for causal in config.causal:
            own = jnp.tril(jnp.ones((M, M), bool)) if causal else jnp.ones((M, M), bool)
            attends.append(block_attend(positions, before, jnp.broadcast_to(own, (B, A, M, M))))
        x = dflash_model.embed(params, config, view.tree, tokens.reshape(B, A * M))
        hidden, _ = dflash_model.run_block(
            params, config, x, positions.reshape(B, A * M), attends, entries, config.layers.windows
        )
        first = 0 if config.anchor_predicts else 1
        return hidden.reshape(B, A, M, -1)[:, :, first:]

    def blocks(self, params: dict, view: View, key: jax.Array) -> tuple[Rows, Bool[Array, "B A D"]]:
        """Blocks over random anchors: an entry for every draft, and which drafts have a label.

        An anchor is a token of an answer that another one follows; so is every label.
        """
        following = jnp.pad(view.supervised[:, 1:], ((0, 0), (0, 1)))
        anchors, kept = sample_anchors(key, view.supervised & following, self.anchors)
        hidden = self.draft(params, view, anchors)
        before = anchors[..., None] + jnp.arange(self.config.num_drafts)
        inside = before + 1 < view.tokens.shape[1]
        valid = kept[..., None] & inside & take(view.supervised, before + 1)

        def rows(x: Array) -> Array:
            return x.reshape(-1, *x.shape[3:])

        entries = Rows(
            hidden=rows(hidden),
            target_hidden=rows(take(view.hidden, before)),
            previous=rows(take(view.tokens, before)),
            label=rows(take(view.tokens, before + 1)),
        )
        return entries, valid

    def narrow(self, params: dict, view: View, rows: Rows, key: jax.Array) -> Narrowed:
        """The tokens whose logits this step looks at: all, or `candidates` of them, which takes a fraction of the time.

        Candidates are the tokens of the batch's texts and those that the target finds most likely somewhere in it, so that
        no label is absent; tokens drawn at random from all others stand for these, each with the weight of as many as there
        are for one drawn (sampled softmax, Jean et al. 2015).
        """
        V, C = self.target.vocab_size, self.candidates
        if not 0 < C < V:
            return Narrowed(params, view.tree, self.target, jnp.zeros(()), rows)
        seen = jnp.zeros(V).at[view.tokens].add(1.0).at[target_choices(view, self.target)].add(1.0)
        _, ids = jax.lax.top_k(seen + jax.random.uniform(key, (V,), maxval=0.5), C)
        kept = jnp.minimum(jnp.sum(seen > 0), C)
        drawn = jnp.log(jnp.maximum(V - kept, 1)) - jnp.log(jnp.maximum(C - kept, 1))
        place = jnp.full(V, -1, jnp.int32).at[ids].set(jnp.arange(C, dtype=jnp.int32))
        target = replace(self.target, vocab_size=C, tie_embeddings=False)
        tree = {"head": {"kernel": head_columns(self.target, view.tree, ids)}}
        if self.config.markov is not None:
            out = {"kernel": params["markov"]["out"]["kernel"][:, ids]}
            params = {**params, "markov": {**params["markov"], "out": out}}
        return Narrowed(params, tree, target, jnp.where(seen[ids] > 0, 0.0, drawn), rows._replace(label=place[rows.label]))

    def chunk(self) -> int:
        """Rows whose logits are in memory at a time."""
        return CHUNK * self.target.vocab_size // self.candidates if self.candidates else CHUNK

    def weights(
        self, valid: Bool[Array, "B A D"], likely: Bool[Array, "B A D"], decay: Float[Array, " D"]
    ) -> Float[Array, "B A D"]:
        """A draft's weight: less with its distance from the anchor, and less where greedy decoding leaves the text before it.

        Args:
          valid: drafts that have a label.
          likely: labels that are the target's most likely tokens.
          decay: by distance.
        """
        on_path = jnp.cumprod(jnp.pad(likely[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=True), axis=-1)
        return valid * decay * jnp.where(on_path, 1.0, self.off_path)
