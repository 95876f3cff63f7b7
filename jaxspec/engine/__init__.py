"""Continuous batching: policy (pages, prefix cache, scheduler, core; free of JAX), device programs and text."""
