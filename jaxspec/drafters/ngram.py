"""NGRAM: drafts copied from the request's own text, from earlier outputs and from external corpora; no draft model."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.config import ConfigError, ModelConfig, SpecConfig
from jaxspec.drafters.base import Drafter, Proposal, RoundContext
from jaxspec.drafters.ngram_config import NgramConfig
from jaxspec.drafters.ngram_history import NgramHistory, corpus_share
from jaxspec.drafters.ngram_lookup import (
    CorpusArrays,
    TrieArrays,
    build_tree,
    chain_candidates,
    corpus_candidates,
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


def device_state(history: NgramHistory) -> NgramState:
    """A history's contents on the device, fresh arrays at each call (a program may take over their memory)."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), NgramState(*history.arrays()))


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
        return device_state(NgramHistory(self.config)) if self.use_trie else ()

    def propose(self, params, state, ctx: RoundContext) -> Proposal:
        """Matches on the device; see `propose_tree`."""
        del params
        return self.proposal(propose_tree(self, state, ctx.tokens, ctx.cache.length, ctx.bonus), state, ctx)

    def refresh(self, state, history: NgramHistory | None):
        """Puts the history's present contents into the state. Another number of corpora makes another program.

        Raises ConfigError if the history was made with another configuration, or if the drafter has no use for one.
        """
        if history is None:
            return state
        if not self.use_trie:
            raise ConfigError("an NgramHistory needs a drafter made with use_trie=True")
        if history.config != self.config:
            raise ConfigError(f"the history was made with {history.config}, the drafter with {self.config}: use the same")
        return device_state(history)


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
    path, matched = match_own_tokens(tokens, length, depth=depth, num_drafts=count)
    valid = jnp.broadcast_to(matched[:, None] > 0, path.shape)
    if not drafter.use_trie:
        nodes = jnp.concatenate([bonus[:, None], path], 1)
        return chain(nodes, jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True))

    found = chain_candidates(path[:, None], valid[:, None])
    grown = grow_anchors(state.trie, find_anchors(state.trie, tokens, length, depth), config, count)
    lengths = jnp.concatenate([matched[:, None], jnp.broadcast_to(jnp.arange(1, depth + 1), (batch, depth))], 1)
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


def history(target, draft: NgramHistory | None, spec: SpecConfig) -> NgramHistory | None:
    """The history to draft from: the one given, or a new one when `spec` names an external corpus."""
    if draft is not None or spec.options.external_corpus_path is None:
        return draft
    return NgramHistory(spec.options, target.tokenizer)


def build(target, draft: NgramHistory | None, spec: SpecConfig) -> tuple[NgramDrafter, None]:
    """The drafter, with the trie where there is a history."""
    del target
    return ngram_drafter(spec.num_draft_tokens, spec.options, use_trie=draft is not None), None
