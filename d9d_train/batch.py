"""A micro-batch as one rank sees it."""

from dataclasses import dataclass

import torch

IGNORED = -100
"""A label that counts for nothing."""


@dataclass(frozen=True)
class Batch:
    """B packed sequences; of each, the S tokens that this rank works on (all T of them without cp).

    A token at index i of its sequence attends to j where ``starts[i] <= j <= i``: its own document,
    causally.

    Attributes:
        tokens: [B, S] int64.
        labels: [B, S] int64, the token after each; `IGNORED` where nothing is to be learnt; None to ask
            a model for logits.
        index: [S] int64, where each token stands in its sequence; equal for all sequences.
        starts: [B, T] int64, where in the sequence each token's document starts.
        samples: [B] int64, the global number of each sequence, which keys random numbers.
        packed: Whether any document starts past index 0; known without asking a device.
    """

    tokens: torch.Tensor
    labels: torch.Tensor | None
    index: torch.Tensor
    starts: torch.Tensor
    samples: torch.Tensor
    packed: bool

    @property
    def positions(self) -> torch.Tensor:
        """[B, S] int64: each token's position in its document."""
        return self.index - self.starts[:, self.index]
