"""Graphs to columns: each structure is pushed down once and its copies are renumbered for the rest."""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from d9d_ckpt.errors import CkptError
from d9d_ckpt.graph.node import Leaf, Node
from d9d_ckpt.graph.pieces import Digit
from d9d_ckpt.graph.pushdown import ZERO, Copy, Structures, pushdown
from d9d_ckpt.plan.plan import SCALE, SOURCE, TARGET, Columns, Movement, Plan
from d9d_ckpt.tensors import Chunk, Region, Target


class Request(NamedTuple):
    """A tensor that is wanted in boxes.

    Attributes:
        name: The tensor.
        node: Its expression; every leaf's source is a `Chunk`.
        boxes: The wanted boxes.
        ranks: The rank of each box.
    """

    name: str
    node: Node
    boxes: tuple[Region, ...]
    ranks: Sequence[int]


def lower(requests: Iterable[Request]) -> Plan:
    """The plan that fills every box of every request."""
    lowering = _Lowering()
    for request in requests:
        lowering.add(request)
    return lowering.finish()


class _Lowering:
    """The tables of a plan while it is being made."""

    def __init__(self) -> None:
        self._structures = Structures()
        self._templates: dict[tuple[int, tuple[Region, ...]], Columns] = {}
        self._movements: dict[Movement, int] = {}
        self._sources: dict[int, int] = {}
        self._chunks: list[Chunk] = []
        self._targets: list[Target] = []
        self._rows: list[Columns] = []

    def add(self, request: Request) -> None:
        form, leaves = self._structures.of(request.node)
        key = (form, request.boxes)
        template = self._templates.get(key)
        if template is None:
            template = self._template(request, leaves)
            self._templates[key] = template
        if len(template):
            rows = template.copy()
            rows[:, TARGET] += len(self._targets)
            numbers = np.fromiter((self._source(leaf) for leaf in leaves), np.int64, len(leaves))
            for column in (SOURCE, SCALE):
                real = rows[:, column] >= 0
                rows[real, column] = numbers[rows[real, column]]
            self._rows.append(rows)
        count = len(request.boxes)
        self._targets.extend(
            Target(request.name, request.node.spec, box, rank, index, count)
            for index, (box, rank) in enumerate(zip(request.boxes, request.ranks, strict=True))
        )

    def finish(self) -> Plan:
        rows = np.concatenate(self._rows) if self._rows else np.zeros((0, SCALE + 1), np.int64)
        return Plan(self._targets, self._chunks, list(self._movements), rows)

    def _source(self, leaf: Leaf) -> int:
        # Chunks are told apart by identity: hashing one means hashing all of its digests.
        chunk: Hashable = leaf.source
        number = self._sources.get(id(chunk))
        if number is None:
            if not isinstance(chunk, Chunk):
                raise TypeError(f"leaf {chunk!r} is no chunk")
            number = self._sources[id(chunk)] = len(self._chunks)
            self._chunks.append(chunk)
        return number

    def _template(self, request: Request, leaves: Sequence[Leaf]) -> Columns:
        rows: list[tuple[int, ...]] = []
        for index, box in enumerate(request.boxes):
            try:
                copies = pushdown(request.node, box)
            except CkptError as error:
                raise type(error)(f"tensor {request.name!r}: {error}") from error
            rows.extend(self._row(index, copy, request.node, leaves) for copy in copies)
        return np.array(rows, np.int64).reshape(-1, SCALE + 1)

    def _row(self, index: int, copy: Copy, node: Node, leaves: Sequence[Leaf]) -> tuple[int, ...]:
        to = node.dtype.itemsize
        dtype = node.dtype if copy.leaf == ZERO else leaves[copy.leaf].dtype
        into = dtype.itemsize
        digits = tuple(Digit(n, w * into, t * to) for n, w, t in copy.digits)
        casts = () if copy.leaf == ZERO else copy.casts
        move = Movement(digits, dtype, casts, copy.scaling)
        number = self._movements.setdefault(move, len(self._movements))
        scale = -1 if copy.scaling is None else copy.leaf + 1
        return index, copy.leaf, copy.source * into, copy.target * to, number, scale
