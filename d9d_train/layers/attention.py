"""Grouped-query attention with a fused projection."""

from collections.abc import Callable

import torch
from torch import nn

from d9d_kernels import qk_norm_rope
from d9d_train.batch import Batch
from d9d_train.layers import sdpa
from d9d_train.layers.linear import Linear
from d9d_train.layers.norm import RMSNorm
from d9d_train.layers.rope import Angles
from d9d_train.layers.weights import local

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Batch], torch.Tensor]
"""(q [B, S, Hq, D], k [B, S, Hkv, D], v [B, S, Hkv, D], batch) -> [B, S, Hq, D]."""


class Attention(nn.Module):
    """Causal self-attention within documents.

    Rows of ``qkv_proj`` go KV group by KV group: its query heads, its key head, its value head. So any
    cut at a group leaves whole groups, and how many there are here follows from the local weight.

    Args:
        hidden: Width of the residual stream.
        heads: Query heads, of all ranks.
        kv_heads: Key and value heads; divides ``heads``.
        head_dim: Channels of a head.
        qkv_bias: Whether the fused projection has a bias.
        o_bias: Whether the output projection has one.
        norm_eps: Epsilon of norms on each query and key head; None: there are none.

    Attributes:
        attend: Seam of context parallelism: attention of this rank's tokens to whole sequences.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.queries = heads // kv_heads
        self.head_dim = head_dim
        self.qkv_proj = Linear(hidden, (heads + 2 * kv_heads) * head_dim, bias=qkv_bias)
        self.o_proj = Linear(heads * head_dim, hidden, bias=o_bias)
        self.q_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.k_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.attend: Attend = sdpa.attend

    @property
    def local_heads(self) -> int:
        """Query heads of this rank, once tp has cut the weights and before fsdp does."""
        rows = local(self.qkv_proj.weight).shape[0]
        return rows // ((self.queries + 2) * self.head_dim) * self.queries

    def forward(self, x: torch.Tensor, angles: Angles, batch: Batch) -> torch.Tensor:
        """[B, S, H] from the same."""
        groups = self.qkv_proj(x).unflatten(-1, (-1, self.queries + 2, self.head_dim))
        q, k, v = groups.split((self.queries, 1, 1), dim=3)
        q, k = self._placed(q, k, angles)
        q, k, v = (heads.flatten(2, 3) for heads in (q, k, v))
        out: torch.Tensor = self.o_proj(self.attend(q, k, v, batch).flatten(2))
        return out

    def _placed(
        self, q: torch.Tensor, k: torch.Tensor, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys, normalised and turned to their positions."""
        if self.q_norm is None or self.k_norm is None:
            return angles.turn(q), angles.turn(k)
        weights = local(self.q_norm.weight), local(self.k_norm.weight)
        return qk_norm_rope(q, k, *weights, angles.cos, angles.sin, self.q_norm.eps)
