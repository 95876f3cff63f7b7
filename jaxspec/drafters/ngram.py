"""NGRAM: drafts copied from the request's own text, from earlier outputs and from external corpora; no draft model."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.drafters.base import Drafter, Proposal, RoundContext
from jaxspec.drafters.ngram_config import NgramConfig
from jaxspec.drafters.ngram_match import match_own_tokens
from jaxspec.tree import DraftTree, chain

DEFAULT_NUM_DRAFT_TOKENS = 12


@dataclasses.dataclass(frozen=True)
class NgramDrafter(Drafter):
    """Proposes what followed the longest earlier occurrence of the text's last tokens."""

    name: ClassVar[str] = "NGRAM"
    num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS
    config: NgramConfig = NgramConfig()

    def __post_init__(self):
        self.config.check_num_draft_tokens(self.num_draft_tokens)

    @property
    def slack(self) -> int:
        """A round writes the whole tree behind the committed tokens."""
        return self.num_draft_tokens

    @property
    def max_accept(self) -> int:
        """A tree that is one chain, and the new bonus token."""
        return self.num_draft_tokens

    def propose(self, params, state, ctx: RoundContext) -> Proposal:
        """Matches on the device; see `propose_tree`."""
        del params
        return self.proposal(propose_tree(self, ctx.tokens, ctx.cache.length, ctx.bonus), state, ctx)


def propose_tree(
    drafter: NgramDrafter, tokens: Int[Array, "B L"], length: Int[Array, " B"], bonus: Int[Array, " B"]
) -> DraftTree:
    """The tree for texts whose bonus token stands at index `length`: the root alone where nothing matches."""
    paths, matched = match_own_tokens(
        tokens, length, depth=drafter.config.max_trie_depth, num_drafts=drafter.num_draft_tokens - 1
    )
    nodes = jnp.concatenate([bonus[:, None], paths[:, 0]], 1)
    return chain(nodes, jnp.broadcast_to(matched[:, :1] > 0, nodes.shape))


def ngram_drafter(num_draft_tokens: int, config: NgramConfig, use_trie: bool = False) -> NgramDrafter:
    """The drafter for these parameters. Raises ConfigError where they do not fit each other."""
    del use_trie
    return NgramDrafter(num_draft_tokens=num_draft_tokens, config=config)
