"""A trainer on torch primitives: six axes, one pipeline executor, checkpoints that any topology resumes."""
