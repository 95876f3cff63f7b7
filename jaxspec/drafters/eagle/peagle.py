"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts all its tokens in one pass.

Behind the last real pair stand slots, one fewer than steps, with a mask token and a learnt hidden vector in place of the
feature. The pass that feeds the accepted pairs carries these slots along, so a round costs one forward of the head.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ConfigError, ModelConfig, SpecConfig, resolve_tree
from jaxspec.drafters.base import Proposal, RoundContext
from jaxspec.drafters.eagle import model as eagle_model
from jaxspec.drafters.eagle.config import check_target
from jaxspec.drafters.eagle.drafter import EagleDrafter
from jaxspec.kvcache import LayerKV
from jaxspec.trees.sampled_chain import sampled_chain
from jaxspec.trees.tree import chain


class PEagleState(NamedTuple):
    """The head's pools, and its outputs at the last committed pair and the mask slots behind it."""

    layers: tuple[LayerKV, ...]
    hidden: Float[Array, "B num_steps E"]


@dataclasses.dataclass(frozen=True)
class PEagleDrafter(EagleDrafter):
    """Drafts a chain of num_steps tokens from one pass.

    Attributes:
      most_steps: steps that the pass and the state are made for, num_steps or more; 0: num_steps.
    """

    most_steps: int = 0

    @property
    def num_kept(self) -> int:
        """Outputs that the state keeps."""
        return max(self.most_steps, self.num_steps)

    @property
    def slack(self) -> int:
        """The tree's nodes in the target's cache, or the mask slots in the head's."""
        return max(super().slack, self.num_kept)

    def init(self, params, batch: int, num_pages: int, page_size: int, max_len: int, dtype) -> PEagleState:
        """Empty pools."""
        state = super().init(params, batch, num_pages, page_size, max_len, dtype)
        return PEagleState(state.layers, jnp.repeat(state.hidden[:, None], self.num_kept, axis=1))

    def feed(
        self, params, state: PEagleState, ctx: RoundContext, tokens: Int[Array, "B T"], features, count: Int[Array, " B"]
    ) -> PEagleState:
        """Runs the first `count` pairs and the mask slots behind them, and keeps what the next proposal needs.

        The slots' entries lie behind the committed ones, where the next pass overwrites them. A row whose text goes on in
        another row of this program has no slots: that row's pairs stand there.
        """
        batch, T = tokens.shape
        masks = self.num_kept - 1
        order = jnp.broadcast_to(jnp.arange(T + masks), (batch, T + masks))
        is_pair = order < count[:, None]
        tokens = jnp.where(is_pair, jnp.pad(tokens, ((0, 0), (0, masks))), self.draft.mask_token_id)
        mask_hidden = eagle_model.project(params, self.draft, params["mask_hidden"][None, None])
        hidden = jnp.pad(eagle_model.project(params, self.draft, features), ((0, 0), (0, masks), (0, 0)))
        hidden = jnp.where(is_pair[..., None], hidden, mask_hidden)
        ends = count > 0 if ctx.continued is None else (count > 0) & ~ctx.continued
        valid = is_pair | (ends[:, None] & (order < count[:, None] + masks))
        out, layers = self.run(params, ctx, tokens, hidden, state.layers, ctx.cache.length[:, None] + order, valid)
        rows = jnp.maximum(count - 1, 0)[:, None] + jnp.arange(self.num_kept)
        last = jnp.take_along_axis(out, rows[..., None], 1).astype(state.hidden.dtype)
        return PEagleState(layers, jnp.where((count > 0)[:, None, None], last, state.hidden))

    def propose(self, params, state: PEagleState, ctx: RoundContext) -> Proposal:
        """Reads the chain off the kept outputs."""
        logits = self.logits(params, ctx, state.hidden[:, : self.num_steps])
        if self.sampled and ctx.sampling.any_sampled:
            tree, _ = sampled_chain(
                ctx.bonus,
                logits[:, 0],
                lambda level, token, aux: (logits[:, level + 1], aux),
                None,
                ctx.keys,
                ctx.sampling,
                num_steps=self.num_steps,
                vocab_size=ctx.config.vocab_size,
                target_ids=params["target_ids"] if self.draft.reduced_vocab else None,
            )
        else:
            ids = eagle_model.to_target_ids(params, self.draft, jnp.argmax(logits, -1).astype(jnp.int32))
            tree = chain(jnp.concatenate([ctx.bonus[:, None], ids], 1))
        return self.proposal(tree, state, ctx)


def resolve(spec: SpecConfig, config: ModelConfig, draft) -> SpecConfig:
    """A chain of five drafts unless the parameters say otherwise.

    Raises:
      ConfigError: topk is not 1.
    """
    del config, draft
    resolved = resolve_tree(spec, (5, 1, 6), "PEAGLE")
    if resolved.topk != 1:
        raise ConfigError(f"a parallel EAGLE head drafts a chain: topk={resolved.topk} must be 1")
    return resolved


def build(target, draft, spec: SpecConfig) -> tuple[PEagleDrafter, dict]:
    """The drafter and its parameters; arguments and errors as for `jaxspec.drafters.eagle.drafter.build`."""
    check_target(draft.config, target.config)
    drafter = PEagleDrafter(
        draft=draft.config,
        num_steps=spec.num_steps,
        topk=1,
        num_draft_tokens=spec.num_draft_tokens,
        window=spec.options.draft_window_size,
        sink=spec.options.draft_sink_size,
        sampled=spec.verification != "target_only",
    )
    return drafter, draft.tree
