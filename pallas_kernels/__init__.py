"""Kernels of jaxspec: one contract each, a plain jnp reference beside every one. Nothing here imports jaxspec."""

from pallas_kernels.kv_commit import kv_compact, kv_compact_layers, kv_write
from pallas_kernels.tree_attention import tree_attention

__all__ = ["kv_compact", "kv_compact_layers", "kv_write", "tree_attention"]
