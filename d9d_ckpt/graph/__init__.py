"""Tensors as expressions over stored tensors, and push-down of wanted regions to the leaves."""
