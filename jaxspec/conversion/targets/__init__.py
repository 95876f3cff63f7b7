"""Published formats of whole models."""
