"""UNO (arXiv 2609.04010): an adapter on noise rows learns to say what the target says when it knows the text.

A block begins behind a seed token: its rows hold noise, see the clean text up to the seed and the noise before them, and
run with the adapter. Row o behind a seed at s stands at position s + 1 + o; its teacher is the target's own prediction
there, which knows the tokens that the row must do without. The clean rows never run with the adapter, so their keys and
values follow from what the frozen target has read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.conversion.drafts.peft import blocks_of, columns_of
from jaxspec.conversion.targets import hf
from jaxspec.drafters.uno import model as uno_model
from jaxspec.drafters.uno.config import MODULES, PRODUCTS, UnoConfig
from jaxspec.models import decoder
from jaxspec.models.layers import rms_norm
from jaxspec.training.blocks import block_attend, sample_anchors, take
from jaxspec.training.losses import masked_mean, over_rows_frozen, soft_cross_entropy
from jaxspec.training.objective import Objective, Option, View
from pallas_kernels.product.api import add_up

LEARNING_RATE = 2e-3
CURRICULUM = (2, 4, 6, 8, 12, 16)
"""Block sizes, seed included, through which training goes in equal parts of its steps."""
KEPT = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
"""The backward pass keeps the results of a layer's products with weights and recomputes the rest."""

OPTIONS = {
    "rank": Option(int, 8, "rank of the adapter"),
    "alpha": Option(float, None, "numerator of its scale alpha / rank (default: twice the rank)"),
    "block": Option(int, 8, "rows of a block, the exact one included"),
    "anchors": Option(int, 64, "blocks of that size in every row of a batch"),
    "noise_below": Option(int, None, "noise ids lie in 1 … noise_below - 1 (default: the whole vocabulary)"),
    "ce": Option(float, 0.0, "weight of a cross entropy beside the distance between both distributions"),
    "curriculum_steps": Option(int, 0, "steps over which block sizes grow; 0 trains blocks of full size from the beginning"),
}


def modules_of(target: ModelConfig) -> tuple[str, ...]:
    """The linear layers of a target that an adapter can change, under the names of its family; experts stay as they are."""
    layout = hf.LAYOUTS.get(target.family, hf.LLAMA)
    attention = ("qkv_proj", "o_proj") if layout.qkv else MODULES[:4]
    mlp = ("gate_up_proj", "down_proj") if layout.gate_up else MODULES[4:]
    return attention if target.moe is not None else attention + mlp


def block_sizes(block: int) -> tuple[int, ...]:
    """The curriculum up to blocks of `block` rows."""
    return (*(size for size in CURRICULUM if size < block), block)


def own_columns(config: UnoConfig) -> dict:
    """1 where a ``b`` may differ from 0: the columns of a row's own module (`uno_model.param_shapes`); same tree, no ``a``."""

    def mask(product: tuple[str, str]) -> np.ndarray:
        names, widths, *_ = columns_of(config, product)
        width = dict(zip(names, widths, strict=True))
        return blocks_of(config, product).join([np.ones((width[m], config.rank), np.float32) for m in config.changed(product)])

    layer: dict = {}
    for block, name in PRODUCTS:
        if config.changed((block, name)):
            layer.setdefault(block, {})[name] = {"b": mask((block, name))}
    return {"layers": {str(i): layer for i in range(config.target.num_layers)}}


def note(cache, q, k, v, **options):
    """An `Attend` that only hands the layer's keys and values out."""
    del cache, options
    return q, (k, v)


def alike(config: ModelConfig, layers: list[dict]) -> bool:
    """Whether one program serves all layers: their shapes, windows and rotary angles agree."""
    return len(set(config.windows)) == 1 and len({jax.tree.structure(layer) for layer in layers}) == 1


def over_layers(config: ModelConfig, run, x: Any, entries: list[tuple]) -> tuple[Any, Any]:
    """(last x, what each layer hands out, stacked) of x, out = run(layer, x, entry) through all layers.

    Layers that are all alike become one loop, which compiles many times faster than so many copies.

    Args:
      config: the target.
      run: gets the number of the layer, which only says which of the target's settings hold.
      x: what enters the first.
      entries: one for each layer; its parameters in front.
    """
    if alike(config, [entry[0] for entry in entries]):
        return jax.lax.scan(partial(run, 0), x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *entries))
    outs = []
    for i, entry in enumerate(entries):
        x, out = run(i, x, entry)
        outs.append(out)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


