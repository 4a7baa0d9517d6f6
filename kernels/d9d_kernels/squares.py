"""Sum of squares of many tensors: the local part of a gradient norm."""

from collections.abc import Sequence

import torch
from torch import Tensor

from d9d_kernels import launch, many, reference
from d9d_kernels.lang import KERNEL_DTYPES, constexpr, jit, runs_triton, tensor, tl

FIELDS = 3


@jit
def _chunk(
    table: tensor,
    owner: tensor,
    parts: tensor,
    FIELDS: constexpr,
    CHUNK: constexpr,
    BLOCK: constexpr,
    DTYPE: constexpr,
    ALIGNED: constexpr,
) -> None:
    chunk = tl.program_id(0)
    row = table + tl.load(owner + chunk).to(tl.int64) * FIELDS
    pointer = tl.load(row).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    size, start = tl.load(row + 1), (chunk - tl.load(row + 2)) * CHUNK
    acc = tl.zeros([BLOCK], tl.float32)
    if start + CHUNK <= size:
        for step in tl.static_range(0, CHUNK, BLOCK):
            h = tl.load(pointer + start + step + tl.arange(0, BLOCK)).to(tl.float32)
            acc += h * h
    else:
        for step in range(0, CHUNK, BLOCK):
            i = start + step + tl.arange(0, BLOCK)
            h = tl.load(pointer + i, mask=i < size, other=0.0).to(tl.float32)
            acc += h * h
    tl.store(parts + chunk, tl.sum(acc, 0))


@jit
def _total(parts: tensor, out: tensor, n: tensor, BLOCK: constexpr) -> None:
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        acc += tl.load(parts + i, mask=i < n, other=0.0)
    tl.store(out, tl.sum(acc, 0))


def _launch_chunks(tensors: Sequence[Tensor], owner: Tensor, parts: Tensor) -> None:
    sizes = [t.numel() for t in tensors]
    chunk, warps = launch.squares()
    firsts = many.first_chunks(sizes, chunk)
    rows = [[t.data_ptr(), n, first] for t, n, first in zip(tensors, sizes, firsts, strict=True)]
    _chunk[(owner.numel(),)](
        many.send(rows, parts.device),
        owner,
        parts,
        FIELDS=FIELDS,
        CHUNK=chunk,
        BLOCK=4096,
        DTYPE=getattr(tl, str(tensors[0].dtype).removeprefix("torch.")),
        ALIGNED=many.aligned(tensors),
        num_warps=warps,
    )


@torch.no_grad()
def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements of all tensors, in float32 and in a fixed order.

    Two launches, and one more for each further dtype. The square of a gradient norm is the sum of this
    over whatever holds the other gradients.

    Args:
        tensors: dense, on one device; dtypes may differ.

    Returns:
        0-D, float32 (float64 where a tensor is).

    Raises:
        ValueError: there are no tensors, or one has gaps.
    """
    if not tensors:
        raise ValueError("tensors: expected at least one")
    many.require_dense(tensors=tensors)
    if not all(runs_triton(t) for t in tensors):
        return reference.sum_of_squares(tensors)
    device, (chunk, _) = tensors[0].device, launch.squares()
    groups = [g for d in KERNEL_DTYPES if (g := [t for t in tensors if t.dtype == d and t.numel()])]
    owners = [many.owners(tuple(t.numel() for t in g), chunk, device) for g in groups]
    parts = torch.empty(sum(o.numel() for o in owners), dtype=torch.float32, device=device)
    for group, owner, part in zip(
        groups, owners, torch.split(parts, [o.numel() for o in owners]), strict=True
    ):
        _launch_chunks(group, owner, part)
    out = torch.empty((), dtype=torch.float32, device=device)
    _total[(1,)](parts, out, parts.numel(), BLOCK=4096, num_warps=16)
    return out
