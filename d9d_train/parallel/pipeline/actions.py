"""What pipeline ranks do, action by action, in the text form of torch's schedules."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

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

_TEXT = re.compile(r"(\d+)([A-Z]+(?:_[A-Z]+)?)(\d*)")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that the rank of a stage does; ``str`` gives ``1F3``, ``0SEND_F3``, ``2UNSHARD``.

    Attributes:
        stage: From 0, over the whole pipeline.
        kind: What is done.
        microbatch: Of which micro-batch, from 0; None for what concerns the whole stage.

    Raises:
        UsageError: A micro-batch is missing, or given where none belongs.
    """

    stage: int
    kind: Kind
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if (self.microbatch is None) != (self.kind in OF_STAGE):
            wanted = "no micro-batch" if self.kind in OF_STAGE else "a micro-batch"
            raise UsageError(f"pipeline: action {str(self)!r}: {self.kind} takes {wanted}")

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
        UsageError: It says none.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None or match[2] not in set(Kind):
        raise UsageError(
            f"pipeline: {text!r} is no action; expected STAGE KIND MICRO-BATCH such as 1F3, "
            f"with a kind of {', '.join(Kind)}"
        )
    return Action(int(match[1]), Kind(match[2]), int(match[3]) if match[3] else None)


@dataclass(frozen=True, slots=True)
class Program:
    """What every pipeline rank does, in order; ``str`` gives a line of comma-separated actions a rank.

    Attributes:
        ranks: The actions of each rank.
    """

    ranks: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, actions)) for actions in self.ranks)

    @property
    def stages(self) -> int:
        """How many there are: one more than the highest."""
        return 1 + max((a.stage for actions in self.ranks for a in actions), default=-1)

    @property
    def microbatches(self) -> int:
        """How many there are: one more than the highest."""
        numbers = (a.microbatch for actions in self.ranks for a in actions)
        return 1 + max((n for n in numbers if n is not None), default=-1)

    @property
    def rank_of(self) -> dict[int, int]:
        """The rank that each stage is on."""
        return {a.stage: rank for rank, actions in enumerate(self.ranks) for a in actions}

    @property
    def forward(self) -> "Program":
        """The same without everything that belongs to a backward pass."""
        kept = {Kind.FORWARD, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD}
        return Program(tuple(tuple(a for a in acts if a.kind in kept) for acts in self.ranks))


def program(ranks: Iterable[Iterable[Action]]) -> Program:
    """The program of these actions of each rank."""
    return Program(tuple(map(tuple, ranks)))


def parse(text: str) -> Program:
    """The program that ``text`` says: a line a rank, commas between actions, empty cells ignored.

    Raises:
        UsageError: A cell says no action.
    """
    return program(
        (parse_action(cell) for cell in line.split(",") if cell.strip())
        for line in text.splitlines()
    )


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
