"""Frozen dataclasses as pytrees."""

from __future__ import annotations

import dataclasses

import jax


def pytree(*, static: tuple[str, ...] = ()):
    """Class decorator: makes a dataclass frozen and registers it as a pytree.

    Unlike `jax.tree_util.register_dataclass`, unflattening does not run ``__init__``: JAX puts placeholders into pytrees, and
    the tests check the types of what `__init__` gets.

    Args:
      static: fields that are not arrays; they must be hashable and become part of the tree's structure.
    """

    def register(cls):
        cls = dataclasses.dataclass(frozen=True)(cls)
        data = tuple(f.name for f in dataclasses.fields(cls) if f.name not in static)
        keys = tuple(jax.tree_util.GetAttrKey(name) for name in data)

        def aux(value):
            return tuple(getattr(value, name) for name in static)

        def flatten(value):
            return tuple(getattr(value, name) for name in data), aux(value)

        def flatten_with_keys(value):
            return tuple(zip(keys, (getattr(value, name) for name in data), strict=True)), aux(value)

        def unflatten(fixed, children):
            made = object.__new__(cls)
            for name, child in zip((*data, *static), (*children, *fixed), strict=True):
                object.__setattr__(made, name, child)
            return made

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
        return cls

    return register
