"""What outlives a call of `generate`: earlier outputs and external corpora, held on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxspec.config import ConfigError, check_ids
from jaxspec.drafters.ngram.config import NgramConfig
from jaxspec.drafters.ngram.corpus import Corpus, CorpusError, read_jsonl, tokenize
from jaxspec.drafters.ngram.lookup import CorpusArrays, HistoryArrays, TrieArrays, export_corpus
from jaxspec.drafters.ngram.mirror import TrieMirror
from jaxspec.drafters.ngram.trie import MatchTree, NgramTrie


def encoder(tokenizer: Any):
    """Text to token ids without special tokens, from a `tokenizers.Tokenizer`, a transformers tokenizer or a function."""
    if not hasattr(tokenizer, "encode"):
        return tokenizer

    def encode(text: str) -> Sequence[int]:
        result = tokenizer.encode(text, add_special_tokens=False)
        return getattr(result, "ids", result)

    return encode


class NgramHistory:
    """Earlier outputs and corpora that NGRAM drafts may copy from; pass it as ``draft=`` to share them between calls.

    Example:
      >>> history = NgramHistory()
      >>> history.insert([1, 2, 3, 4])
      >>> history.match([9, 2, 3], num_draft_tokens=4).tokens
      [3, 4]
    """

    algorithm: ClassVar[str] = "NGRAM"

    def __init__(self, config: NgramConfig | None = None, tokenizer: Any = None):
        """An empty history, but for the corpus that `config.external_corpus_path` names, which needs the tokenizer."""
        self.config = NgramConfig() if config is None else config
        self.trie = NgramTrie(self.config)
        self.corpora: dict[str, Corpus] = {}
        self._largest = -1  # of the ids that were ever inserted
        self._mirror = TrieMirror(self.trie)
        self._trie_on_device: tuple[int, TrieArrays] | None = None
        self._corpora_on_device: dict[str, tuple[Corpus, CorpusArrays]] = {}
        if self.config.external_corpus_path is not None:
            if tokenizer is None:
                raise ConfigError(f"external_corpus_path={self.config.external_corpus_path!r} needs a tokenizer")
            self.add_corpus(self.config.external_corpus_path, tokenizer)

    def __repr__(self) -> str:
        """Counts, for a person."""
        corpora = ", ".join(f"{name}: {corpus.num_tokens} tokens" for name, corpus in sorted(self.corpora.items()))
        return f"NgramHistory({len(self.trie)} n-grams; corpora: {corpora or 'none'})"

    def insert(self, tokens: Sequence[int]) -> None:
        """Takes in one text: a prompt with its output. Raises ConfigError for a negative id."""
        ids = [int(t) for t in tokens]
        check_ids(ids, 2**31, "the inserted text")
        self.trie.insert(ids)
        self._largest = max(self._largest, max(ids, default=-1))

    def check_ids(self, vocab_size: int) -> None:
        """Raises ConfigError if a text or corpus taken in so far holds an id that a vocabulary of this size does not have."""
        check_ids([self._largest] if self._largest >= 0 else [], vocab_size, "the NgramHistory")
        for name, corpus in sorted(self.corpora.items()):
            check_ids([int(corpus.tokens.max())], vocab_size, f"corpus {name!r}")

    def add_corpus(self, source: str | Path | Iterable[str], tokenizer: Any, corpus_id: str | None = None) -> int:
        """Adds a corpus and returns how many tokens it has.

        Args:
          source: path of a JSONL file (one JSON string a line), or texts.
          tokenizer: a tokenizer, or a function from text to ids.
          corpus_id: a name for `remove_corpus`; the path if there is one, "corpus" otherwise.

        Raises:
          ConfigError: external_sam_budget is smaller than the number of corpora.
          CorpusError: the id is taken, the corpus is empty or too long, or a line is not a JSON string.
        """
        is_path = isinstance(source, str | Path)
        name = corpus_id or (str(source) if is_path else "corpus")
        if name in self.corpora:
            raise CorpusError(f"a corpus with the id {name!r} exists already: remove it first or choose another id")
        if self.config.external_sam_budget <= len(self.corpora):
            raise ConfigError(
                f"external_sam_budget={self.config.external_sam_budget} leaves no draft node for the corpus {name!r}: "
                f"{len(self.corpora) + 1} corpora need at least as many"
            )
        documents = read_jsonl(source) if is_path else source
        tokens = tokenize(documents, encoder(tokenizer), self.config.external_corpus_max_tokens, name)
        self.corpora[name] = Corpus.build(tokens, self.config)
        return self.corpora[name].num_tokens

    def remove_corpus(self, corpus_id: str) -> None:
        """Removes a corpus. Raises CorpusError if there is none of that id."""
        if corpus_id not in self.corpora:
            raise CorpusError(f"no corpus has the id {corpus_id!r}; there are: {', '.join(sorted(self.corpora)) or 'none'}")
        del self.corpora[corpus_id]

    def arrays(self) -> HistoryArrays:
        """The present contents on the device, corpora by id. What has not changed since the last call is the same arrays."""
        if self._trie_on_device is None or self._trie_on_device[0] != self.trie.version:
            self._trie_on_device = (self.trie.version, self._mirror.export())
        there = {}
        for name, corpus in sorted(self.corpora.items()):
            known = self._corpora_on_device.get(name)
            if known is None or known[0] is not corpus:
                known = (corpus, jax.tree.map(jnp.asarray, export_corpus(corpus)))
            there[name] = known
        self._corpora_on_device = there
        return HistoryArrays(self._trie_on_device[1], tuple(arrays for _, arrays in there.values()))

    def match(self, context: Sequence[int], num_draft_tokens: int) -> MatchTree:
        """The draft tree that the host would propose: SGLang's, with nothing of the request's own text but what was inserted.

        Every corpus has an equal part of external_sam_budget, the trie what remains.
        """
        context, budget = [int(t) for t in context], num_draft_tokens - 1
        share = corpus_share(self.config, len(self.corpora))
        tree = self.trie.match(context, budget - share * len(self.corpora))
        for _, corpus in sorted(self.corpora.items()):
            tree.merge(corpus.match(context, share), budget)
        return tree


def corpus_share(config: NgramConfig, num_corpora: int) -> int:
    """Draft nodes that each corpus may take."""
    return config.external_sam_budget // num_corpora if num_corpora else 0
