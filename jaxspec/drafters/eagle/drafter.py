"""EAGLE-1/2 and EAGLE-3: a one-layer head drafts a tree from the target's own features.

Pair p = (target feature at position p, token at p + 1) stands at position p, so the head's cache covers positions
0 … L-1 when the target's covers 0 … L-1 and the bonus token x_L is known. After every round the accepted positions
are fed again, with features of the *target* ("draft extend"); what drafting wrote behind them is overwritten.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.config import ConfigError, ModelConfig, SpecConfig, resolve_tree
from jaxspec.drafters.base import Drafter, Proposal, RoundContext
from jaxspec.drafters.eagle import model as eagle_model
from jaxspec.drafters.eagle.config import EagleConfig, EagleOptions, check_target
from jaxspec.drafters.token_map import apply_token_map
from jaxspec.kvcache import LayerKV, init_layers
from jaxspec.models.attend import PagedAttend
from jaxspec.models.paged import beside_nothing, is_alone
from jaxspec.trees.sampled_chain import sampled_chain
from jaxspec.trees.static_tree import StaticTree, grow_static
from jaxspec.trees.tree import DraftTree, grow, pack_bits
from pallas_kernels.vocabulary.api import top_k_probabilities


class EagleState(NamedTuple):
    """The head's pools, which share the target's page table, and its recurrent state at the last committed pair.

    The first level of the next tree is read off `hidden`, so the head's output matrix runs once a round for it, in
    `propose`, and a prefill chunk never needs it.
    """

    layers: tuple[LayerKV, ...]
    hidden: Float[Array, "B E"]


@dataclasses.dataclass(frozen=True)
class EagleDrafter(Drafter):
    """Drafts an EAGLE-2 tree: num_steps levels, topk beams, num_draft_tokens nodes with the root.

    The key/value entries that a beam sees are those of its own ancestors, as in EAGLE's own code and as heads are
    trained. SGLang instead keeps one scratch column per beam index, so that after a re-selection a beam may read the
    entries of a branch it does not continue. Answers are the same (verification is exact); accepted lengths differ by
    little, since the best path mostly stays in column 0 (-0.3 to +0.4 %, `benchmarks/results/eagle_ancestors.md`).

    Attributes:
      draft: the head.
      num_steps, topk, num_draft_tokens: SGLang's parameters, resolved.
      window, sink: how far back the head attends, and how many leading positions it sees regardless; None for all.
      sampled: draw chains from the draft's distribution and keep it, for rejection sampling and block verification.
      static_tree: EAGLE-1's fixed tree in place of the dynamic one.
    """

    draft: EagleConfig
    num_steps: int
    topk: int
    num_draft_tokens: int
    window: int | None = None
    sink: int = 0
    sampled: bool = False
    static_tree: StaticTree | None = None

    @property
    def name(self) -> str:
        """The algorithm's name."""
        return self.draft.algorithm

    @property
    def taps(self) -> tuple[int, ...]:
        """What the checkpoint was trained on."""
        return self.draft.taps

    @property
    def lookahead(self) -> int:
        """A pair needs the token behind its feature."""
        return 1

    @property
    def key_lookahead(self) -> int:
        """The same token stands in the pair's keys and values."""
        return 1

    @property
    def slack(self) -> int:
        """The tree's nodes in the target's cache, or the beams of all levels but the last in the head's."""
        scratch = self.topk * (self.num_steps - 1) if self.static_tree is None else self.static_tree.num_inner
        return max(self.num_draft_tokens, scratch, 1)

    @property
    def max_accept(self) -> int:
        """A full path and the bonus token."""
        return self.num_steps + 1

    def init(self, params, batch: int, num_pages: int, page_size: int, max_len: int, dtype) -> EagleState:
        """Empty pools; their type is the cache's, that of the recurrent state the head's own."""
        del max_len
        c = self.draft.layers
        pools = init_layers(c.num_layers, num_pages, page_size, c.num_kv_heads, c.head_dim, c.head_dim, dtype)
        return EagleState(pools, jnp.zeros((batch, c.hidden_size), eagle_model.compute_dtype(params)))

    def prefill(self, params, state, ctx: RoundContext, tokens, following, features, n_valid):
        """Feeds the chunk's pairs: its tokens shifted by one, the token behind the chunk last."""
        order = jnp.arange(tokens.shape[1])[None]
        shifted = jnp.where(order == n_valid[:, None] - 1, following[:, :1], jnp.roll(tokens, -1, axis=1))
        return self.feed(params, state, ctx, shifted, features, n_valid)

    def update(self, params, state, ctx: RoundContext, accepted, features, n_accepted):
        """Draft extend: the pairs that the round committed."""
        return self.feed(params, state, ctx, accepted, features, n_accepted)

    def feed(
        self, params, state: EagleState, ctx: RoundContext, tokens: Int[Array, "B T"], features, count: Int[Array, " B"]
    ) -> EagleState:
        """Runs the first `count` pairs behind the committed ones and keeps the state of the last."""
        T = tokens.shape[1]
        base = ctx.cache.length
        valid = jnp.arange(T)[None] < count[:, None]
        hidden = eagle_model.project(params, self.draft, features)
        out, layers = self.run(params, ctx, tokens, hidden, state.layers, base[:, None] + jnp.arange(T), valid)
        last = jnp.take_along_axis(out, jnp.maximum(count - 1, 0)[:, None, None], 1)[:, 0]
        return EagleState(layers, jnp.where((count > 0)[:, None], last.astype(state.hidden.dtype), state.hidden))

    def run(
        self,
        params,
        ctx: RoundContext,
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T E"],
        layers: tuple[LayerKV, ...],
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        inflight_positions: Int[Array, "B M"] | None = None,
        visible: UInt32[Array, "B T W"] | None = None,
    ) -> tuple[Float[Array, "B T E"], tuple[LayerKV, ...]]:
        """One step of the head over the paged cache; arguments as for `models.paged.paged_forward`."""
        alone = is_alone(tokens)
        if alone:
            tokens = jnp.broadcast_to(tokens, (1, 2))
            hidden, positions, valid, inflight_positions, visible = beside_nothing(
                hidden, positions, valid, inflight_positions, visible
            )
        cache, page_size = ctx.cache, layers[0].k.shape[1]
        attend = PagedAttend.behind(
            cache.page_table, cache.length, page_size, positions, valid, inflight_positions, visible, sink=self.sink
        )
        embedding = eagle_model.embed(params, self.draft, ctx.params, tokens)
        out, layers = eagle_model.step(params, self.draft, embedding, hidden, positions, attend, layers, self.window)
        return out[:, :1] if alone else out, layers

    def logits(self, params, ctx: RoundContext, hidden: Float[Array, "*R E"]) -> Float[Array, "*R Vd"]:
        """Draft logits behind recurrent states; straight from the product, which saves the kernel that would convert them."""
        return eagle_model.logits(params, self.draft, ctx.params, ctx.config, hidden, exact=True)

    def best(self, params, ctx: RoundContext, hidden: Float[Array, "*R E"], k: int) -> tuple[Array, Array]:
        """The k most probable continuations as target ids (temperature 1, as SGLang drafts)."""
        probs, ids = top_k_probabilities(self.logits(params, ctx, hidden), k)
        return probs, eagle_model.to_target_ids(params, self.draft, ids)

    def propose(self, params, state: EagleState, ctx: RoundContext) -> Proposal:
        """Grows the tree; level i's pairs stand at position length + i, their entries behind the committed ones."""
        if self.sampled and ctx.sampling.any_sampled:
            tree, layers = self.grow_sampled(params, state, ctx)
        elif self.static_tree is not None:
            tree, layers = self.grow_static(params, state, ctx)
        else:
            tree, layers = self.grow(params, state, ctx)
        return self.proposal(tree, EagleState(layers, state.hidden), ctx)

    def level(
        self, params, ctx: RoundContext, level: int, tokens, parent, visible, levels: tuple[int, ...], aux: tuple
    ) -> tuple[Float[Array, "B T E"], tuple]:
        """Runs one level's nodes: each is fed its parent's state and sees the entries `visible`, which lie at `levels`."""
        layers, hidden = aux
        base = ctx.cache.length[:, None]
        hidden = jnp.take_along_axis(hidden, parent[..., None], 1)
        positions = jnp.broadcast_to(base + level, tokens.shape)
        valid = jnp.broadcast_to(ctx.active[:, None], tokens.shape)
        out, layers = self.run(params, ctx, tokens, hidden, layers, positions, valid, base + jnp.array(levels), visible)
        return out, (layers, out)

    def grow(self, params, state: EagleState, ctx: RoundContext) -> tuple[DraftTree, tuple[LayerKV, ...]]:
        """EAGLE-2's dynamic tree."""
        k = self.topk

        def expand(level: int, tokens, parent, visible, aux):
            levels = tuple(i for i in range(level + 1) for _ in range(k))
            out, aux = self.level(params, ctx, level, tokens, parent, visible, levels, aux)
            return *self.best(params, ctx, out, k), aux

        probs, ids = self.best(params, ctx, state.hidden, k)
        tree, (layers, _) = grow(
            ctx.bonus,
            probs,
            ids,
            expand,
            (state.layers, state.hidden[:, None]),
            num_steps=self.num_steps,
            topk=k,
            num_draft_tokens=self.num_draft_tokens,
        )
        return tree, layers

    def grow_static(self, params, state: EagleState, ctx: RoundContext) -> tuple[DraftTree, tuple[LayerKV, ...]]:
        """EAGLE-1's fixed tree."""
        ranks = self.static_tree.num_ranks

        def expand(level: int, tokens, parent, visible, levels, aux):
            out, aux = self.level(params, ctx, level, tokens, parent, visible, levels, aux)
            return self.best(params, ctx, out, ranks)[1], aux

        _, first = self.best(params, ctx, state.hidden, ranks)
        tree, (layers, _) = grow_static(ctx.bonus, first, expand, (state.layers, state.hidden[:, None]), self.static_tree)
        return tree, layers

    def grow_sampled(self, params, state: EagleState, ctx: RoundContext) -> tuple[DraftTree, tuple[LayerKV, ...]]:
        """A chain drawn from the head's distribution."""
        batch = ctx.bonus.shape[0]
        zero = jnp.zeros((batch, 1), jnp.int32)

        def extend(level: int, token, aux):
            visible = pack_bits(jnp.ones((batch, 1, level + 1), bool))
            out, aux = self.level(params, ctx, level, token[:, None], zero, visible, tuple(range(level + 1)), aux)
            return self.logits(params, ctx, out[:, 0]), aux

        tree, (layers, _) = sampled_chain(
            ctx.bonus,
            self.logits(params, ctx, state.hidden),
            extend,
            (state.layers, state.hidden[:, None]),
            ctx.keys,
            ctx.sampling,
            num_steps=self.num_steps,
            vocab_size=ctx.config.vocab_size,
            target_ids=params["target_ids"] if self.draft.reduced_vocab else None,
        )
        return tree, layers


