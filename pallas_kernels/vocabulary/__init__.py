"""Searching a vocabulary."""
