"""Which tokens a target and a draft model have in common, and what they are called on either side."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.config import ConfigError
from jaxspec.tokenizer.pieces import pieces

LEAST_COMMON = 0.9
"""Tokens with the same id, as a part of the smaller vocabulary, without which the other vocabulary is another one."""


PAIRS = "vocabulary"
"""Where the maps of a `PairedVocabulary` stand in the drafter's parameters."""
FEW_PAIRS = 0.5
"""Tokens that read alike, as a part of the draft's, below which a warning says that little will be accepted."""


@dataclasses.dataclass(frozen=True)
class CommonVocabulary:
    """Ids that mean the same token for target and draft: those below `size` but for `foreign`.

    The target may emit any id. One that is not common is fed to the draft as `stand_in`.
    """

    size: int
    foreign: tuple[int, ...] = ()
    stand_in: int = 0

    def __len__(self) -> int:
        """Common ids."""
        return self.size - len(self.foreign)

    @functools.cached_property
    def is_common(self) -> np.ndarray:
        """[size] bool."""
        common = np.ones(self.size, bool)
        common[list(self.foreign)] = False
        return common

    def as_draft_ids(self, params, tokens: Int[Array, "*R"]) -> Int[Array, "*R"]:
        """The target's ids with the stand-in for those that the draft does not have."""
        del params
        known = tokens < self.size
        if self.foreign:
            known &= jnp.asarray(self.is_common)[jnp.minimum(tokens, self.size - 1)]
        return jnp.where(known, tokens, self.stand_in)

    def restrict(self, params, logits: Float[Array, "*R V"]) -> Float[Array, "*R C"]:
        """The draft's logits of the ids below `size`, -inf where one is not common."""
        del params
        logits = logits[..., : self.size]
        return jnp.where(jnp.asarray(self.is_common), logits, -jnp.inf) if self.foreign else logits

    def as_target_ids(self, params, tokens: Int[Array, "*R"]) -> Int[Array, "*R"]:
        """The draft's ids, which are the target's."""
        del params
        return tokens


@dataclasses.dataclass(frozen=True)
class PairedVocabulary:
    """Two vocabularies of which `pairs` tokens read alike. The maps are parameters: ``to_draft``, for every id of the target
    the draft's that reads like it, or else the last of those that the draft's tokenizer makes of it; ``to_target``, for every
    id of the draft the target's that reads like it, or -1."""

    pairs: int

    def __len__(self) -> int:
        """Tokens that can be drafted."""
        return self.pairs

    def as_draft_ids(self, params, tokens: Int[Array, "*R"]) -> Int[Array, "*R"]:
        """What the draft reads for the target's ids."""
        return params[PAIRS]["to_draft"][tokens]

    def restrict(self, params, logits: Float[Array, "*R V"]) -> Float[Array, "*R V"]:
        """The draft's logits, -inf where the target has no such token."""
        return jnp.where(params[PAIRS]["to_target"] < 0, -jnp.inf, logits)

    def as_target_ids(self, params, tokens: Int[Array, "*R"]) -> Int[Array, "*R"]:
        """The target's ids for drafted ones."""
        return params[PAIRS]["to_target"][tokens]


def common_vocabulary(target, draft) -> CommonVocabulary | None:
    """The ids that target and draft have in common; None where all are.

    People pair models whose tables are padded to different sizes and whose tokenizers differ in a few added tokens. Without
    tokenizers an id counts as common if both tables have it.

    Raises:
      ConfigError: the vocabularies differ by more than that; the message names the first difference.
    """
    sizes = target.config.vocab_size, draft.config.vocab_size
    size, foreign = min(sizes), ()
    if target.tokenizer is not None and draft.tokenizer is not None and target.tokenizer.vocab != draft.tokenizer.vocab:
        ours, theirs = ({i: t for t, i in m.tokenizer.vocab.items() if i < size} for m in (target, draft))
        common = [i for i in ours if ours[i] == theirs.get(i)]
        size = max(common, default=-1) + 1
        foreign = tuple(i for i in range(size) if i in ours.keys() | theirs.keys() and ours.get(i) != theirs.get(i))
        if len(common) < LEAST_COMMON * min(len(ours), len(theirs)) or not common:
            i = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
            raise ConfigError(
                f"STANDALONE needs one vocabulary but for a few added tokens: target and draft share {len(common)} of "
                f"{len(ours)} and {len(theirs)} tokens; the first difference is id {i}, {ours.get(i)!r} for the target and "
                f"{theirs.get(i)!r} for the draft (None: absent). standalone_pairing='strings' pairs tokens that read alike"
            )
    if not foreign and sizes == (size, size):
        return None
    # What the draft lacks is most often a mark that an instruction-tuned target uses; the draft's own end mark is the nearest.
    marks = [i for i in draft.config.stop_token_ids if i < size and i not in foreign]
    stand_in = marks[0] if marks else next(i for i in range(size) if i not in foreign)
    return CommonVocabulary(size, foreign, stand_in)


@functools.lru_cache(maxsize=4)
def pair_tokens(ours, theirs, rows: int, draft_rows: int, mark: int) -> tuple[np.ndarray, np.ndarray]:
    """The maps of a `PairedVocabulary`: ``to_draft`` [rows] and ``to_target`` [draft_rows], int32.

    Args:
      ours, theirs: tokenizers of target and draft.
      rows, draft_rows: of their embeddings.
      mark: an id of the draft for what its tokenizer makes nothing of.
    """
    text, draft_text = pieces(ours.vocab), pieces(theirs.vocab)
    by_text = {piece: i for i, piece in sorted(draft_text.items(), reverse=True) if i < draft_rows}  # the lowest id counts
    to_draft, to_target = np.full(rows, mark, np.int32), np.full(draft_rows, -1, np.int32)
    for i, piece in sorted((i, piece) for i, piece in text.items() if i < rows):
        found = by_text.get(piece)
        if found is None:
            ids = [t for t in theirs.encode(piece.decode(errors="ignore"), add_special_tokens=False) if t < draft_rows]
            to_draft[i] = ids[-1] if ids else mark
            continue
        to_draft[i] = found
        if to_target[found] < 0:
            to_target[found] = i
    return to_draft, to_target


def paired_vocabulary(target, draft) -> tuple[PairedVocabulary, dict[str, Array]]:
    """Which tokens read alike, and the maps between them; warns where they are few.

    Raises:
      ConfigError: a model has no tokenizer.
    """
    for name, model in (("target", target), ("draft", draft)):
        if model.tokenizer is None:
            raise ConfigError(f"standalone_pairing='strings' compares tokens as text, and the {name} has no tokenizer")
    mark = next((i for i in draft.config.stop_token_ids if i < draft.config.vocab_size), 0)
    maps = pair_tokens(target.tokenizer, draft.tokenizer, target.config.vocab_size, draft.config.vocab_size, mark)
    pairs, tokens = int((maps[1] >= 0).sum()), len(draft.tokenizer.vocab)
    if pairs < FEW_PAIRS * tokens:
        warnings.warn(
            f"{pairs} of the draft's {tokens} tokens are tokens of the target as well: little of what it drafts will be "
            "accepted",
            stacklevel=2,
        )
    return PairedVocabulary(pairs), dict(zip(("to_draft", "to_target"), map(jnp.asarray, maps), strict=True))
