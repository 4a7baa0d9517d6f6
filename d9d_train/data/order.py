"""Who works on what: samples of a step over dp, tokens of a sequence over cp."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from d9d_ckpt.errors import LayoutError
from d9d_train.batch import Batch

Order = Literal["contiguous", "head_tail"]


@dataclass(frozen=True)
class Share:
    """A reader's part of every step.

    Attributes:
        global_batch: Sequences of a step.
        microbatches: Parts of a reader's share.
        size: Readers, the dp ranks.
        rank: This one.

    Raises:
        LayoutError: The batch does not divide.
    """

    global_batch: int
    microbatches: int
    size: int
    rank: int

    def __post_init__(self) -> None:
        if self.global_batch % (self.size * self.microbatches):
            raise LayoutError(
                f"global batch {self.global_batch} does not divide over {self.size} dp ranks x "
                f"{self.microbatches} micro-batches = {self.size * self.microbatches}"
            )

    def numbers(self, first: int) -> list[range]:
        """Samples of each micro-batch, in a step that begins with sample ``first``.

        Readers have consecutive shares, micro-batches are consecutive parts of them.
        """
        count = self.global_batch // (self.size * self.microbatches)
        own = first + self.rank * self.microbatches * count
        return [range(own + m * count, own + (m + 1) * count) for m in range(self.microbatches)]


def token_index(seq_len: int, cp_size: int, cp_rank: int, order: Order) -> torch.Tensor:
    """Which tokens of a sequence a cp rank works on, [seq_len / cp_size] int64, ascending.

    Args:
        seq_len: Tokens of a sequence.
        cp_size: Ranks that share it.
        cp_rank: This one.
        order: ``contiguous``: the rank-th of cp_size chunks. ``head_tail``: of 2 x cp_size chunks the
            rank-th from the front and the rank-th from the back, so that causal attention costs all
            ranks the same.

    Raises:
        LayoutError: The sequence does not divide into such chunks.
    """
    chunks = cp_size if order == "contiguous" else 2 * cp_size
    if seq_len % chunks:
        raise LayoutError(
            f"sequence of {seq_len} tokens does not divide into {chunks} chunks ({order} over "
            f"cp={cp_size})"
        )
    index = torch.arange(seq_len).view(chunks, -1)
    if order == "contiguous":
        return index[cp_rank]
    return index[[cp_rank, chunks - 1 - cp_rank]].flatten()


def split(full: Batch, index: torch.Tensor) -> Batch:
    """The part of whole sequences that stands at ``index``, [S] int64."""
    return replace(
        full,
        tokens=full.tokens[:, index],
        labels=None if full.labels is None else full.labels[:, index],
        index=full.index[index],
    )
