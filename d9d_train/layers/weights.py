"""The part of a parameter that a layer computes with."""

import torch
from torch.distributed.tensor import DTensor, Partial


def local(weight: torch.Tensor) -> torch.Tensor:
    """A weight as a plain tensor: itself, or this rank's shard of it.

    Where it is replicated over an axis, each rank of the axis sees other tokens or other heads, so its
    gradient there is a partial sum.
    """
    if not isinstance(weight, DTensor):
        return weight
    grads = [Partial() if place.is_replicate() else place for place in weight.placements]
    return weight.to_local(grad_placements=grads)
