"""The frozen nodes of a tensor graph: shared by reference, never changed, no data."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from d9d_ckpt.graph.pieces import Piece
from d9d_ckpt.tensors import DType, TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A tensor that is not there yet.

    Attributes:
        spec: Dtype and shape of the result.
        inputs: The nodes it is made of.
        width: Leaf slots below it, counted once per path; numbers the leaves of a structure.
    """

    spec: TensorSpec
    inputs: tuple["Node", ...]
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return self.spec.shape

    @property
    def dtype(self) -> DType:
        """Dtype of the result."""
        return self.spec.dtype

    def pull(self, piece: Piece) -> Iterator[tuple[int, Piece]]:
        """The pieces of inputs, by position, that make up ``piece`` of this node."""
        raise NotImplementedError

    def inverse(self, output: "Node") -> tuple["Node", ...]:
        """Each input as an expression of ``output``, a tensor equal to this node.

        Raises:
            MappingError: The op loses elements.
        """
        raise NotImplementedError

    @property
    def form(self) -> Hashable:
        """All of the op but its inputs: equal forms over equal inputs pull alike."""
        return (type(self).__name__, self.spec)


@dataclass(frozen=True, slots=True, eq=False)
class Leaf(Node):
    """A dense row-major tensor that lies somewhere.

    Attributes:
        source: What identifies the bytes; the graph never looks inside.
    """

    source: Hashable
