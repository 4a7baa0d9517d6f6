"""Head-tail order: of 2 cp chunks of a sequence, rank r works on the r-th and the r-th from the end.

Causal attention of the two together costs every rank the same.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of a sequence.

    Attributes:
        rows: Where a rank keeps them.
        first: Index of the first in the sequence.
    """

    rows: slice
    first: int

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def end(self) -> int:
        """Index past the last in the sequence."""
        return self.first + len(self)

    def indices(self, device: torch.device) -> torch.Tensor:
        """[tokens] int64: where they are in the sequence."""
        return torch.arange(self.first, self.end, device=device)


def spans(length: int, size: int, rank: int, longest: int | None = None) -> list[Span]:
    """The tokens of a rank, in its order.

    Spans of two ranks, or of one, are either the same tokens or have none in common.

    Args:
        length: Tokens of a rank; even.
        size: Of cp.
        rank: In cp.
        longest: Tokens of a span; by default a whole chunk.
    """
    chunk = length // 2
    step = longest or chunk
    return [
        Span(slice(kept + at, min(kept + at + step, kept + chunk)), index * chunk + at)
        for kept, index in ((0, rank), (chunk, 2 * size - 1 - rank))
        for at in range(0, chunk, step)
    ]


def in_order(x: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Tokens along ``dim`` as in the sequence, from those of all ranks one after the other."""
    heads, tails = torch.unflatten(x, dim, (size, 2, -1)).unbind(dim + 1)
    return torch.cat([heads, tails.flip(dim)], dim).flatten(dim, dim + 1)


def visible(rows: torch.Tensor, keys: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """[B, rows, keys] bool: which keys a token attends to.

    Args:
        rows: [rows], indices of the tokens.
        keys: [keys], indices of the keys.
        starts: [B, rows], where each token's document starts.
    """
    return (starts[:, :, None] <= keys) & (keys <= rows[:, None])
