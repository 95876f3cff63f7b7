"""What a user holds of a model and of a draft: parameter trees with their configurations, as pytrees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from jaxspec.config import ModelConfig

if TYPE_CHECKING:
    from jaxspec.tokenizer.tokenizer import Tokenizer


class _Static:
    """Anything as hashable auxiliary data of a pytree: equal when it is the same object."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other) -> bool:
        return isinstance(other, _Static) and (self.value is other.value)

    def __hash__(self) -> int:
        return id(self.value)


class Deferred:
    """A parameter tree that is read when it is first needed."""

    def __init__(self, read: Callable[[], Any]):
        self.read = read


class _Tree:
    """The attribute `tree` of what follows: given, or a `Deferred` one that its first use reads."""

    _tree: Any

    @property
    def tree(self) -> Any:
        """The parameter tree: nested dicts of arrays."""
        if isinstance(self._tree, Deferred):
            self._tree = self._tree.read()
        return self._tree

    @property
    def is_read(self) -> bool:
        """Whether the weights are in memory."""
        return not isinstance(self._tree, Deferred)

    def _size(self, unit: str) -> str:
        if not self.is_read:
            return "weights are read when first used"
        count, size, dtypes = _measure(self.tree)
        return f"{count:,} {unit} {dtypes}, {_bytes(size)}"


@jax.tree_util.register_pytree_node_class
class DraftParams(_Tree):
    """A draft head: its parameter tree and configuration. A pytree whose leaves are the arrays.

    Attributes:
      tree: the parameter tree.
      config: its configuration, which says what kind of draft it is.
      source: where it came from.
      measured: what is known of its speed (`jaxspec.drafters.measured.Measurement`).
    """

    def __init__(self, tree: Any, config: Any, source: str = "", measured: tuple = ()):
        self._tree, self.config, self.source, self.measured = tree, config, source, measured

    def tree_flatten(self):
        """Arrays and the rest."""
        return (self.tree,), (self.config, self.source, self.measured)

    @classmethod
    def tree_unflatten(cls, aux, children):
        """The inverse of `tree_flatten`."""
        return cls(children[0], *aux)

    def __repr__(self) -> str:
        return f"DraftParams({type(self.config).__name__}, {self._size('parameters,')}, from {self.source})"


@jax.tree_util.register_pytree_node_class
class ModelParams(_Tree):
    """A model ready to run: a pytree (its leaves are the arrays of `tree` and of the drafts).

    Attributes:
      tree: the parameter tree (`jaxspec.models.decoder.param_shapes`).
      config: its `ModelConfig`.
      tokenizer: or None: then prompts are token ids.
      drafts: draft heads that came with it, by name.
      source: where it came from.
      measured: as for `DraftParams`, of a model that is a draft.
    """

    def __init__(
        self,
        tree: Any,
        config: ModelConfig,
        tokenizer: Tokenizer | None = None,
        drafts: Mapping[str, Any] | None = None,
        source: str = "",
        measured: tuple = (),
    ):
        self._tree, self.config, self.tokenizer, self.source, self.measured = tree, config, tokenizer, source, measured
        self.drafts: dict[str, Any] = dict(drafts or {})

    def tree_flatten(self):
        """Arrays and the rest."""
        return (self.tree, self.drafts), (self.config, _Static(self.tokenizer), self.source, self.measured)

    @classmethod
    def tree_unflatten(cls, aux, children):
        """The inverse of `tree_flatten`."""
        config, tokenizer, source, measured = aux
        made = cls.__new__(cls)
        made._tree, made.drafts = children
        made.config, made.tokenizer, made.source, made.measured = config, tokenizer.value, source, measured
        return made

    def __repr__(self) -> str:
        c = self.config
        experts = f", {c.moe.num_experts} experts ({c.moe.num_experts_per_token} per token)" if c.moe else ""
        sliding = sorted({w for w in c.windows if w is not None})
        window = f", sliding window {', '.join(map(str, sliding))}" if sliding else ""
        lines = [
            f"ModelParams: {c.family} ({c.architecture or 'decoder'})",
            f"  layers      {c.num_layers} × width {c.hidden_size}, feed-forward {c.ffn_size}{experts}",
            f"  attention   {c.num_heads} heads, {c.num_kv_heads} key/value heads of {c.key_head_dim}{window}",
            f"  vocabulary  {c.vocab_size:,}{', embedding and head tied' if c.tie_embeddings else ''}",
            f"  context     {c.max_positions:,} positions",
            f"  parameters  {self._size('in')}",
            f"  stop ids    {', '.join(map(str, c.stop_token_ids)) or 'none'}",
            f"  tokenizer   {self.tokenizer or 'none: prompts are token ids'}",
            f"  drafts      {', '.join(self.drafts) or 'none'}",
            f"  source      {self.source or 'made in memory'}",
        ]
        return "\n".join(lines)


def _measure(tree: Any) -> tuple[int, int, str]:
    """Number of parameters, bytes, types."""
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    dtypes = sorted({str(x.dtype) for x in leaves})
    return sum(int(x.size) for x in leaves), sum(int(x.size) * x.dtype.itemsize for x in leaves), "/".join(dtypes)


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
