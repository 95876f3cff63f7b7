"""MTP ("NEXTN"): multi-token-prediction layers that were trained with the target draft from its own hidden states.

Pair p = (target feature at position p, token at p + 1) stands at position p, as for EAGLE: the layers' cache covers
positions 0 … L-1 when the target's does and the bonus token x_L is known. There are two ways to draft:

* One layer, used for every step (DeepSeek-V3, MiMo, Qwen3-Next): step i > 1 is fed the state of the step before at position
  L + i - 2. Chains and EAGLE-2 trees. A checkpoint with several layers is used so too when a tree or a sampled chain
  (rejection sampling) is asked for: then layer 0 serves every step.
* Several layers, one per step (DeepSeek-V3, section 2.2; SGLang's multi-layer EAGLE): layer s reads (state of layer s - 1 at
  position p, token at p + 1 + s), so as many drafts as there are layers come out of the catch-up pass itself and the round
  has no further draft forward. Chains; with fewer steps than layers the first ones serve. With more, the layers serve in
  turn (step s is layer s modulo their number, as in vLLM): what they drafted is fed to them once more like committed pairs,
  the states of the steps in place of the target's features, and stays in the caches until the next catch-up pass.

In the second way the last rows of layer s > 0 are computed with drafted tokens. They are computed again, with the true
tokens, together with the next chunk or round: the state remembers the features of the last positions, one fewer than there
are layers in use. So a prompt chunk needs one token of look-ahead here too, not one for each layer.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.config import ConfigError, ModelConfig, SpecConfig, resolve_tree
from jaxspec.drafters.base import Drafter, Proposal, RoundContext
from jaxspec.drafters.mtp import model as mtp_model
from jaxspec.drafters.mtp.config import MtpConfig
from jaxspec.kvcache import LayerKV, init_layers
from jaxspec.models.attend import PagedAttend
from jaxspec.trees.sampled_chain import sampled_chain
from jaxspec.trees.tree import DraftTree, chain, grow, pack_bits
from pallas_kernels.vocabulary.api import top_k


class MtpState(NamedTuple):
    """Pools of the layers in use, which share the target's page table, and what drafting starts from.

    Attributes:
      layers: one pool per layer in use.
      hidden: of each layer in use, the state that the next step is fed, at the last committed pair.
      drafts: the tokens that they draft (one layer per step; else empty).
      memory: features of the last R committed positions, newest last (one layer per step; else R = 0).
      remembered: how many of them are real: a row that joined behind a shared prefix has none of its own yet.
    """

    layers: tuple[LayerKV, ...]
    hidden: Float[Array, "B J E"]
    drafts: Int[Array, "B J"]
    memory: Float[Array, "B R E"]
    remembered: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class MtpDrafter(Drafter):
    """Drafts a chain or an EAGLE-2 tree: num_steps levels, topk beams, num_draft_tokens nodes with the root.

    Attributes:
      draft: the MTP layers.
      num_steps, topk, num_draft_tokens: SGLang's parameters, resolved.
      layer_per_step: whether the layers serve the steps in turn (see the module's docstring).
      window, sink: how far back the layers attend, and how many leading positions they see regardless; None for all.
      sampled: draw chains from the draft's distribution and keep it, for rejection sampling and block verification.
      most_steps: with a layer per step, so many of them are kept up to date even if num_steps is less.
    """

    draft: MtpConfig
    num_steps: int
    topk: int
    num_draft_tokens: int
    layer_per_step: bool = False
    window: int | None = None
    sink: int = 0
    sampled: bool = False
    most_steps: int = 0
    name: ClassVar[str] = "NEXTN"

    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden half of a pair."""
        return (self.draft.feature_tap,)

    @property
    def lookahead(self) -> int:
        """A pair needs the token behind its feature."""
        return 1

    @property
    def num_used(self) -> int:
        """Layers in use."""
        return min(max(self.num_steps, self.most_steps), self.draft.num_layers) if self.layer_per_step else 1

    @property
    def key_lookahead(self) -> int:
        """Layer s reads the token at p + 1 + s."""
        return self.num_used

    @property
    def separate_blocks(self) -> bool:
        """The last rows of later layers are computed with drafts and repaired from the memory that the state holds."""
        return self.num_used == 1

    @property
    def slack(self) -> int:
        """The tree's nodes in the target's cache, or the beams of all levels but the last in the layer's."""
        return max(self.num_draft_tokens, self.topk * (self.num_steps - 1), 1)

    @property
    def max_accept(self) -> int:
        """A full path and the bonus token."""
        return self.num_steps + 1

    def init(self, params, batch: int, num_pages: int, page_size: int, max_len: int, dtype) -> MtpState:
        """Empty pools; their type is the cache's, that of the hidden state the layers' own."""
        del max_len
        c, dtype_of_state = self.draft.layers, mtp_model.compute_dtype(params)
        used = self.num_used
        pools = init_layers(used, num_pages, page_size, c.num_kv_heads, c.key_head_dim, c.value_head_dim, dtype)
        return MtpState(
            layers=pools,
            hidden=jnp.zeros((batch, used, c.hidden_size), dtype_of_state),
            drafts=jnp.zeros((batch, used if self.layer_per_step else 0), jnp.int32),
            memory=jnp.zeros((batch, used - 1, c.hidden_size), dtype_of_state),
            remembered=jnp.zeros(batch, jnp.int32),
        )

    def prefill(self, params, state, ctx: RoundContext, tokens, following, features, n_valid) -> MtpState:
        """Feeds the chunk's pairs: its tokens shifted by one, the token behind the chunk last."""
        order = jnp.arange(tokens.shape[1])[None]
        shifted = jnp.where(order == n_valid[:, None] - 1, following[:, :1], jnp.roll(tokens, -1, axis=1))
        return self.feed(params, state, ctx, shifted, features, n_valid)

    def update(self, params, state, ctx: RoundContext, accepted, features, n_accepted) -> MtpState:
        """Draft extend: the pairs that the round committed."""
        return self.feed(params, state, ctx, accepted, features, n_accepted)

    def feed(
        self,
        params,
        state: MtpState,
        ctx: RoundContext,
        tokens: Int[Array, "B T"],
        features: Float[Array, "B T E"],
        count: Int[Array, " B"],
    ) -> MtpState:
        """Runs the first `count` pairs behind the committed ones, and the remembered ones before them once more.

        Args:
          tokens: tokens[:, i] stands at position length + 1 + i.
          features: features[:, i] belongs to position length + i.
          count: 0 leaves the row's state as it is.
        """
        R, T = state.memory.shape[1], tokens.shape[1]
        base = ctx.cache.length - state.remembered
        fed = count > 0
        last = jnp.where(fed, state.remembered + count - 1, -1)[:, None]
        order = jnp.arange(R + T)[None]
        valid, positions = order <= last, base[:, None] + order

        before = jnp.maximum(ctx.cache.length[:, None] - R + 1 + jnp.arange(R), 0)
        source = jnp.minimum(order + R - state.remembered[:, None], R + T - 1)
        ids = jnp.concatenate([jnp.take_along_axis(ctx.tokens, before, 1), tokens], 1)
        ids = jnp.take_along_axis(ids, source, 1)
        features = jnp.concatenate([state.memory, features.astype(state.memory.dtype)], 1)
        features = jnp.take_along_axis(features, source[..., None], 1)

        hidden, layers, finals, drafts = features, [], [], []
        for i, pool in enumerate(state.layers):
            out = self.run(params, ctx, i, ids, hidden, pool, base, positions, valid)
            layers.append(out.cache)
            final = jnp.take_along_axis(self.recycled(out), jnp.maximum(last, 0)[..., None], 1)[:, 0]
            finals.append(final)
            if self.layer_per_step:
                draft = self.best(params, ctx, i, final, 1)[1]
                drafts.append(draft)
                ids = jnp.where(order == last, draft, jnp.roll(ids, -1, axis=1))
            hidden = self.recycled(out) if self.draft.chain_states else features

        newest = jnp.clip(last - R + 1 + jnp.arange(R), 0)
        return MtpState(
            layers=tuple(layers),
            hidden=jnp.where(fed[:, None, None], jnp.stack(finals, 1), state.hidden),
            drafts=jnp.where(fed[:, None], jnp.concatenate(drafts, 1), state.drafts) if drafts else state.drafts,
            memory=jnp.where(fed[:, None, None], jnp.take_along_axis(features, newest[..., None], 1), state.memory),
            remembered=jnp.where(fed, jnp.minimum(last[:, 0] + 1, R), state.remembered),
        )

    def run(
        self,
        params,
        ctx: RoundContext,
        layer: int,
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T E"],
        pool: LayerKV,
        base: Int[Array, " B"],
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        inflight_positions: Int[Array, "B M"] | None = None,
        visible: UInt32[Array, "B T W"] | None = None,
    ) -> mtp_model.Step:
        """One layer over the paged cache; the other arguments as for `models.paged.paged_forward`."""
        table, page_size = ctx.cache.page_table, pool.k.shape[1]
        attend = PagedAttend.behind(table, base, page_size, positions, valid, inflight_positions, visible, sink=self.sink)
        embedding = mtp_model.embed(params, self.draft, ctx.params, ctx.config, tokens, positions)
        return mtp_model.step(params, self.draft, layer, embedding, hidden, positions, attend, pool, self.window)

    def recycled(self, out: mtp_model.Step) -> Float[Array, "B T E"]:
        """What a further step is fed."""
        return out.normed if self.draft.recycle_normed else out.raw

    def logits(self, params, ctx: RoundContext, layer: int, hidden: Float[Array, "*R E"]) -> Float[Array, "*R V"]:
        """Next-token logits behind recycled states of a layer."""
        return mtp_model.logits(params, self.draft, layer, ctx.params, ctx.config, hidden)

    def best(self, params, ctx: RoundContext, layer: int, hidden: Float[Array, "*R E"], k: int) -> tuple[Array, Array]:
        """The k most probable tokens behind recycled states of a layer (temperature 1, as SGLang drafts)."""
        return top_k(jax.nn.softmax(self.logits(params, ctx, layer, hidden), axis=-1), k)

    def propose(self, params, state: MtpState, ctx: RoundContext) -> Proposal:
        """The chain that the catch-up pass drafted, or what is drafted now, whose entries `update` overwrites."""
        if self.layer_per_step:
            drafts, layers = self.in_turn(params, state, ctx)
            tree = chain(jnp.concatenate([ctx.bonus[:, None], drafts[:, : self.num_steps]], 1))
            return self.proposal(tree, state._replace(layers=layers), ctx)
        grow_tree = self.grow_sampled if self.sampled and ctx.sampling.any_sampled else self.grow
        tree, pool = grow_tree(params, state, ctx)
        return self.proposal(tree, state._replace(layers=(pool,)), ctx)

    def in_turn(self, params, state: MtpState, ctx: RoundContext) -> tuple[Int[Array, "B n"], tuple[LayerKV, ...]]:
        """At least num_steps drafts: those of the catch-up pass, then those of the layers fed with what they drafted."""
        batch, used = state.drafts.shape
        row, count = jnp.arange(batch)[:, None], jnp.where(ctx.active, used, 0)
        drafts = [state.drafts]
        while len(drafts) * used < self.num_steps:
            state = self.feed(params, state, ctx, state.drafts, state.hidden, count)
            following = ctx.cache.length[:, None] + 1 + jnp.arange(used)
            tokens = ctx.tokens.at[row, following].set(drafts[-1], mode="drop")
            length = ctx.cache.length + used
            ctx = dataclasses.replace(ctx, tokens=tokens, cache=dataclasses.replace(ctx.cache, length=length))
            drafts.append(state.drafts)
        return jnp.concatenate(drafts, 1), state.layers

    def level(self, params, ctx: RoundContext, level: int, tokens, parent, visible, aux: tuple) -> tuple[Array, tuple]:
        """Runs one level's beams with layer 0: each is fed its parent's state and sees the entries `visible`."""
        pool, hidden = aux
        base, (batch, k) = ctx.cache.length, tokens.shape
        hidden = jnp.take_along_axis(hidden, parent[..., None], 1)
        entries = base[:, None] + jnp.arange((level + 1) * k)[None] // k
        positions = jnp.broadcast_to(base[:, None] + level, (batch, k))
        valid = jnp.broadcast_to(ctx.active[:, None], (batch, k))
        out = self.run(params, ctx, 0, tokens, hidden, pool, base, positions, valid, entries, visible)
        recycled = self.recycled(out)
        return recycled, (out.cache, recycled)

    def grow(self, params, state: MtpState, ctx: RoundContext) -> tuple[DraftTree, LayerKV]:
        """EAGLE-2's dynamic tree, or its chain for one beam."""

        def expand(level: int, tokens, parent, visible, aux):
            hidden, aux = self.level(params, ctx, level, tokens, parent, visible, aux)
            return *self.best(params, ctx, 0, hidden, self.topk), aux

        probs, ids = self.best(params, ctx, 0, state.hidden[:, 0], self.topk)
        tree, (pool, _) = grow(
            ctx.bonus,
            probs,
            ids,
            expand,
            (state.layers[0], state.hidden),
            num_steps=self.num_steps,
            topk=self.topk,
            num_draft_tokens=self.num_draft_tokens,
        )
        return tree, pool

    def grow_sampled(self, params, state: MtpState, ctx: RoundContext) -> tuple[DraftTree, LayerKV]:
        """A chain drawn from the layer's distribution."""
        batch = ctx.bonus.shape[0]
        zero = jnp.zeros((batch, 1), jnp.int32)

        def extend(level: int, token, aux):
            visible = pack_bits(jnp.ones((batch, 1, level + 1), bool))
            hidden, aux = self.level(params, ctx, level, token[:, None], zero, visible, aux)
            return self.logits(params, ctx, 0, hidden[:, 0]), aux

        tree, (pool, _) = sampled_chain(
            ctx.bonus,
            self.logits(params, ctx, 0, state.hidden[:, 0]),
            extend,
            (state.layers[0], state.hidden),
            ctx.keys,
            ctx.sampling,
            num_steps=self.num_steps,
            vocab_size=ctx.config.vocab_size,
        )
        return tree, pool


def resolve(spec: SpecConfig, config: ModelConfig, draft) -> SpecConfig:
    """num_steps/topk/num_draft_tokens 3/1/4 unless all are given, however many MTP layers there are.

    Raises ConfigError: see `jaxspec.config.resolve_tree`.
    """
    del config, draft
    return resolve_tree(spec, (3, 1, 4), "NEXTN")


def build(target, draft, spec: SpecConfig) -> tuple[MtpDrafter, dict]:
    """The drafter for MTP layers: `draft`, or those that came with the target.

    Raises:
      ConfigError: the target has none, or they belong to another model.
    """
    if draft is None:
        draft = next((d for d in target.drafts.values() if isinstance(d.config, MtpConfig)), None)
    if draft is None:
        raise ConfigError(
            f"NEXTN needs a target with MTP layers in its checkpoint ({target.config.family} has none here), or such layers "
            "as draft=…"
        )
    if not isinstance(draft.config, MtpConfig):
        raise ConfigError(f"NEXTN needs MTP layers; the given draft is {draft!r}")
    layers = draft.config.layers
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(target.config, name), getattr(layers, name)
        if ours != theirs:
            raise ConfigError(f"these MTP layers belong to another model: their {name} is {theirs}, the target's {ours}")
    sampled = spec.verification != "target_only"
    drafter = MtpDrafter(
        draft=draft.config,
        num_steps=spec.num_steps,
        topk=spec.topk,
        num_draft_tokens=spec.num_draft_tokens,
        layer_per_step=spec.topk == 1 and layers.num_layers > 1 and not sampled,
        window=spec.options.draft_window_size,
        sink=spec.options.draft_sink_size,
        sampled=sampled,
    )
    return drafter, draft.tree
