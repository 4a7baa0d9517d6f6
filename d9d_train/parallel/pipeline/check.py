"""The proof that a program is complete, keeps every dependency, and ends."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product

from d9d_ckpt.errors import LayoutError
from d9d_train.parallel.pipeline.actions import (
    OF_STAGE,
    SENDS,
    Action,
    Kind,
    Program,
    given,
    taken,
)
from d9d_train.parallel.pipeline.lockstep import Lockstep

_BACKWARD = frozenset({Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.SEND_B, Kind.RECV_B})


def check(program: Program) -> None:
    """Prove that ranks which execute consecutive messages as one batch get to the end of a program.

    Raises:
        LayoutError: An action is missing, twice there, on a wrong rank, before what it needs, received
            in another order than sent, or in a circle of ranks that wait for each other; the message
            names it.
    """
    check_complete(program)
    _check_order(program)
    _check_wires(program)
    circle = Lockstep(program.ranks, program.rank_of).circle()
    if circle:
        raise LayoutError(f"pipeline: these ranks wait for each other: {waits(circle)}")


def check_complete(program: Program) -> None:
    """Each stage is on one rank, and does its part of every micro-batch once.

    Raises:
        LayoutError: With the action that is missing, double, or too much.
    """
    found = Counter(action for actions in program.ranks for action in actions)
    rank_of = _placed(program)
    expected = set(_expected(program, found, rank_of))
    for rank, actions in enumerate(program.ranks):
        for action in actions:
            if action.kind in OF_STAGE:
                continue
            if found[action] > 1:
                raise LayoutError(f"pipeline: rank {rank} has {action} {found[action]} times")
            if action not in expected:
                raise LayoutError(f"pipeline: rank {rank} has {action}, which has no place there")
    for action in expected - found.keys():
        raise LayoutError(f"pipeline: rank {rank_of[action.stage]} lacks {action}")


def waits(circle: dict[int, Action]) -> str:
    """Who waits where, for messages."""
    return "; ".join(
        f"rank {rank} in {message} for {message.counterpart}" for rank, message in circle.items()
    )


def _placed(program: Program) -> dict[int, int]:
    rank_of = program.rank_of
    for rank, actions in enumerate(program.ranks):
        for action in actions:
            if rank_of[action.stage] != rank:
                raise LayoutError(
                    f"pipeline: {action} is on rank {rank}, and other actions of stage "
                    f"{action.stage} on rank {rank_of[action.stage]}"
                )
    for stage in range(program.stages):
        if stage not in rank_of:
            raise LayoutError(f"pipeline: stage {stage} of {program.stages} is on no rank")
    return rank_of


def _expected(
    program: Program, found: Counter[Action], rank_of: dict[int, int]
) -> Iterator[Action]:
    """All computations and messages of a complete program, in no order."""
    stages = program.stages
    trains = any(action.kind in _BACKWARD for action in found)
    for stage, microbatch in product(range(stages), range(program.microbatches)):
        parts = [Kind.FORWARD, *(_backward(found, stage, microbatch) if trains else ())]
        for action in (Action(stage, part, microbatch) for part in parts):
            yield action
            for message in (taken(action, stages), given(action, stages)):
                if message and rank_of[message.far] != rank_of[stage]:
                    yield message


def _backward(found: Counter[Action], stage: int, microbatch: int) -> tuple[Kind, ...]:
    """Whole, or in two parts where either of them is there."""
    parts = Kind.INPUT, Kind.WEIGHT
    split = any(Action(stage, part, microbatch) in found for part in parts)
    return parts if split else (Kind.BACKWARD,)


def _check_order(program: Program) -> None:
    rank_of, stages = program.rank_of, program.stages
    there = {action for actions in program.ranks for action in actions}
    for rank, actions in enumerate(program.ranks):
        done: set[Action] = set()
        for action in actions:
            for need in _needs(action, stages, there, rank_of):
                if need not in done:
                    raise LayoutError(f"pipeline: rank {rank} has {action} before {need}")
            done.add(action)


def _check_wires(program: Program) -> None:
    """What one rank receives from another comes in the order in which it is sent: nothing else tells it apart."""
    rank_of = program.rank_of
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(program.ranks):
        for message in (action for action in actions if action.is_message):
            if message.kind in SENDS:
                sent[rank, rank_of[message.far]].append(message)
            else:
                received[rank_of[message.far], rank].append(message)
    for (source, target), sends in sent.items():
        for send, receive in zip(sends, received[source, target], strict=True):
            if receive != send.counterpart:
                raise LayoutError(
                    f"pipeline: rank {target} is in {receive} where rank {source} is in {send}: "
                    "messages between two ranks are received in the order in which they are sent"
                )


def _needs(
    action: Action, stages: int, there: set[Action], rank_of: dict[int, int]
) -> Iterator[Action]:
    """What the same rank does before an action."""
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.SEND_F | Kind.SEND_B:
            yield _source(action, there)
        case Kind.BACKWARD | Kind.INPUT:
            yield Action(stage, Kind.FORWARD, microbatch)
        case Kind.WEIGHT:
            yield Action(stage, Kind.INPUT, microbatch)
    arrival = taken(action, stages)
    if arrival is not None:
        send = arrival.counterpart
        yield _source(send, there) if rank_of[send.stage] == rank_of[stage] else arrival


def _source(send: Action, there: set[Action]) -> Action:
    """The computation whose result is sent."""
    if send.kind is Kind.SEND_F:
        return Action(send.stage, Kind.FORWARD, send.microbatch)
    split = Action(send.stage, Kind.INPUT, send.microbatch)
    return split if split in there else Action(send.stage, Kind.BACKWARD, send.microbatch)
