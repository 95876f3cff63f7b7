"""Training of draft heads: data written by the target itself, one objective per kind of head, one loop for all."""