@dataclass(frozen=True)
class UnoObjective(Objective):
    """Mean of Σ|p - q| over noise rows (p: the target on clean text, q: the target with the adapter on noise).

    Attributes:
      block: rows of a full block, the seed's included.
      anchors: full blocks in every row of a batch; while blocks are smaller there are more of them in the same space.
      ce: weight of the cross entropy -Σ p log q.
      curriculum_steps: steps over which block sizes grow; 0 for full size at once.
    """

    block: int
    anchors: int
    ce: float
    curriculum_steps: int

    def __post_init__(self):
        if self.block < 2:
            raise ConfigError(f"block={self.block} must be at least 2: the exact row and one that drafts")
        if self.anchors < 1:
            raise ConfigError(f"anchors={self.anchors} must be at least 1")
        if self.ce < 0 or self.curriculum_steps < 0:
            raise ConfigError(f"ce={self.ce} and curriculum_steps={self.curriculum_steps} must not be negative")

    def init(self, key: jax.Array, target_tree, token_counts: Int[Array, " V"]) -> tuple[dict, dict]:
        """Random ``a``, and ``b`` of zeros: the target as it is (Hu et al. 2021, section 4.1)."""
        del target_tree, token_counts
        params = uno_model.init_params(self.config, key)
        return jax.tree_util.tree_map_with_path(lambda path, x: x * 0 if path[-1].key == "b" else x, params), {}

    def block_size(self, step: Int[Array, ""]) -> Int[Array, ""]:
        """Rows of a block at a step."""
        sizes = block_sizes(self.block)
        starts = np.arange(1, len(sizes)) * self.curriculum_steps / len(sizes)
        return jnp.asarray(sizes)[jnp.sum(step >= starts)]

    def adapter(self, params: dict) -> dict:
        """The adapter without what its form does not have: a module's rows of ``b`` outside its own columns."""
        masks = own_columns(self.config)["layers"]

        def masked(path, x):
            if path[-1].key != "b":
                return x
            _, layer, block, product, _ = (part.key for part in path)
            return x * jnp.asarray(masks[layer][block][product]["b"], x.dtype)

        return jax.tree_util.tree_map_with_path(masked, params)

    def loss(self, params: dict, view: View, key: jax.Array, step: Int[Array, ""]) -> tuple[Float[Array, ""], dict]:
        """The loss of one batch; metrics: "accept", "tv", "block".

        "accept" is that of the noise rows alone: the exact token in front of them, which a round emits in any case, is not
        counted, so that a round emits about 2 + its sum, not 1 + its sum as for other heads.
        """
        A, M, (B, T) = self.anchors, self.block - 1, view.tokens.shape
        seed_key, noise_key = jax.random.split(key)
        size = self.block_size(step)
        slots = jnp.arange(M)
        block, row = slots // (size - 1), slots % (size - 1)  # several small blocks share the space of a full one
        count = M // (size - 1)
        own = (block[:, None] == block) & (slots <= slots[:, None])

        ahead = [jnp.pad(view.supervised[:, i:], ((0, 0), (0, min(i, T)))) for i in range(3)]
        seeds, kept = sample_anchors(seed_key, ahead[0] & ahead[1] & ahead[2], A * M)
        index = jnp.minimum(jnp.arange(A)[:, None] * count + block, A * M - 1)
        seed, used = seeds[:, index], kept[:, index] & (block < count)
        positions = seed + 1 + row
        labelled = (positions + 1 < T) & take(view.supervised, positions + 1)
        valid = used & every(own, labelled)

        noise = jax.random.randint(noise_key, (B, A * M), 1, self.noise_below)
        student = self.noise_pass(params, view, noise, positions, seed + 1, own, self.clean_entries(view))

        def loss_of(hidden, target_hidden):
            logits = decoder.unembed(view.tree, self.target, hidden)
            target = decoder.unembed(view.tree, self.target, target_hidden)
            tv = jnp.sum(jnp.abs(jax.nn.softmax(target) - jax.nn.softmax(logits)))
            total = tv + self.ce * soft_cross_entropy(logits, target) if self.ce else tv
            return total, (tv, jnp.argmax(logits) == jnp.argmax(target))

        teacher = take(view.hidden, positions).reshape(B * A * M, -1)
        out = over_rows_frozen(loss_of, student.reshape(B * A * M, -1), (teacher,))
        loss, (tv, match) = jax.tree.map(lambda x: x.reshape(B, A, M), out)
        whole = every(block[:, None] == block, valid)
        depth = whole[..., None] & (row[:, None] == slots)
        accepted = jnp.einsum("BAM,BAMD->D", every(own, match).astype(jnp.float32), depth.astype(jnp.float32))
        accept = accepted / jnp.maximum(jnp.sum(depth, (0, 1, 2)), 1)
        return masked_mean(loss, valid), {"accept": accept, "tv": masked_mean(tv, valid), "block": size.astype(jnp.float32)}

    @property
    def taps(self) -> tuple[int, ...]:
        """What enters every layer: clean keys and values are made of it."""
        return tuple(range(self.target.num_layers))

    @property
    def noise_below(self) -> int:
        """Noise ids lie in 1 … noise_below - 1, as the drafter's."""
        return self.target.vocab_size if self.config.mask_token_id is None else self.config.mask_token_id

    def layers(self, tree: dict) -> list[dict]:
        """A target's layers in order."""
        return [tree["layers"][str(i)] for i in range(self.target.num_layers)]

    def clean_entries(self, view: View) -> tuple[Float[Array, "layers B T K D"], Float[Array, "layers B T K D"]]:
        """Keys and values of the text in every layer, from what entered the layer; nothing else of it is computed."""
        B, T = view.tokens.shape
        angles = decoder.layer_angles(self.target, jnp.broadcast_to(jnp.arange(T), (B, T)))
        inputs = view.features.reshape(B, T, self.target.num_layers, -1)

        def run(index, x, entry):
            return x, decoder.decoder_layer(entry[1], entry[0], self.target, index, angles[index], note, None)[2]

        entries = [(layer, inputs[:, :, i]) for i, layer in enumerate(self.layers(view.tree))]
        return over_layers(self.target, run, None, entries)[1]

    def noise_pass(
        self,
        params: dict,
        view: View,
        noise: Int[Array, "B R"],
        positions: Int[Array, "B A M"],
        context: Int[Array, "B A M"],
        own: Bool[Array, "M M"],
        clean: tuple[Float[Array, "layers B T K D"], Float[Array, "layers B T K D"]],
    ) -> Float[Array, "B R E"]:
        """Outputs of the final norm over the noise rows, R = A · M.

        Args:
          params: the adapter.
          view: the batch.
          noise: their ids.
          positions: their positions.
          context: how many clean tokens each sees.
          own: which rows of its full block's space each sees.
          clean: from `clean_entries`.
        """
        B, A, M = positions.shape
        x = decoder.embed(view.tree, self.target, noise)
        gate = jnp.ones((B, A * M, 1), bool)
        tree = uno_model.adapted(view.tree, self.adapter(params), jnp.asarray(self.config.scale, x.dtype), gate)
        attend = block_attend(positions, context, jnp.broadcast_to(own, (B, A, M, M)))
        angles = decoder.layer_angles(self.target, positions.reshape(B, A * M))

        def run(index, x, entry):
            def layer(x, params):
                x, parts, _ = decoder.decoder_layer(x, params, self.target, index, angles[index], attend, entry[1:])
                return x + add_up(parts, x.dtype), None

            return jax.checkpoint(layer, policy=KEPT)(x, entry[0])

        x, _ = over_layers(self.target, run, x, list(zip(self.layers(tree), *clean, strict=True)))
        return rms_norm(x, view.tree["final_norm"], self.target.norm_eps, self.target.norm_plus_one)


