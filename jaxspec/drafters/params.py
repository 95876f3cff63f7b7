"""What a user holds of a draft: its parameter tree and its configuration."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax


class DraftConfig(Protocol):
    """The static side of a draft checkpoint: a frozen, hashable dataclass that knows its algorithm."""

    @property
    def algorithm(self) -> str:
        """SGLang's name of the algorithm that the draft is for."""
        ...


@dataclasses.dataclass(frozen=True, repr=False)
class DraftParams:
    """A draft checkpoint in memory: a pytree with its configuration (static)."""

    tree: Any
    config: DraftConfig
    source: str = ""

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.tree)
        count = sum(leaf.size for leaf in leaves)
        return f"DraftParams({self.config.algorithm}, {count / 1e6:.2f} M parameters, from {self.source or 'memory'})"


jax.tree_util.register_dataclass(DraftParams, data_fields=["tree"], meta_fields=["config", "source"])
