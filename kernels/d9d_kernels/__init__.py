"""Fused operations of the trainer: a Triton kernel each, with an eager twin that runs anywhere."""

__all__: list[str] = []
