"""Products of few rows with large weights."""
