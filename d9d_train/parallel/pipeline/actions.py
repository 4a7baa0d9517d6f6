"""What pipeline ranks do, action by action, in the text form of torch's schedules."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from d9d_ckpt.errors import UsageError


class Kind(StrEnum):
    """What an action does; its value is its text.

    ``SEND_F`` sends a stage's output and ``RECV_F`` receives its input; ``SEND_B`` sends the gradient of
    its input and ``RECV_B`` receives that of its output.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    """Backward as far as the stage's input."""
    WEIGHT = "W"
    """Backward of the stage's weights, after `INPUT`."""
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    """Gather the stage's parameters."""
    RESHARD = "RESHARD"
    """Free the gathered parameters."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """Reduce the stage's gradients over its replicas."""

    # Enum's own is a Python function, and a large program hashes its kinds ten million times.
    __hash__ = str.__hash__


GRADIENTS = frozenset({Kind.BACKWARD, Kind.INPUT})
"""Those that give the gradient of a stage's input."""

SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
MESSAGES = SENDS | {Kind.RECV_F, Kind.RECV_B}

OF_STAGE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})
"""Those that concern a stage and none of its micro-batches."""

_COUNTERPARTS = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}

_KINDS = frozenset(Kind)
_TEXT = re.compile(r"(\d+)([A-Z]+(?:_[A-Z]+)?)(\d*)")
_PAIR = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One thing that the rank of a stage does; ``str`` gives ``1F3``, ``0SEND_F3``, ``2UNSHARD``.

    A named tuple, because a program of 128 ranks and 512 micro-batches has a million of them: they are
    made and hashed in half the time of a dataclass.

    Attributes:
        stage: From 0, over the whole pipeline.
        kind: What is done.
        microbatch: Of which micro-batch, from 0; None for what concerns the whole stage.
    """

    stage: int
    kind: Kind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @property
    def is_message(self) -> bool:
        """Whether it sends or receives."""
        return self.kind in MESSAGES

    @property
    def far(self) -> int:
        """Of a message, the stage at the other end."""
        return self.stage + _COUNTERPARTS[self.kind][1]

    @property
    def counterpart(self) -> "Action":
        """Of a message, the other end of it: ``0SEND_F3`` and ``1RECV_F3`` are each other's."""
        return Action(self.far, _COUNTERPARTS[self.kind][0], self.microbatch)


def parse_action(text: str) -> Action:
    """The action that ``text`` says.

    Raises:
        UsageError: It says none; a micro-batch is missing, or given where none belongs.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None or match[2] not in _KINDS:
        raise UsageError(
            f"pipeline: {text!r} is no action; expected STAGE KIND MICRO-BATCH such as 1F3, "
            f"with a kind of {', '.join(Kind)}"
        )
    kind = Kind(match[2])
    if (not match[3]) != (kind in OF_STAGE):
        wanted = "no micro-batch" if kind in OF_STAGE else "a micro-batch"
        raise UsageError(f"pipeline: action {text.strip()!r}: {kind} takes {wanted}")
    return Action(int(match[1]), kind, int(match[3]) if match[3] else None)


@dataclass(frozen=True)
class Program:
    """What every pipeline rank does, in order; ``str`` gives a line of comma-separated cells a rank.

    Attributes:
        ranks: The actions of each rank.
        pairs: Forward and backward passes next to each other, messages aside, that a rank may do in
            either order or at once. Without messages they are one cell, ``(0F4;7B0)OVERLAP_F_B``.
    """

    ranks: tuple[tuple[Action, ...], ...]
    pairs: frozenset[tuple[Action, Action]] = frozenset()

    def __str__(self) -> str:
        if self.has_messages:
            return "\n".join(",".join(map(str, actions)) for actions in self.ranks)
        return "\n".join(",".join(self.texts(rank)) for rank in range(len(self.ranks)))

    def cells(self, rank: int) -> Iterator[tuple[Action, ...]]:
        """The actions of a rank; a pair without messages in it together, forward pass first."""
        actions, at = self.ranks[rank], 0
        if not self.pairs:
            yield from zip(actions, strict=True)
            return
        while at < len(actions):
            two = actions[at : at + 2]
            pair = next((order for order in (two, two[::-1]) if order in self.pairs), None)
            yield pair or (actions[at],)
            at += 2 if pair else 1

    def texts(self, rank: int) -> list[str]:
        """The text of each cell of a rank."""
        return [
            str(cell[0]) if len(cell) == 1 else f"({';'.join(map(str, cell))})OVERLAP_F_B"
            for cell in self.cells(rank)
        ]

    @property
    def has_messages(self) -> bool:
        """Whether there are any, as there must be between ranks."""
        return any(action.kind in MESSAGES for actions in self.ranks for action in actions)

    @cached_property
    def stages(self) -> int:
        """How many there are: one more than the highest."""
        return 1 + max((a.stage for actions in self.ranks for a in actions), default=-1)

    @cached_property
    def microbatches(self) -> int:
        """How many there are: one more than the highest."""
        numbers = (a.microbatch for actions in self.ranks for a in actions)
        return 1 + max((n for n in numbers if n is not None), default=-1)

    @cached_property
    def rank_of(self) -> Mapping[int, int]:
        """The rank that each stage is on."""
        return {a.stage: rank for rank, actions in enumerate(self.ranks) for a in actions}

    @property
    def computations(self) -> "Program":
        """The same without messages."""
        kept = (tuple(a for a in acts if a.kind not in MESSAGES) for acts in self.ranks)
        return Program(tuple(kept), self.pairs)

    @property
    def forward(self) -> "Program":
        """The same without everything that belongs to a backward pass."""
        kept = {Kind.FORWARD, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD}
        return Program(tuple(tuple(a for a in acts if a.kind in kept) for acts in self.ranks))


def program(
    ranks: Iterable[Iterable[Action]], pairs: Iterable[tuple[Action, Action]] = ()
) -> Program:
    """The program of these actions of each rank."""
    return Program(tuple(map(tuple, ranks)), frozenset(pairs))


def parse(text: str) -> Program:
    """The program that ``text`` says: a line a rank, commas between cells, empty ones ignored.

    Raises:
        UsageError: A cell says no action.
    """
    lines = [[cell for cell in line.split(",") if cell.strip()] for line in text.splitlines()]
    cells = [list(map(_parse_cell, line)) for line in lines]
    pairs = (cell for line in cells for cell in line if len(cell) == 2)
    return program(map(chain.from_iterable, cells), pairs)


def _parse_cell(text: str) -> tuple[Action] | tuple[Action, Action]:
    pair = _PAIR.fullmatch(text.strip())
    return (parse_action(pair[1]), parse_action(pair[2])) if pair else (parse_action(text),)


def taken(action: Action, stages: int) -> Action | None:
    """The message that brings what a computation works on; None at an end of the pipeline."""
    if action.kind is Kind.FORWARD and action.stage > 0:
        return Action(action.stage, Kind.RECV_F, action.microbatch)
    if action.kind in GRADIENTS and action.stage < stages - 1:
        return Action(action.stage, Kind.RECV_B, action.microbatch)
    return None


def given(action: Action, stages: int) -> Action | None:
    """The message that takes away what a computation results in; None at an end of the pipeline."""
    if action.kind is Kind.FORWARD and action.stage < stages - 1:
        return Action(action.stage, Kind.SEND_F, action.microbatch)
    if action.kind in GRADIENTS and action.stage > 0:
        return Action(action.stage, Kind.SEND_B, action.microbatch)
    return None
