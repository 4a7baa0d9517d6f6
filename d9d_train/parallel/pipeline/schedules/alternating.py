"""One forward pass and one backward pass in turn: 1F1B, interleaved 1F1B, ZB1P."""

from collections.abc import Iterator
from dataclasses import dataclass

from d9d_ckpt.errors import LayoutError
from d9d_train.parallel.pipeline.actions import Action, Kind, Program, program
from d9d_train.parallel.pipeline.schedules.needs import (
    check_microbatches,
    microbatches_a_round,
    stages_a_rank,
)


def one_f_one_b(stages: int, ranks: int, microbatches: int) -> Program:
    """Computations of 1F1B, one stage a rank; rank r holds at most ``ranks`` - r micro-batches.

    Raises:
        LayoutError: Not one stage a rank, or no micro-batch.
    """
    check_microbatches("1f1b", microbatches)
    stages_a_rank("1f1b", stages, ranks, exactly=1)
    return program(
        _Turns(rank, ranks, 1, microbatches, microbatches).whole(ahead=ranks - 1 - rank)
        for rank in range(ranks)
    )


def interleaved(stages: int, ranks: int, microbatches: int) -> Program:
    """Computations of interleaved 1F1B, several stages a rank: a smaller bubble for more messages.

    Micro-batches go through a rank's stages in rounds, as many of them at once as there are ranks, or
    more where they do not divide. https://arxiv.org/abs/2104.04473

    Raises:
        LayoutError: Not the same number of stages on every rank, or one, or micro-batches that do not
            fall into equal rounds.
    """
    check_microbatches("interleaved", microbatches)
    local = stages_a_rank("interleaved", stages, ranks)
    if local < 2:
        raise LayoutError(
            "pipeline: interleaved puts at least 2 stages on a rank, so "
            f"{stages} stages do not go on {ranks} ranks; with 1 a rank it is 1f1b"
        )
    a_round = microbatches_a_round("interleaved", ranks, microbatches)
    return program(
        _Turns(rank, ranks, local, a_round, microbatches).whole(
            ahead=(local - 1) * a_round + 2 * (ranks - 1 - rank)
        )
        for rank in range(ranks)
    )


def zb1p(stages: int, ranks: int, microbatches: int) -> Program:
    """Computations of ZB1P: 1F1B, or interleaved, whose weights' parts wait until the bubble at the end.

    With one stage a rank, every rank holds at most ``ranks`` micro-batches.
    https://arxiv.org/abs/2401.10241

    Raises:
        LayoutError: Not the same number of stages on every rank, no micro-batch, or, with several stages
            a rank, micro-batches that do not fall into equal rounds.
    """
    check_microbatches("zb1p", microbatches)
    local = stages_a_rank("zb1p", stages, ranks)
    a_round = microbatches if local == 1 else microbatches_a_round("zb1p", ranks, microbatches)
    return program(
        _Turns(rank, ranks, local, a_round, microbatches).split(
            ahead=(local - 1) * a_round + ranks - 1 - rank, behind=rank
        )
        for rank in range(ranks)
    )


@dataclass(frozen=True, slots=True)
class _Turns:
    """The order in which micro-batches go through the stages of a rank, in rounds of ``a_round``."""

    rank: int
    ranks: int
    local: int
    a_round: int
    microbatches: int

    @property
    def passes(self) -> int:
        return self.local * self.microbatches

    def whole(self, ahead: int) -> Iterator[Action]:
        """Forward passes stay ``ahead`` of whole backward passes by that many, and one in each turn."""
        yield from map(self._forward, range(min(ahead, self.passes)))
        for turn in range(self.passes):
            if ahead + turn < self.passes:
                yield self._forward(ahead + turn)
            yield self._backward(turn, Kind.BACKWARD)

    def split(self, ahead: int, behind: int) -> Iterator[Action]:
        """The same with split backward passes, the weights' parts ``behind`` by that many."""
        yield from map(self._forward, range(min(ahead, self.passes)))
        for turn in range(self.passes + behind):
            if ahead + turn < self.passes:
                yield self._forward(ahead + turn)
            if turn < self.passes:
                yield self._backward(turn, Kind.INPUT)
            if turn >= behind:
                yield self._backward(turn - behind, Kind.WEIGHT)

    def _forward(self, number: int) -> Action:
        turn, microbatch = self._turn(number)
        return Action(turn * self.ranks + self.rank, Kind.FORWARD, microbatch)

    def _backward(self, number: int, kind: Kind) -> Action:
        turn, microbatch = self._turn(number)
        return Action((self.local - 1 - turn) * self.ranks + self.rank, kind, microbatch)

    def _turn(self, number: int) -> tuple[int, int]:
        """Which of the rank's stages it is the turn of, and the micro-batch."""
        turns, at = divmod(number, self.a_round)
        rounds, turn = divmod(turns, self.local)
        return turn, rounds * self.a_round + at
