"""Drafts from a smaller model."""
