"""DFLASH and DSPARK: a draft fills a whole block in one pass over the target's features, kept as its keys and values.

Features of committed tokens enter the draft's pools once, at the target's own positions, and stay there. A block's own
entries lie behind the committed length, where the next pass overwrites them.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxspec.config import ConfigError, ModelConfig, SpecConfig
from jaxspec.drafters.base import Drafter, Proposal, RoundContext
from jaxspec.drafters.dflash import heads as dflash_heads
from jaxspec.drafters.dflash import model as dflash_model
from jaxspec.drafters.dflash.config import DFlashConfig, DSparkOptions, check_target
from jaxspec.kvcache import LayerKV, find_slots, init_layers, write_layers
from jaxspec.models.attend import PagedAttend
from jaxspec.sampling import DRAFT, tagged
from jaxspec.trees.block_tree import best_first
from jaxspec.trees.sampled_chain import draw
from jaxspec.trees.tree import DraftTree, chain, grow, pack_bits
from pallas_kernels.vocabulary.api import top_k, top_k_probabilities


class DFlashState(NamedTuple):
    """The draft's pools, which share the target's page table."""

    layers: tuple[LayerKV, ...]


@dataclasses.dataclass(frozen=True)
class DFlashDrafter(Drafter):
    """Drafts one block a round: a chain of num_steps tokens, or a tree of num_draft_tokens nodes over it.

    The block always has the draft's own size; num_steps below what it drafts shortens only what is verified.

    Attributes:
      draft: the draft.
      num_steps: drafts of a chain, depth of a tree.
      topk: candidates per depth of a tree; 1 for a chain.
      num_draft_tokens: nodes, the root included.
      window, sink: how far back the draft attends, and how many leading positions it sees regardless; None for all.
      sampled: draw the drafts of a chain and keep their distributions, for rejection sampling and block verification;
        else drafts are the most probable ones in sampled requests, too.
      min_survival: chains end before the first draft whose estimated probability of being reached and accepted is below.
    """

    draft: DFlashConfig
    num_steps: int
    topk: int
    num_draft_tokens: int
    window: int | None = None
    sink: int = 0
    sampled: bool = False
    min_survival: float = 0.0

    @property
    def name(self) -> str:
        """The algorithm's name."""
        return self.draft.algorithm

    @property
    def taps(self) -> tuple[int, ...]:
        """What the checkpoint was trained on."""
        return self.draft.taps

    @property
    def slack(self) -> int:
        """The tree's nodes in the target's cache, the block in the draft's."""
        return max(self.num_draft_tokens, self.draft.block_size)

    @property
    def max_accept(self) -> int:
        """A full path and the bonus token."""
        return min(self.num_steps, self.num_draft_tokens - 1) + 1

    def init(self, params, batch: int, num_pages: int, page_size: int, max_len: int, dtype) -> DFlashState:
        """Empty pools of the cache's type."""
        del params, batch, max_len
        c = self.draft.layers
        return DFlashState(init_layers(c.num_layers, num_pages, page_size, c.num_kv_heads, c.head_dim, c.head_dim, dtype))

    def prefill(self, params, state, ctx: RoundContext, tokens, following, features, n_valid) -> DFlashState:
        """Features of the chunk become keys and values; its tokens are not needed."""
        del tokens, following
        return self.remember(params, state, ctx, features, n_valid)

    def update(self, params, state, ctx: RoundContext, accepted, features, n_accepted) -> DFlashState:
        """The same for what the round committed."""
        del accepted
        return self.remember(params, state, ctx, features, n_accepted)

    def remember(
        self, params, state: DFlashState, ctx: RoundContext, features: Float[Array, "B T W"], count: Int[Array, " B"]
    ) -> DFlashState:
        """Writes context entries for the first `count` features, which follow the committed ones."""
        with jax.named_scope("context"):
            order = jnp.arange(features.shape[1])
            positions = ctx.cache.length[:, None] + order
            context = dflash_model.project(params, self.draft, features)
            heads = dflash_model.context_heads(params, self.draft, context, positions)
            page_size = state.layers[0].k.shape[1]
            slots = find_slots(ctx.cache.page_table, page_size, positions, order < count[:, None])
            return DFlashState(write_layers(state.layers, slots, heads))

    def visible(self, window: int | None, causal: bool, batch: int) -> UInt32[Array, "B T words"] | None:
        """Which slots of a block each one sees: those before it, or all, in a sliding layer all within the window."""
        if causal:
            return None
        slots = jnp.arange(self.draft.block_size)
        near = jnp.ones((slots.size, slots.size), bool)
        if window is not None:  # keys behind the query; those before it fall under the attention's own window
            near = slots[None] - slots[:, None] < window
        return jnp.broadcast_to(pack_bits(near), (batch, slots.size, -(-slots.size // 32)))

    def run(self, params, layers: tuple[LayerKV, ...], ctx: RoundContext) -> tuple[Float[Array, "B T E"], tuple[LayerKV, ...]]:
        """The pass over a block: [bonus, mask, mask, …] behind the committed positions; outputs of the final norm."""
        c, size, base = self.draft.layers, self.draft.block_size, ctx.cache.length
        batch = base.shape[0]
        tokens = jnp.full((batch, size), self.draft.mask_token_id, jnp.int32).at[:, 0].set(ctx.bonus)
        positions = base[:, None] + jnp.arange(size)
        valid = jnp.broadcast_to(ctx.active[:, None], (batch, size))
        windows = [w if self.window is None else min(self.window, w or self.window) for w in c.windows]
        attends = [
            PagedAttend.behind(
                ctx.cache.page_table,
                base,
                layers[0].k.shape[1],
                positions,
                valid,
                positions,
                self.visible(own, causal, batch),
                sink=self.sink,
            )
            for own, causal in zip(c.windows, self.draft.causal, strict=True)
        ]
        x = dflash_model.embed(params, self.draft, ctx.params, tokens)
        return dflash_model.run_block(params, self.draft, x, positions, attends, layers, windows)

    def predictions(
        self, params, ctx: RoundContext, hidden: Float[Array, "B T E"]
    ) -> tuple[Float[Array, "B D E"], Float[Array, "B D Vd"]]:
        """Outputs and base logits of the slots that predict the next num_steps tokens."""
        first = 0 if self.draft.anchor_predicts else 1
        hidden = hidden[:, first : first + self.num_steps]
        return hidden, dflash_model.logits(params, self.draft, ctx.params, ctx.config, hidden)

    def propose(self, params, state: DFlashState, ctx: RoundContext) -> Proposal:
        """Drafts a block and builds the chain or tree over it."""
        hidden, layers = self.run(params, state.layers, ctx)
        hidden, base = self.predictions(params, ctx, hidden)
        if self.topk == 1:
            tree = self.chain(params, ctx, hidden, base)
        elif self.draft.sequential:
            tree = self.grow(params, ctx, hidden, base)
        else:
            probs, ids = top_k(jax.nn.log_softmax(base, axis=-1), self.topk)
            tree = best_first(
                ctx.bonus,
                probs,
                self.to_target_ids(params, ids),
                num_nodes=self.num_draft_tokens,
                whole_families=self.draft.causal_head,
            )
        return self.proposal(tree, DFlashState(layers), ctx)

    def to_target_ids(self, params, ids: Int[Array, "*R"]) -> Int[Array, "*R"]:
        """Draft ids → target ids."""
        return params["target_ids"][ids] if self.draft.reduced_vocab else ids

    def chain(self, params, ctx: RoundContext, hidden: Float[Array, "B D E"], base: Float[Array, "B D Vd"]) -> DraftTree:
        """One draft after another; only what the heads add is computed per slot."""
        draws = self.sampled and ctx.sampling.any_sampled
        if not draws and not self.draft.sequential:
            ids = self.to_target_ids(params, jnp.argmax(base, -1).astype(jnp.int32))
            stacked = jnp.concatenate([ctx.bonus[:, None], ids], 1)
            return chain(stacked, self.reached(params, hidden, stacked))
        batch, vocab = ctx.bonus.shape[0], ctx.config.vocab_size
        keys, rows = tagged(ctx.keys, DRAFT), jnp.arange(ctx.bonus.shape[0])[:, None]
        tokens, probs = [ctx.bonus], [jnp.zeros((batch, vocab))]
        state = dflash_heads.initial_state(self.draft, batch)
        for i in range(self.num_steps):
            out = dflash_heads.step(params, self.draft, hidden[:, i], base[:, i], tokens[-1][:, None], state)
            logits, state = out.logits[:, 0], out.state
            if draws:
                q, index = draw(logits, jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, i), ctx.sampling)
            else:
                index = jnp.argmax(logits, -1).astype(jnp.int32)
            if out.ids is not None:
                targets = out.ids[:, 0]
            elif self.draft.reduced_vocab:
                targets = jnp.broadcast_to(params["target_ids"], logits.shape)
            else:
                targets = None
            tokens.append(index if targets is None else jnp.take_along_axis(targets, index[:, None], 1)[:, 0])
            if draws:
                probs.append(q if targets is None else jnp.zeros((batch, vocab)).at[rows, targets].set(q))
        stacked = jnp.stack(tokens, 1)
        return chain(stacked, self.reached(params, hidden, stacked), jnp.stack(probs, 1) if draws else None)

    def reached(self, params, hidden: Float[Array, "B D E"], tokens: Int[Array, "B T"]) -> Array | None:
        """Which nodes of a chain are worth verifying, by the draft's own estimate; None for all.

        A node's estimate looks at nothing but the nodes before it, so that leaving it out does not bias what is sampled.
        """
        if self.draft.confidence is None or not self.min_survival:
            return None
        logit = dflash_heads.confidence(params, self.draft, hidden, tokens[:, :-1])
        survival = jnp.cumprod(jax.nn.sigmoid(logit), axis=1)
        return jnp.pad(survival >= self.min_survival, ((0, 0), (1, 0)), constant_values=True)

    def grow(self, params, ctx: RoundContext, hidden: Float[Array, "B D E"], base: Float[Array, "B D Vd"]) -> DraftTree:
        """A tree whose levels depend on their path: EAGLE-2's growth, with the heads in place of a forward."""

        def continuations(slot: int, previous: Int[Array, "B K"], state):
            out = dflash_heads.step(params, self.draft, hidden[:, slot], base[:, slot], previous, state)
            probs, index = top_k_probabilities(out.logits, self.topk)
            if out.ids is not None:
                return probs, jnp.take_along_axis(out.ids, index, -1), out.state
            return probs, self.to_target_ids(params, index), out.state

        def expand(level: int, tokens, parent, visible, state):
            del visible
            state = jnp.take_along_axis(state, parent[..., None], 1)
            return continuations(level + 1, tokens, state)

        state = dflash_heads.initial_state(self.draft, ctx.bonus.shape[0])
        probs, ids, state = continuations(0, ctx.bonus[:, None], state)
        tree, _ = grow(
            ctx.bonus,
            probs[:, 0],
            ids[:, 0],
            expand,
            state,
            num_steps=self.num_steps,
            topk=self.topk,
            num_draft_tokens=self.num_draft_tokens,
        )
        return tree


def capacity(config: DFlashConfig, num_steps: int, topk: int) -> int:
    """Most nodes that a tree over the block can have, the root included."""
    if config.sequential:
        return 1 + topk + (num_steps - 1) * topk**2
    return 1 + sum(topk**depth for depth in range(1, num_steps + 1))


def resolve(spec: SpecConfig, config: ModelConfig, draft) -> SpecConfig:
    """The tree for a draft: a chain over its whole block unless topk says otherwise.

    Drafts with a Markov head or a candidate selector are trained to be sampled from, so that chains of theirs are verified
    by rejection sampling unless thresholds below 1 ask for more than that; all others draft greedily, which target-only
    verification takes as a point mass.

    Args:
      spec: as asked for. num_steps below the block's drafts verifies only the first ones; num_draft_tokens is the block's
        own number of nodes, or with topk > 1 the budget of the tree (default: as many nodes as the chain has).
      config: the target.
      draft: `DraftParams` with a `DFlashConfig`.

    Raises:
      ConfigError: a parameter disagrees with the draft's block, or cannot be combined with another.
    """
    del config
    own: DFlashConfig = draft.config
    steps = own.num_drafts if spec.num_steps is None else spec.num_steps
    if steps > own.num_drafts:
        raise ConfigError(
            f"num_steps={steps} exceeds the {own.num_drafts} tokens that the draft's block of {own.block_size} gives"
        )
    topk = 1 if spec.topk is None else spec.topk
    nodes = steps + 1 if spec.num_draft_tokens is None else spec.num_draft_tokens
    if topk == 1 and nodes != steps + 1:
        anchor = "one more than the block" if own.anchor_predicts else "the block"
        raise ConfigError(
            f"num_draft_tokens={nodes} disagrees with the draft's block_size={own.block_size}: a chain over it has {steps + 1} "
            f"nodes ({anchor}); leave num_draft_tokens out, verify fewer with num_steps, or draft a tree with topk > 1"
        )
    widest = min(own.draft_vocab_size, own.selector_top_k or own.draft_vocab_size)
    if topk > widest:
        what = (
            f"the {widest} candidates of the draft's selector" if own.selector_top_k else f"its vocabulary of {widest} tokens"
        )
        raise ConfigError(f"topk={topk} exceeds {what}")
    most = capacity(own, steps, topk)
    if not 2 <= nodes <= most:
        raise ConfigError(
            f"num_draft_tokens={nodes} is out of range: with topk={topk} and num_steps={steps} a tree has 2 to {most} nodes"
        )
    window = spec.options.draft_window_size
    if window is not None and window < own.block_size:
        raise ConfigError(f"draft_window_size={window} must not be below the draft's block_size={own.block_size}")
    survival = min_draft_survival(spec)
    if survival and own.confidence is None:
        raise ConfigError(f"min_draft_survival={survival} needs a draft with a confidence head, this one has none")
    if survival and topk > 1:
        raise ConfigError(f"min_draft_survival={survival} shortens chains: topk={topk} must be 1")
    lossless = spec.accept_threshold_single == 1 and spec.accept_threshold_acc == 1
    rejection = spec.use_rejection_sampling or (own.sequential and topk == 1 and lossless)
    return dataclasses.replace(spec, num_steps=steps, topk=topk, num_draft_tokens=nodes, use_rejection_sampling=rejection)


def min_draft_survival(spec: SpecConfig) -> float:
    """Where chains end by the draft's own estimate; 0.0 for kinds of block drafts that have no such option."""
    return spec.options.min_draft_survival if isinstance(spec.options, DSparkOptions) else 0.0


def build(target, draft, spec: SpecConfig) -> tuple[DFlashDrafter, dict]:
    """The drafter and its parameters.

    Args:
      target: the target's `ModelParams`.
      draft: `DraftParams` with a `DFlashConfig`.
      spec: from `resolve`.

    Raises:
      ConfigError: the draft was made for another target.
    """
    check_target(draft.config, target.config)
    drafter = DFlashDrafter(
        draft=draft.config,
        num_steps=spec.num_steps,
        topk=spec.topk,
        num_draft_tokens=spec.num_draft_tokens,
        window=spec.options.draft_window_size,
        sink=spec.options.draft_sink_size,
        sampled=spec.verification != "target_only",
        min_survival=min_draft_survival(spec),
    )
    return drafter, dflash_model.with_context_product(draft.tree, draft.config)
