"""Two sets of tensors compared by value, a bounded slab at a time."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from d9d_ckpt.graph.node import Node
from d9d_ckpt.run.checkpoint import Reader
from d9d_ckpt.run.gather import Buffer
from d9d_ckpt.tensors import DType, Region

_SLAB = 16 << 20
"""Bytes of each side at once."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that differs.

    Attributes:
        name: The tensor.
        max_abs: Largest absolute difference; None where dtype or shape differ.
        count: Elements that differ; None likewise.
        detail: Both specs where those differ.
    """

    name: str
    max_abs: float | None
    count: int | None
    detail: str = ""


@dataclass(frozen=True)
class Compared:
    """The outcome of a diff."""

    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    different: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether both hold the same tensors with the same values."""
        return not (self.only_in_a or self.only_in_b or self.different)


def compare(
    a: Mapping[str, Node],
    b: Mapping[str, Node],
    readers: tuple[Reader, Reader],
    tolerance: tuple[float, float] = (0.0, 0.0),
) -> Compared:
    """Every tensor of both sides; ``tolerance`` is (relative, absolute), zeros mean bit for bit."""
    different = []
    for name, node in a.items():
        if name in b:
            found = difference(name, (node, b[name]), readers, tolerance)
            if found is not None:
                different.append(found)
    return Compared(
        tuple(name for name in a if name not in b),
        tuple(name for name in b if name not in a),
        tuple(different),
    )


def difference(
    name: str,
    nodes: tuple[Node, Node],
    readers: tuple[Reader, Reader],
    tolerance: tuple[float, float] = (0.0, 0.0),
) -> Difference | None:
    """How two tensors differ; None where they do not."""
    a, b = nodes
    if a.spec != b.spec:
        detail = f"{a.dtype.name} {list(a.shape)} against {b.dtype.name} {list(b.shape)}"
        return Difference(name, None, None, detail)
    largest, count = 0.0, 0
    for region in Region.whole(a.shape).slabs(_SLAB // a.dtype.itemsize):
        left, right = (np.empty(region.numel * a.dtype.itemsize, np.uint8) for _ in range(2))
        readers[0].read_into(a, region, left)
        readers[1].read_into(b, region, right)
        if not np.array_equal(left, right):
            apart, elements = _apart(left, right, a.dtype, tolerance)
            largest, count = max(largest, apart), count + elements
    return Difference(name, largest, count) if count else None


def _apart(
    left: Buffer, right: Buffer, dtype: DType, tolerance: tuple[float, float]
) -> tuple[float, int]:
    torch: Any = importlib.import_module("torch")
    x, y = (torch.from_numpy(v).view(getattr(torch, dtype.torch)) for v in (left, right))
    bits = (left != right).reshape(len(x), -1).any(1)
    if dtype.torch != "complex64":
        x, y = x.to(torch.float64), y.to(torch.float64)
    apart = (x - y).abs().nan_to_num(nan=float("inf"))
    if tolerance == (0.0, 0.0):
        wrong = torch.from_numpy(bits)
    else:
        wrong = torch.from_numpy(bits) & ~(apart <= tolerance[1] + tolerance[0] * y.abs())
    if not bool(wrong.any()):
        return 0.0, 0
    return float(apart[wrong].max()), int(wrong.sum())
