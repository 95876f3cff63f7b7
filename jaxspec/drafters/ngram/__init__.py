"""Drafts copied from the text itself, from a corpus, or from earlier answers."""
