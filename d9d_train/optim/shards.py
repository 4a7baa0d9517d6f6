"""What this rank holds of a tensor, to be computed with in place."""

import torch
from torch.distributed.tensor import DTensor


@torch.no_grad()
def shard(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, sharing its memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
