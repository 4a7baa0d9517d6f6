"""Dropout that depends on what is dropped, not on who holds it."""

import torch
from torch import nn

from d9d_train import rng
from d9d_train.batch import Batch
from d9d_train.mesh import Axis


class Dropout(nn.Module):
    """Zeros at random channels of what a block adds to the residual stream.

    A channel's fate is a function of (seed, name, step, sequence, index in it, channel), equal for any
    split of sequences or batches, and at every recomputation.

    Args:
        rate: Share of channels that become zero; the others grow by 1 / (1 - rate).
        seed: Of the run.
        name: Of the place in the model.

    Attributes:
        offset: Seam of the loop, which sets it before each step (`set_step`), 0-D int64.
        tokens: Seam of sequence parallelism: the axis over which the tokens of a batch are cut further.
    """

    def __init__(self, rate: float, seed: int, name: str) -> None:
        super().__init__()
        self.rate, self.seed, self.name = rate, seed, name
        self.stream = rng.stream(f"dropout.{name}")
        self.set_step(0)
        self.tokens: Axis | None = None

    def set_step(self, step: int) -> None:
        """Draw the numbers of a step: they start at an index of its own.

        A tensor, since a number that changes makes a compiled layer compile again.
        """
        starts = rng.stream(f"dropout.{self.name}.step")
        with torch.device("cpu"):
            self.offset = rng.bits(self.seed, starts, torch.tensor(step))

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[B, S, H] from the same; as it is when evaluating."""
        if not self.rate or not self.training:
            return x
        index = self._elements(x, batch) + self.offset
        kept = rng.uniform(self.seed, self.stream, index) >= self.rate
        return torch.where(kept, x * (1 / (1 - self.rate)), 0)

    def _elements(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[B, S, H] int64: a number for each element that no other element of the run's data has."""
        index = batch.index
        if self.tokens is not None:
            index = index.chunk(self.tokens.size)[self.tokens.rank]
        length, channels = batch.starts.shape[1], x.shape[-1]
        token = batch.samples[:, None] * length + index
        return token[..., None] * channels + torch.arange(channels, device=x.device)


def set_step(model: nn.Module, step: int) -> None:
    """Let every dropout of a model draw the numbers of ``step``."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.set_step(step)
