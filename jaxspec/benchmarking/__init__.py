"""Measuring: a round by parts against the memory floor, generation on and off, and sweeps over the tree's parameters."""