LARGE_TREE_FAMILIES = ("llama", "grok")


def resolve(spec: SpecConfig, config: ModelConfig, draft) -> SpecConfig:
    """SGLang's defaults 5/4/8 for Llama and Grok targets, 3/1/4 for others; a static tree settles all three itself.

    Raises:
      ConfigError: see `jaxspec.config.resolve_tree`; or the parameters contradict the static tree.
    """
    del draft
    tree = spec.options.static_tree
    if tree is None:
        sampled = spec.verification != "target_only"
        default = (5, 4, 8) if config.family in LARGE_TREE_FAMILIES and not sampled else (3, 1, 4)
        return resolve_tree(spec, default, "EAGLE")
    own = {"num_steps": tree.max_depth, "topk": tree.num_ranks, "num_draft_tokens": len(tree.paths) + 1}
    for name, value in own.items():
        if getattr(spec, name) not in (None, value):
            raise ConfigError(f"{name}={getattr(spec, name)} contradicts the static tree, which has {name}={value}")
    return dataclasses.replace(spec, **own)


def build(target, draft, spec: SpecConfig) -> tuple[EagleDrafter, dict]:
    """The drafter and its parameters.

    Args:
      target: the target's `ModelParams`.
      draft: `DraftParams` with an `EagleConfig`.
      spec: from `resolve`.

    Raises:
      ConfigError: the head was made for another target, or the tree is wider than the draft's vocabulary.
    """
    options: EagleOptions = spec.options
    draft = apply_token_map(draft, target, options.token_map) if options.token_map is not None else draft
    config = draft.config
    check_target(config, target.config)
    if spec.topk > config.draft_vocab_size:
        raise ConfigError(f"topk={spec.topk} exceeds the draft's vocabulary of {config.draft_vocab_size} tokens")
    drafter = EagleDrafter(
        draft=config,
        num_steps=spec.num_steps,
        topk=spec.topk,
        num_draft_tokens=spec.num_draft_tokens,
        window=options.draft_window_size,
        sink=options.draft_sink_size,
        sampled=spec.verification != "target_only",
        static_tree=options.static_tree,
    )
    return drafter, draft.tree
