"""FR-Spec token maps: the draft head is cut to the rows of frequent tokens (Zhao et al. 2025, arXiv 2502.14856)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxspec.config import ConfigError
from jaxspec.files.errors import reading
from jaxspec.files.torch_list import read_list
from jaxspec.params import DraftParams


def load_token_map(source: str | Path | Sequence[int]) -> tuple[int, ...]:
    """Target token ids, most frequent first: from a ``.pt``, ``.npy`` or ``.json`` file, or given as they are.

    Raises:
      ConfigError: the file is missing, of another kind, or holds anything but a flat list of ids.
    """
    if not isinstance(source, (str, Path)):
        ids = np.asarray(tuple(source))
        source = "the token map"
    else:
        path = Path(source)
        if not path.is_file():
            raise ConfigError(f"token_map={str(source)!r}: there is no such file")
        if path.suffix not in (".npy", ".json", ".pt", ".bin"):
            raise ConfigError(f"token_map={str(source)!r} must be a .pt, .npy or .json file")
        with reading(f"token_map={str(source)!r}"):
            if path.suffix == ".npy":
                ids = np.load(path, allow_pickle=False)
            else:
                ids = np.asarray(json.loads(path.read_text()) if path.suffix == ".json" else read_list(path))
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(f"{source} must hold a flat list of token ids, found shape {ids.shape} of {ids.dtype}")
    if len(np.unique(ids)) != ids.size or ids.min() < 0:
        raise ConfigError(f"{source} names a token id twice or a negative one")
    return tuple(ids.tolist())


def apply_token_map(draft: DraftParams, target, token_map: str | Path | Sequence[int]) -> DraftParams:
    """A draft whose head holds only the target head's rows of the given tokens.

    Args:
      draft: a head that uses the target's output matrix (EAGLE-1/2; EAGLE-3 has a reduced vocabulary of its own).
      target: the target's `ModelParams`.
      token_map: see `load_token_map`.

    Raises:
      ConfigError: the draft has a head of its own, or an id lies outside the vocabulary.
    """
    if draft.config.own_head:
        raise ConfigError(
            f"a token map cuts the target's head, but this {draft.config.algorithm} draft has a head of its own with "
            f"{draft.config.draft_vocab_size} tokens: leave token_map out"
        )
    ids = load_token_map(token_map)
    if max(ids) >= target.config.vocab_size:
        raise ConfigError(f"the token map names id {max(ids)}, the target's vocabulary has {target.config.vocab_size} tokens")
    rows = np.asarray(ids, np.int32)
    if target.config.tie_embeddings:
        head = {"kernel": target.tree["embedder"]["embedding"][rows].T}
    elif isinstance(target.tree["head"]["kernel"], dict):
        kernel = target.tree["head"]["kernel"]
        head = {"kernel": {"q": kernel["q"][:, rows], "scale": kernel["scale"][rows]}}
    else:
        head = {"kernel": target.tree["head"]["kernel"][:, rows]}
    tree = {**draft.tree, "head": head, "target_ids": jnp.asarray(rows)}
    config = dataclasses.replace(draft.config, own_head=True, reduced_vocab=True, draft_vocab_size=len(ids))
    return DraftParams(tree, config, draft.source)
