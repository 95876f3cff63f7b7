"""Kernels of jaxspec: one contract each, a plain jnp reference beside every one. Nothing here imports jaxspec."""

from pallas_kernels.attention.api import groups_queries, tree_attention
from pallas_kernels.cache.api import kv_compact, kv_compact_layers, kv_write, kv_write_layers

__all__ = ["groups_queries", "kv_compact", "kv_compact_layers", "kv_write", "kv_write_layers", "tree_attention"]
