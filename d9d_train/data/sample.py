"""One packed sequence, and the numbered stream that it comes from."""

from dataclasses import dataclass
from typing import Protocol

import torch

from d9d_train.batch import IGNORED


@dataclass(frozen=True)
class Sample:
    """A sequence of T tokens.

    Attributes:
        tokens: [T] int64.
        labels: [T] int64, the token after each; `IGNORED` where nothing is to be learnt.
        starts: [T] int64, the index in the sequence where each token's document starts.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    starts: torch.Tensor


class Stream(Protocol):
    """Samples numbered 0, 1, 2, ...: the same number is the same sample, whoever asks and when."""

    @property
    def length(self) -> int:
        """Samples of one epoch; 0 where there is no such thing."""
        ...

    def sample(self, number: int) -> Sample:
        """Sample ``number``, of any epoch."""
        ...


def packed(
    tokens: torch.Tensor, begins: torch.Tensor, counted: torch.Tensor | None = None
) -> Sample:
    """A sequence of T tokens out of T + 1 that follow each other.

    The last token of a document predicts nothing. What a cut document goes on with starts at position
    0 of the next sequence.

    Args:
        tokens: [T + 1] int64; of the last one only the label is used.
        begins: [T + 1] bool, whether a token is the first of its document. What comes first in a
            sequence begins one there in any case.
        counted: [T + 1] bool, whether a token is to be predicted; None for all of them.
    """
    index = torch.arange(len(tokens) - 1)
    starts = torch.where(begins[:-1], index, 0).cummax(0).values
    learnt = ~begins[1:] if counted is None else counted[1:] & ~begins[1:]
    return Sample(tokens[:-1], torch.where(learnt, tokens[1:], IGNORED), starts)
