"""Token embedding."""

import torch
from torch import nn
from torch.nn import functional

from d9d_train.layers.weights import local


class Embedding(nn.Module):
    """A row for each token.

    Attributes:
        weight: [vocabulary, hidden].
        first_row: Seam of tensor parallelism: the token of the first local row, where this rank holds a
            part of the vocabulary. The embedding of a token is then the sum over ranks.
    """

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))
        self.first_row: int | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, S, H] from int64 [B, S]; zeros for tokens of other ranks."""
        weight = local(self.weight)
        if self.first_row is None:
            return functional.embedding(ids, weight)
        row = ids - self.first_row
        outside = (row < 0) | (row >= weight.shape[0])
        found = functional.embedding(row.masked_fill(outside, 0), weight)
        return found.masked_fill(outside[..., None], 0)
