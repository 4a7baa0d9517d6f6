"""What passes between the ops and their callers."""

from typing import NamedTuple, Protocol

from torch import Tensor


class Reducer(Protocol):
    """Sums and maxima over the ranks that hold the other shards, in place.

    Every rank calls the same methods in the same order with tensors of one shape; an
    implementation is usually two `all_reduce` calls on one process group.
    """

    def max_(self, values: Tensor) -> None:
        """Replace `values` by the elementwise maximum over the ranks."""

    def sum_(self, values: Tensor) -> None:
        """Replace `values` by the sum over the ranks."""


class Route(NamedTuple):
    """Where each of the `tokens * k` choices goes: rows ordered by expert, then by token.

    Choices without an expert (an id outside `[0, experts)`) keep their order behind all others,
    past `offsets[-1]`, so `source` and `position` are permutations whatever is dropped.

    Attributes:
        counts: int32 [experts], rows of each expert.
        offsets: int32 [experts], where each expert's rows end, as `grouped_mm` takes them.
        source: int32 [tokens * k], the flat choice `token * k + slot` in each row.
        position: int32 [tokens, k], the row of each choice.
    """

    counts: Tensor
    offsets: Tensor
    source: Tensor
    position: Tensor


class Place(NamedTuple):
    """Which elements of a whole tensor a local one holds: rows of `columns`, `pitch` apart.

    Rounding noise is drawn for the element of the whole tensor, so that the same element is rounded
    alike on any number of ranks.

    Attributes:
        offset: the global number of the first element; numbers of all tensors of a run differ.
        columns: elements of a local row.
        pitch: global numbers between the starts of two rows.
    """

    offset: int
    columns: int
    pitch: int
