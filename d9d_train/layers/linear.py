"""A linear map."""

import torch
from torch import nn
from torch.nn import functional

from d9d_train.layers.weights import local


class Linear(nn.Module):
    """``x @ weight.T + bias``; values come later, from an initialiser or a checkpoint.

    Attributes:
        weight: [out, in].
        bias: [out], or None.
        bias_scale: Seam of tensor parallelism: what this rank contributes of the bias to outputs that
            are summed over ranks.
    """

    def __init__(self, inner: int, outer: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outer, inner))
        self.bias = nn.Parameter(torch.empty(outer)) if bias else None
        self.bias_scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out] from [..., in]."""
        bias = None if self.bias is None else local(self.bias)
        if bias is not None and self.bias_scale != 1:
            bias = bias * self.bias_scale
        return functional.linear(x, local(self.weight), bias)
