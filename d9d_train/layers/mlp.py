"""The dense feed-forward part of a layer."""

import torch
from torch import nn

from d9d_kernels import swiglu
from d9d_train.layers.linear import Linear


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``.

    Rows of ``gate_up_proj`` go in pairs (g0 u0 g1 u1 ...), so that any even cut of them is whole units.
    """

    def __init__(self, hidden: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden, 2 * width, bias=bias)
        self.down_proj = Linear(width, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] from the same."""
        out: torch.Tensor = self.down_proj(swiglu(self.gate_up_proj(x)))
        return out
