"""Which rank stores what of a live state: a function of what every rank holds."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from d9d_ckpt.checkpointer.base import Held
from d9d_ckpt.errors import LayoutError, RequestError
from d9d_ckpt.layout.placement import divided
from d9d_ckpt.tensors import DTYPES, Region, Target, TensorSpec


@dataclass(frozen=True)
class Holding:
    """What one rank holds, without the bytes: small, and equal for equal structures.

    Attributes:
        names: Tensors.
        specs: Name of the dtype and global shape of each.
        boxes: The part of each that is there; None for nothing.
    """

    names: tuple[str, ...]
    specs: tuple[tuple[str, tuple[int, ...]], ...]
    boxes: tuple[Region | None, ...]

    @cached_property
    def mark(self) -> str:
        """A digest: another one means another structure."""
        content = repr((self.names, self.specs, self.boxes)).encode()
        return hashlib.blake2b(content, digest_size=16).hexdigest()


def holding(tensors: Mapping[str, Held]) -> Holding:
    """What a rank with ``tensors`` holds."""
    return Holding(
        tuple(tensors),
        tuple((held.spec.dtype.name, held.spec.shape) for held in tensors.values()),
        tuple(held.box for held in tensors.values()),
    )


class Replica(NamedTuple):
    """A box that several ranks hold, which must be equal on all of them."""

    name: str
    box: Region
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SavePlan:
    """Who stores what.

    Attributes:
        specs: Every tensor, in sorted order.
        targets: Every box that is stored, each element in exactly one, by tensor.
        replicas: Every box that more than one rank holds.
    """

    specs: Mapping[str, TensorSpec]
    targets: Sequence[Target]
    replicas: Sequence[Replica]

    def of(self, rank: int) -> list[int]:
        """Numbers of the targets that a rank stores."""
        return [number for number, target in enumerate(self.targets) if target.rank == rank]

    def compared(self, rank: int) -> list[Replica]:
        """Boxes of a rank that others hold as well, in the order of their hashes."""
        return [replica for replica in self.replicas if rank in replica.ranks]


def plan_save(holdings: Sequence[Holding], *, largest: int | None = None) -> SavePlan:
    """The plan of the ranks that hold ``holdings``, in rank order.

    Tensors that repeat (layers, experts) are cut once and shared out again under the next name.

    Args:
        holdings: What each rank holds.
        largest: Bytes of a stored box at most; None leaves a rank's share in one piece.

    Raises:
        RequestError: Ranks disagree on dtype or shape of a tensor.
        LayoutError: The boxes of a tensor do not make up all of it, or overlap.
    """
    specs, columns = _columns(holdings)
    cuts: dict[object, _Cut] = {}
    targets: list[Target] = []
    replicas: list[Replica] = []
    for turn, name in enumerate(sorted(specs)):
        spec, ranks, boxes = specs[name], *columns[name]
        cut = cuts.get((spec, ranks, boxes))
        if cut is None:
            cut = cuts[spec, ranks, boxes] = _cut(name, spec, ranks, boxes, largest)
        count = len(cut.boxes)
        targets += [
            Target(name, spec, box, owners[turn % len(owners)], part, count)
            for part, (box, owners) in enumerate(cut.boxes)
        ]
        replicas += [Replica(name, box, holders) for box, holders in cut.replicated]
    return SavePlan({name: specs[name] for name in sorted(specs)}, targets, replicas)


class _Cut(NamedTuple):
    """A tensor's stored boxes with those who store them in turn, and its replicated boxes."""

    boxes: list[tuple[Region, tuple[int, ...]]]
    replicated: list[tuple[Region, tuple[int, ...]]]


_Column = tuple[tuple[int, ...], tuple[Region | None, ...]]
"""Ranks that have a tensor in their state, and the box that each holds."""


def _columns(
    holdings: Sequence[Holding],
) -> tuple[dict[str, TensorSpec], dict[str, _Column]]:
    """Spec and column of every tensor; ranks of one structure are taken together."""
    alike: dict[object, list[int]] = {}
    for rank, found in enumerate(holdings):
        alike.setdefault((found.names, found.specs), []).append(rank)
    specs: dict[str, TensorSpec] = {}
    columns: dict[str, _Column] = {}
    for members in alike.values():
        ranks = tuple(members)
        first = holdings[ranks[0]]
        rows = zip(*(holdings[rank].boxes for rank in ranks), strict=True)
        for name, (dtype, shape), boxes in zip(first.names, first.specs, rows, strict=True):
            spec = TensorSpec(DTYPES[dtype], shape)
            if specs.setdefault(name, spec) != spec:
                others = columns[name][0]
                raise RequestError(
                    f"tensor {name!r} is {dtype} {list(shape)} on rank {ranks[0]} and "
                    f"{specs[name].dtype.name} {list(specs[name].shape)} on rank {others[0]}; tensors "
                    "that differ need names that differ"
                )
            before = columns.get(name, ((), ()))
            columns[name] = (before[0] + ranks, before[1] + boxes)
    return specs, columns


def _cut(
    name: str,
    spec: TensorSpec,
    ranks: tuple[int, ...],
    boxes: tuple[Region | None, ...],
    largest: int | None,
) -> _Cut:
    holders: dict[Region, list[int]] = {}
    for rank, box in zip(ranks, boxes, strict=True):
        if box is not None and box.numel:
            holders.setdefault(box, []).append(rank)
    _check_cover(name, spec, holders)
    itemsize = spec.dtype.itemsize
    stored: list[tuple[Region, tuple[int, ...]]] = []
    replicated = []
    for box, members in sorted(holders.items()):
        for share in divided(box, tuple(members), itemsize):
            owners = share.ranks if share.part is None else (share.ranks[share.part],)
            stored += [(slab, owners) for slab in _slabs(share.box, itemsize, largest)]
        if len(members) > 1:
            replicated.append((box, tuple(members)))
    return _Cut(stored, replicated)


def _slabs(box: Region, itemsize: int, largest: int | None) -> Iterator[Region]:
    return box.slabs(box.numel if largest is None else largest // itemsize)


def _check_cover(name: str, spec: TensorSpec, holders: Mapping[Region, Sequence[int]]) -> None:
    found = sum(box.numel for box in holders)
    if found < spec.numel:
        raise LayoutError(
            f"tensor {name!r} {list(spec.shape)}: the ranks hold {found} of its {spec.numel} elements; "
            "does every rank that has a part take part in the save?"
        )
    boxes = sorted(holders)
    pair = _overlap(boxes)
    if pair is not None:
        one, other = (boxes[n] for n in pair)
        raise LayoutError(
            f"tensor {name!r} {list(spec.shape)}: the boxes of ranks {holders[one][0]} "
            f"({one.start} to {one.stop}) and {holders[other][0]} ({other.start} to {other.stop}) "
            "overlap in part; replicas must be whole"
        )


def _overlap(boxes: Sequence[Region]) -> tuple[int, int] | None:
    """Two different boxes that share an element."""
    if len(boxes) < 2:
        return None
    starts = np.array([box.start for box in boxes]).reshape(len(boxes), -1)
    stops = np.array([box.stop for box in boxes]).reshape(len(boxes), -1)
    for n in range(1, len(boxes)):
        shared = (starts[:n] < stops[n]) & (starts[n] < stops[:n])
        found = np.flatnonzero(shared.all(1))
        if len(found):
            return int(found[0]), n
    return None
