"""What there is to do, as columns: no Python object per copy."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from d9d_ckpt.graph.pieces import Digit
from d9d_ckpt.graph.pushdown import Scaling
from d9d_ckpt.tensors import Chunk, DType, Target

Columns = npt.NDArray[np.int64]


class Movement(NamedTuple):
    """How the elements of a copy lie on both sides; strides in bytes.

    Attributes:
        digits: Counts with source and target strides, outermost first.
        dtype: The elements' dtype at the source.
        casts: Dtypes they go through on the way.
        scaling: For quantised elements, how they get their values before any cast.
    """

    digits: tuple[Digit, ...]
    dtype: DType
    casts: tuple[DType, ...]
    scaling: Scaling | None = None

    @property
    def computed(self) -> bool:
        """Whether elements change on the way, so that they are handled one by one."""
        return bool(self.casts) or self.scaling is not None

    @property
    def numel(self) -> int:
        """Elements moved."""
        total = 1
        for d in self.digits:
            total *= d.count
        return total

    @property
    def run(self) -> int:
        """Bytes that lie together at the source."""
        inner = min(self.digits, key=lambda d: d.address, default=None)
        item = self.dtype.itemsize
        return inner.count * item if inner and inner.address == item else item

    @property
    def hull(self) -> int:
        """Bytes from the first to the last one at the source."""
        return sum((d.count - 1) * d.address for d in self.digits) + self.dtype.itemsize


TARGET, SOURCE, FROM, TO, MOVE, SCALE = range(6)
"""Columns of `Plan.rows`: target, source (-1 for zeros), byte offsets in both, movement, and the
source of the scales (-1 for none)."""


@dataclass(frozen=True)
class Plan:
    """Every copy that fills every target.

    Attributes:
        targets: The boxes, in the order in which they are stored.
        sources: The stored chunks that are read.
        movements: The distinct ways of copying.
        rows: int64 [copies, 6], by target.
    """

    targets: Sequence[Target]
    sources: Sequence[Chunk]
    movements: Sequence[Movement]
    rows: Columns

    @cached_property
    def starts(self) -> Columns:
        """First row of each target, and the end."""
        edges = np.arange(len(self.targets) + 1)
        return np.searchsorted(self.rows[:, TARGET], edges)

    @cached_property
    def mark(self) -> str:
        """A digest of the work: equal plans have equal marks."""
        mark = hashlib.blake2b(np.ascontiguousarray(self.rows).tobytes(), digest_size=16)
        for target in self.targets:
            mark.update(repr((target.name, target.box, target.rank)).encode())
        return mark.hexdigest()

    @cached_property
    def encoded(self) -> bool:
        """Whether any source must be decoded."""
        return any(chunk.coding is not None for chunk in self.sources)

    @cached_property
    def bytes_written(self) -> int:
        """Bytes of all targets."""
        return sum(t.nbytes for t in self.targets)

    @cached_property
    def row_bytes(self) -> Columns:
        """Source bytes that each copy needs; 0 for zeros."""
        each = np.array([m.numel * m.dtype.itemsize for m in self.movements] or [0])
        return np.where(self.rows[:, SOURCE] < 0, 0, each[self.rows[:, MOVE]])

    @cached_property
    def row_hulls(self) -> Columns:
        """Source bytes from the first to the last one of each copy."""
        each = np.array([m.hull for m in self.movements] or [0])
        return each[self.rows[:, MOVE]]

    @cached_property
    def row_runs(self) -> Columns:
        """Source bytes that lie together in each copy."""
        each = np.array([m.run for m in self.movements] or [0])
        return each[self.rows[:, MOVE]]

    @cached_property
    def stretches(self) -> dict[int, tuple[int, int]]:
        """Sources of which one whole stretch is wanted: its first byte and its end."""
        rows = self.rows[self.rows[:, SOURCE] >= 0]
        if not len(rows):
            return {}
        at = rows[:, SOURCE]
        low = np.full(len(self.sources), np.iinfo(np.int64).max)
        high, wanted = np.zeros_like(low), np.zeros_like(low)
        mine = self.rows[:, SOURCE] >= 0
        np.minimum.at(low, at, rows[:, FROM])
        np.maximum.at(high, at, rows[:, FROM] + self.row_hulls[mine])
        np.add.at(wanted, at, self.row_bytes[mine])
        whole = np.flatnonzero((wanted > 0) & (wanted >= high - low))
        return {n: (int(low[n]), int(high[n])) for n in whole.tolist()}
