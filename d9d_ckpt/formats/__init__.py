"""Checkpoints on disk: opening them as catalogues, and what a written one looks like."""
