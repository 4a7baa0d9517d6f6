"""Ulysses: whole sequences of some heads in place of some tokens of all heads."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from d9d_train.batch import Batch
from d9d_train.collectives import all_to_all
from d9d_train.data.order import Order
from d9d_train.layers import sdpa
from d9d_train.mesh import Axis


@dataclass(frozen=True)
class Ulysses:
    """Attention of a rank's heads over whole sequences, the same as on one device.

    Attributes:
        axis: cp, which divides the query heads. Where it does not divide the key-value heads, these
            are repeated until it does.
    """

    order: ClassVar[Order] = "contiguous"

    axis: Axis

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """[B, S, Hq, D] from q [B, S, Hq, D], k and v [B, S, Hkv, D]; S are this rank's tokens."""
        size, heads = self.axis.size, k.shape[2]
        # q heads are a multiple of cp and of the KV heads, so of their least common multiple: what is
        # repeated still has whole groups.
        k, v = (x.repeat_interleave(math.lcm(heads, size) // heads, dim=2) for x in (k, v))
        per_rank = [x.shape[2] // size for x in (q, k, v)]
        q, k, v = torch.split(self._whole(q, k, v), per_rank, dim=2)
        index = torch.arange(q.shape[1], device=batch.index.device)
        return self._parts(sdpa.attend(q, k, v, replace(batch, index=index)))

    def _whole(self, *parts: torch.Tensor) -> torch.Tensor:
        """[B, T, h, D]: this rank's heads of each of [B, S, H, D], side by side, in one exchange."""
        by_rank = torch.cat([torch.unflatten(x, 2, (self.axis.size, -1)) for x in parts], dim=3)
        sent = by_rank.movedim(2, 0)
        return all_to_all(sent, None, None, self.axis).movedim(0, 1).flatten(1, 2)

    def _parts(self, whole: torch.Tensor) -> torch.Tensor:
        """[B, S, H, D], this rank's tokens of all heads, from [B, T, h, D]."""
        sent = torch.unflatten(whole, 1, (self.axis.size, -1)).movedim(1, 0)
        return all_to_all(sent, None, None, self.axis).movedim(0, 2).flatten(2, 3)
