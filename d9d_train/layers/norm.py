"""Root-mean-square norm."""

import torch
from torch import nn

from d9d_kernels import rms_norm
from d9d_train.layers.weights import local


class RMSNorm(nn.Module):
    """Rows scaled by the inverse root of their mean square, then by a weight.

    Attributes:
        weight: [channels].
        eps: Added to the mean square.
    """

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., channels] from the same; sums run in float32 or wider."""
        return rms_norm(x, local(self.weight), self.eps)
