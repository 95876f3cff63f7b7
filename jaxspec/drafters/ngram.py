"""NGRAM: drafts copied from the request's own text, from earlier outputs and from external corpora; no draft model."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.drafters.base import Drafter, Proposal, RoundContext
from jaxspec.drafters.ngram_config import NgramConfig
from jaxspec.drafters.ngram_history import NgramHistory, corpus_share
from jaxspec.drafters.ngram_lookup import (
    CorpusArrays,
    TrieArrays,
    build_tree,
    chain_candidates,
    corpus_candidates,
    export_corpus,
    export_trie,
    find_anchors,
    grow_anchors,
    join,
    keep_first,
    reorder,
)
from jaxspec.drafters.ngram_match import match_own_tokens
from jaxspec.tree import DraftTree, chain

DEFAULT_NUM_DRAFT_TOKENS = 12


@partial(jax.tree_util.register_dataclass, data_fields=["trie", "corpora"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class NgramState:
    """Earlier outputs and corpora on the device.

    The one exception to the rule that every leaf of a state has the batch in front or is a page pool: these arrays are
    shared by all sequences and never written by a program, so that moving rows leaves them alone.
    """

    trie: TrieArrays
    corpora: tuple[CorpusArrays, ...]


def device_state(history: NgramHistory | None, config: NgramConfig) -> NgramState:
    """A history's contents on the device, fresh arrays at each call (a program may take over their memory)."""
    corpora = () if history is None else tuple(corpus for _, corpus in sorted(history.corpora.items()))
    state = NgramState(
        trie=export_trie(None if history is None else history.trie, config),
        corpora=tuple(export_corpus(corpus) for corpus in corpora),
    )
    return jax.tree.map(lambda x: jnp.array(x, copy=True), state)


@dataclasses.dataclass(frozen=True)
class NgramDrafter(Drafter):
    """Proposes what followed earlier occurrences of the text's last tokens.

    Without `use_trie` the tree is one chain, the continuation of the longest match in the request's own text, so that
    accepted KV never moves; the state is empty. With it, the state is an `NgramState`.
    """

    name: ClassVar[str] = "NGRAM"
    num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS
    config: NgramConfig = NgramConfig()
    use_trie: bool = False

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

    def init(self, params, batch: int, num_pages: int, page_size: int, max_len: int, dtype):
        """An empty trie, or nothing; `refresh` fills it."""
        del params, batch, num_pages, page_size, max_len, dtype
        return device_state(None, self.config) if self.use_trie else ()

    def propose(self, params, state, ctx: RoundContext) -> Proposal:
        """Matches on the device; see `propose_tree`."""
        del params
        return self.proposal(propose_tree(self, state, ctx.tokens, ctx.cache.length, ctx.bonus), state, ctx)

    def refresh(self, state, history: NgramHistory | None):
        """Puts the history's present contents into the state. Another number of corpora makes another program."""
        return device_state(history, self.config) if self.use_trie and history is not None else state


def propose_tree(
    drafter: NgramDrafter, state, tokens: Int[Array, "B L"], length: Int[Array, " B"], bonus: Int[Array, " B"]
) -> DraftTree:
    """The tree for texts whose bonus token stands at index `length`: the root alone where nothing matches.

    Matches in the request's own text and in the trie take turns by matched length, longest first, the own text before the
    trie among equals; each takes what those before it left. Corpora have their reserved nodes. Where the request's own text
    holds no match the tree is the trie's own, SGLang's.
    """
    config, count = drafter.config, drafter.num_draft_tokens - 1
    depth, batch = config.max_trie_depth, tokens.shape[0]
    branches = config.own_branches
    paths, matched = match_own_tokens(tokens, length, depth=depth, num_drafts=count, branches=branches)
    if not drafter.use_trie and branches == 1:
        nodes = jnp.concatenate([bonus[:, None], paths[:, 0]], 1)
        return chain(nodes, jnp.broadcast_to(matched[:, :1] > 0, nodes.shape))
    found = chain_candidates(paths, jnp.broadcast_to(matched[..., None] > 0, paths.shape))
    if not drafter.use_trie:
        return build_tree(bonus, found, drafter.num_draft_tokens)

    grown = grow_anchors(state.trie, find_anchors(state.trie, tokens, length, depth), config, count)
    lengths = jnp.concatenate([matched, jnp.broadcast_to(jnp.arange(1, depth + 1), (batch, depth))], 1)
    groups = jnp.argsort(-lengths, axis=1, stable=True)
    order = (groups[..., None] * count + jnp.arange(count)).reshape(batch, -1)
    share = corpus_share(config, len(state.corpora))
    parts = [keep_first(reorder(join([found, grown]), order), count - share * len(state.corpora))]
    for corpus in state.corpora:
        if share:
            parts.append(keep_first(corpus_candidates(corpus, tokens, length, config, count), share))
    return build_tree(bonus, join(parts), drafter.num_draft_tokens)


def ngram_drafter(num_draft_tokens: int, config: NgramConfig, use_trie: bool = False) -> NgramDrafter:
    """The drafter for these parameters. Raises ConfigError where they do not fit each other.

    Args:
      num_draft_tokens: nodes of the tree, root included.
      config: what to match and how wide to branch.
      use_trie: whether an `NgramHistory` will be given to `refresh`; if not, its part is not compiled.
    """
    return NgramDrafter(num_draft_tokens=num_draft_tokens, config=config, use_trie=use_trie)
