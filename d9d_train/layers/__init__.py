"""Plain modules for one device; parallelism enters through the seams that their docstrings name."""
