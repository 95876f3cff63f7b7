"""Attention over a paged KV cache: the committed prefix and a tree of drafted entries."""
