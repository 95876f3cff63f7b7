"""UNO: the target drafts for itself through an adapter."""