def every(seen: Bool[Array, "M M"], rows: Bool[Array, "B A M"]) -> Bool[Array, "B A M"]:
    """Whether all rows that a row sees have the property `rows`."""
    return jnp.all(rows[..., None, :] | ~seen, axis=-1)


def build(
    target: ModelConfig,
    *,
    rank: int = OPTIONS["rank"].default,
    alpha: float | None = None,
    block: int = OPTIONS["block"].default,
    anchors: int = OPTIONS["anchors"].default,
    noise_below: int | None = None,
    ce: float = OPTIONS["ce"].default,
    curriculum_steps: int = OPTIONS["curriculum_steps"].default,
) -> UnoObjective:
    """The objective of a new adapter (`OPTIONS` says what the options mean).

    Raises:
      ConfigError: an option is out of range for this target, or adapters for it are not supported.
    """
    if noise_below is not None and not 2 <= noise_below < target.vocab_size:
        raise ConfigError(f"noise_below={noise_below} must lie in 2 … {target.vocab_size - 1}, the vocabulary")
    config = UnoConfig(
        target=target,
        rank=rank,
        alpha=2.0 * rank if alpha is None else alpha,
        modules=modules_of(target),
        mask_token_id=noise_below,
    )
    return UnoObjective(target, config, block=block, anchors=anchors, ce=ce, curriculum_steps=curriculum_steps)
