"""One launch over many tensors: a table of their addresses on the device.

Tensors are cut into chunks of equal size; program `i` looks up whose chunk it has and where that
tensor lies. Gradients move from step to step, so the table is sent before every launch (some ten
KiB, from host memory that the call does not wait for); whose chunk is whose depends on sizes alone and stays.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from d9d_kernels.lang import ceil_div

# Addresses that the kernels may load 16 bytes at a time from.
ALIGNMENT = 16


@lru_cache(maxsize=64)
def owners(sizes: tuple[int, ...], chunk: int, device: torch.device) -> Tensor:
    """int32 [chunks]: the tensor of each chunk, in the order of the tensors."""
    counts = torch.tensor([ceil_div(n, chunk) for n in sizes])
    return torch.repeat_interleave(torch.arange(len(sizes)), counts).int().to(device)


def first_chunks(sizes: Sequence[int], chunk: int) -> list[int]:
    """Where each tensor's chunks start."""
    return [0, *accumulate(ceil_div(n, chunk) for n in sizes)][:-1]


def send(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 [tensors, fields] on the device."""
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


def aligned(*lists: Sequence[Tensor]) -> bool:
    return all(t.data_ptr() % ALIGNMENT == 0 for tensors in lists for t in tensors)


def require_dense(**lists: Sequence[Tensor]) -> None:
    """Refuse tensors whose elements do not follow each other in memory.

    Raises:
        ValueError: one has gaps.
    """
    for name, tensors in lists.items():
        for i, t in enumerate(tensors):
            if not t.is_contiguous():
                raise ValueError(f"{name}[{i}]: expected dense rows, found strides {t.stride()}")
