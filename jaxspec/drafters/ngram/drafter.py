"""NGRAM: drafts copied from the request's own text, from earlier outputs and from external corpora; no draft model."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.config import ConfigError, ModelConfig, SpecConfig
from jaxspec.drafters.base import Drafter, Proposal, RoundContext
from jaxspec.drafters.ngram.config import NgramConfig
from jaxspec.drafters.ngram.history import NgramHistory, corpus_share
from jaxspec.drafters.ngram.lookup import (
    HistoryArrays,
    build_tree,
    chain_candidates,
    corpus_candidates,
    find_anchors,
    grow_anchors,
    join,
    keep_first,
    reorder,
)
from jaxspec.drafters.ngram.match import match_own_tokens
from jaxspec.trees.tree import DraftTree, chain

DEFAULT_NUM_DRAFT_TOKENS = 12


@dataclasses.dataclass(frozen=True)
class NgramDrafter(Drafter):
    """Proposes what followed earlier occurrences of the text's last tokens.

    Its parameters are the history's `HistoryArrays`, which the host replaces between programs, or None. Without a history
    the tree is one chain, the continuation of the longest match in the request's own text, so that accepted KV never moves.
    There is no state.
    """

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

    def propose(self, params: HistoryArrays | None, state, ctx: RoundContext) -> Proposal:
        """Matches on the device; see `propose_tree`."""
        return self.proposal(propose_tree(self, params, ctx.tokens, ctx.cache.length, ctx.bonus), state, ctx)


def propose_tree(
    drafter: NgramDrafter,
    history: HistoryArrays | None,
    tokens: Int[Array, "B L"],
    length: Int[Array, " B"],
    bonus: Int[Array, " B"],
) -> DraftTree:
    """The tree for texts whose bonus token stands at index `length`: the root alone where nothing matches.

    Matches in the request's own text and in the trie take turns by matched length, longest first, the own text before the
    trie among equals; each takes what those before it left. Corpora have their reserved nodes. Where the request's own text
    holds no match the tree is the trie's own, SGLang's.
    """
    config, count = drafter.config, drafter.num_draft_tokens - 1
    depth, batch = config.max_trie_depth, tokens.shape[0]
    path, matched = match_own_tokens(tokens, length, depth=depth, num_drafts=count)
    valid = jnp.broadcast_to(matched[:, None] > 0, path.shape)
    if history is None:
        nodes = jnp.concatenate([bonus[:, None], path], 1)
        return chain(nodes, jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True))

    found = chain_candidates(path[:, None], valid[:, None])
    grown = grow_anchors(history.trie, find_anchors(history.trie, tokens, length, depth), config, count)
    lengths = jnp.concatenate([matched[:, None], jnp.broadcast_to(jnp.arange(1, depth + 1), (batch, depth))], 1)
    groups = jnp.argsort(-lengths, axis=1, stable=True)
    order = (groups[..., None] * count + jnp.arange(count)).reshape(batch, -1)
    share = corpus_share(config, len(history.corpora))
    parts = [keep_first(reorder(join([found, grown]), order), count - share * len(history.corpora))]
    for corpus in history.corpora:
        if share:
            parts.append(keep_first(corpus_candidates(corpus, tokens, length, config, count), share))
    return build_tree(bonus, join(parts), drafter.num_draft_tokens)


def resolve(spec: SpecConfig, config: ModelConfig, draft: NgramHistory | None) -> SpecConfig:
    """num_draft_tokens is 12 unless given; a given history brings its own options.

    Raises ConfigError where they contradict those of `spec`, or where num_draft_tokens does not fit them.
    """
    del config
    options = spec.options
    if draft is not None and options != draft.config:
        if options != NgramConfig():
            raise ConfigError(f"the options are {options}, those of the given NgramHistory {draft.config}: leave options out")
        options = draft.config
    nodes = DEFAULT_NUM_DRAFT_TOKENS if spec.num_draft_tokens is None else spec.num_draft_tokens
    options.check_num_draft_tokens(nodes)
    return dataclasses.replace(spec, num_draft_tokens=nodes, options=options)


def build(target, draft: NgramHistory | None, spec: SpecConfig) -> tuple[NgramDrafter, HistoryArrays | None]:
    """The drafter and the history's present contents as its parameters.

    What has not changed since the last call stays on the device. Another number of corpora, or a corpus of another size,
    makes another program; more or fewer n-grams do not. Without a history, one is made when `spec` names an external corpus.

    Raises ConfigError for a history with ids beyond the target's vocabulary: they come from another tokenizer.
    """
    if draft is None and spec.options.external_corpus_path is not None:
        draft = NgramHistory(spec.options, target.tokenizer)
    if draft is not None:
        draft.check_ids(target.config.vocab_size)
    drafter = NgramDrafter(num_draft_tokens=spec.num_draft_tokens, config=spec.options)
    return drafter, None if draft is None else draft.arrays()
