"""A wanted region of a graph as strided copies from its leaves, and what makes two graphs alike."""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from d9d_ckpt.errors import MappingError
from d9d_ckpt.graph.node import Leaf, Node
from d9d_ckpt.graph.ops import Cast, Dequantize, Zeros
from d9d_ckpt.graph.pieces import Digit, Piece, row_major
from d9d_ckpt.tensors import DType, Region

ZERO = -1
"""Leaf number of a copy that fills with zeros."""


class Scaling(NamedTuple):
    """How quantised elements get their values.

    Attributes:
        shape: Shape of the weight.
        block: Rows and columns under one scale.
        dtype: Dtype of the scales.
    """

    shape: tuple[int, ...]
    block: tuple[int, int]
    dtype: DType


class Copy(NamedTuple):
    """One strided copy, all in elements.

    Attributes:
        leaf: Which leaf slot of the graph it reads, or ``ZERO``.
        source: First element of the leaf.
        target: First element of the dense row-major target.
        digits: Counts with strides on the leaf and on the target, outermost first.
        casts: Dtypes that each element goes through on the way, in order.
        scaling: For quantised elements; the scales are the leaf after this one.
    """

    leaf: int
    source: int
    target: int
    digits: tuple[Digit, ...]
    casts: tuple[DType, ...]
    scaling: Scaling | None = None


def pushdown(node: Node, region: Region) -> list[Copy]:
    """The copies that fill a dense row-major tensor with ``node[region]``, each element once."""
    if not region.numel:
        return []
    strides, dense = row_major(node.shape), row_major(region.shape)
    digits = tuple(
        Digit(n, w, t) for n, w, t in zip(region.shape, strides, dense, strict=True) if n > 1
    )
    base = sum(a * w for a, w in zip(region.start, strides, strict=True))
    copies: list[Copy] = []
    todo = [_Pending(node, 0, Piece(base, 0, digits), (), None)]
    while todo:
        at, slot, piece, casts, scaling = todo.pop()
        if isinstance(at, Leaf | Zeros):
            merged = piece.merged()
            number = slot if isinstance(at, Leaf) else ZERO
            copies.append(Copy(number, merged.base, merged.target, merged.digits, casts, scaling))
            continue
        if isinstance(at, Cast):
            casts = (at.dtype, *casts)
        elif isinstance(at, Dequantize):
            scaling = Scaling(at.shape, at.block, at.inputs[1].dtype)
        slots = _slots(at, slot)
        todo.extend(_Pending(at.inputs[k], slots[k], p, casts, scaling) for k, p in at.pull(piece))
    return copies


class _Pending(NamedTuple):
    """A piece of a node on its way down."""

    node: Node
    slot: int
    piece: Piece
    casts: tuple[DType, ...]
    scaling: Scaling | None


def _slots(node: Node, first: int) -> list[int]:
    """Number of the first leaf slot below each input."""
    out = []
    for x in node.inputs:
        out.append(first)
        first += x.width
    return out


class Structures:
    """Tells which graphs are alike but for their leaves, so that one push-down serves all of them.

    A memo over nodes: keep one for as long as the graphs that it has seen.
    """

    def __init__(self) -> None:
        self._forms: dict[Hashable, int] = {}
        self._seen: dict[Node, tuple[int, tuple[Leaf, ...]]] = {}

    def of(self, node: Node) -> tuple[int, tuple[Leaf, ...]]:
        """``(form, leaves)``: a number equal for like graphs, and the leaf of each slot."""
        todo = [node]
        while todo:
            at = todo[-1]
            if at in self._seen:
                todo.pop()
                continue
            waiting = [x for x in at.inputs if x not in self._seen]
            if waiting:
                todo.extend(waiting)
                continue
            below = [self._seen[x] for x in at.inputs]
            key = (at.form, tuple(form for form, _ in below))
            form = self._forms.setdefault(key, len(self._forms))
            leaves = (at,) if isinstance(at, Leaf) else _joined(below)
            self._seen[at] = (form, leaves)
            todo.pop()
        return self._seen[node]


def _joined(below: list[tuple[int, tuple[Leaf, ...]]]) -> tuple[Leaf, ...]:
    if len(below) == 1:
        return below[0][1]
    return tuple(leaf for _, leaves in below for leaf in leaves)


def invert(node: Node, output: Node) -> dict[Hashable, Node]:
    """Each leaf below ``node``, by its source, as an expression of ``output``, a tensor equal to it.

    Raises:
        MappingError: An op on the way loses elements, or a leaf is used twice.
    """
    found: dict[Hashable, Node] = {}
    todo = [(node, output)]
    while todo:
        at, expression = todo.pop()
        if isinstance(at, Leaf):
            if at.source in found:
                raise MappingError(
                    f"{at.source!r} is used twice, so the mapping cannot be reversed"
                )
            found[at.source] = expression
        elif not isinstance(at, Zeros):
            todo.extend(zip(at.inputs, at.inverse(expression), strict=True))
    return found


def leaves(nodes: Iterable[Node]) -> set[Hashable]:
    """The sources of all leaves below ``nodes``."""
    structures = Structures()
    return {leaf.source for node in nodes for leaf in structures.of(node)[1]}
