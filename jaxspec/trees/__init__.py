"""Draft trees: what they are, and every way to build one."""
