"""Parameters of NGRAM drafting, under SGLang's names and with its defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxspec.config import ConfigError
from jaxspec.drafters.options import DraftOptions

MATCH_TYPES = ("BFS", "PROB")


@dataclass(frozen=True)
class NgramConfig(DraftOptions):
    """What the n-gram drafter matches and how wide it branches.

    Attributes:
      max_trie_depth: the longest stored n-gram and the longest suffix that is looked up, in tokens.
      min_bfs_breadth, max_bfs_breadth: children taken per node: few below a long matched suffix, many below a short one.
      match_type: "BFS" (most recent first) or "PROB" (most frequent first).
      capacity: nodes of the host's trie; when they run out, the least recently used leaves go.
      external_corpus_path: a JSONL file to load at the start, one JSON string a line.
      external_sam_budget: draft nodes reserved for matches in external corpora.
      external_corpus_max_tokens: the most tokens that one corpus may hold.
      device_nodes: trie nodes that are copied to the device, the most recently used ones; a static shape, so that new
        contents never recompile a program.
    """

    flag_prefix: ClassVar[str] = "ngram_"

    max_trie_depth: int = 18
    min_bfs_breadth: int = 1
    max_bfs_breadth: int = 10
    match_type: str = "BFS"
    capacity: int = 10_000_000
    external_corpus_path: str | None = None
    external_sam_budget: int = 0
    external_corpus_max_tokens: int = 10_000_000
    device_nodes: int = 1 << 16

    def __post_init__(self):
        object.__setattr__(self, "match_type", str(self.match_type).upper())
        if self.match_type not in MATCH_TYPES:
            raise ConfigError(f"match_type={self.match_type!r}: one of {', '.join(MATCH_TYPES)} is possible")
        least = {
            "max_trie_depth": 2,
            "min_bfs_breadth": 1,
            "max_bfs_breadth": self.min_bfs_breadth,
            "capacity": self.max_trie_depth,
            "external_sam_budget": 0,
            "external_corpus_max_tokens": 1,
            "device_nodes": 2,
        }
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"{name}={getattr(self, name)} is too small: at least {bound}")
        if self.external_corpus_path is not None and self.external_sam_budget == 0:
            raise ConfigError(
                f"external_corpus_path={self.external_corpus_path!r} has no effect with external_sam_budget=0: "
                "reserve at least one draft node for it"
            )

    def check_num_draft_tokens(self, num_draft_tokens: int) -> None:
        """Raises ConfigError unless a tree of `num_draft_tokens` nodes has room for one draft and for the budget."""
        if num_draft_tokens < 2:
            raise ConfigError(f"num_draft_tokens={num_draft_tokens} is too small for NGRAM: the root and at least one draft")
        if self.external_sam_budget > num_draft_tokens - 1:
            raise ConfigError(
                f"external_sam_budget={self.external_sam_budget} is larger than the {num_draft_tokens - 1} drafts of "
                f"num_draft_tokens={num_draft_tokens}"
            )
