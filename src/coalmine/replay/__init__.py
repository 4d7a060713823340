"""Run a step again with one row less, all randomness frozen, and see what the row moves."""
