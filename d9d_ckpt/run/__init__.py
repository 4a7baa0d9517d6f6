"""Executing plans: buffers, workers, ranks, and the commit at the end."""
