"""Computations of each family of schedules, from stages, ranks and micro-batches; pure."""
