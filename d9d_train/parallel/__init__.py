"""Parallelism, applied to plain modules from outside: one axis a file."""
