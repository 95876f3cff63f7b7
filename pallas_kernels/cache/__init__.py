"""Writing into, and compacting, the paged KV cache."""
