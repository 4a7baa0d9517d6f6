"""Graphs evaluated by their copies: what a plan has to do, in ten lines of torch."""

from collections.abc import Hashable, Mapping, Sequence

import torch

from d9d_ckpt.graph.node import Node
from d9d_ckpt.graph.pushdown import ZERO, Copy, Structures, pushdown
from d9d_ckpt.tensors import Region


def fill(target: torch.Tensor, copies: Sequence[Copy], leaves: Sequence[torch.Tensor]) -> None:
    """Execute ``copies`` into the dense ``target``; leaves are given by slot."""
    flat = target.view(-1)
    for copy in copies:
        sizes = [d.count for d in copy.digits]
        into = torch.as_strided(flat, sizes, [d.stride for d in copy.digits], copy.target)
        if copy.leaf == ZERO:
            into.zero_()
            continue
        source = leaves[copy.leaf].reshape(-1)
        moved = torch.as_strided(source, sizes, [d.address for d in copy.digits], copy.source)
        for dtype in copy.casts:
            moved = moved.to(getattr(torch, dtype.torch))
        into.copy_(moved)


def evaluate(
    node: Node, data: Mapping[Hashable, torch.Tensor], region: Region | None = None
) -> torch.Tensor:
    """``node``, or a region of it, over the tensors that ``data`` has for its leaves' sources."""
    region = region or Region.whole(node.shape)
    target = torch.empty(region.shape, dtype=getattr(torch, node.dtype.torch))
    leaves = [data[leaf.source] for leaf in Structures().of(node)[1]]
    fill(target, pushdown(node, region), leaves)
    return target


def box(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """``tensor[region]`` in eager torch."""
    return tensor[tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))]
