"""The proof that a program is complete, keeps every dependency, and ends."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

from d9d_ckpt.errors import LayoutError
from d9d_train.parallel.pipeline.actions import (
    GRADIENTS,
    MESSAGES,
    OF_STAGE,
    SENDS,
    Action,
    Kind,
    Program,
    taken,
)
from d9d_train.parallel.pipeline.lockstep import walk

_BACKWARD = frozenset({Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.SEND_B, Kind.RECV_B})
from d9d_train.parallel.pipeline.uncollected import uncollected


@uncollected()
def check(program: Program) -> None:
    """Prove that ranks which execute consecutive messages as one batch get to the end of a program.

    Raises:
        LayoutError: An action is missing, twice there, on a wrong rank, before what it needs, received
            in another order than sent, or in a circle of ranks that wait for each other; the message
            names it.
    """
    _check_pairs(program)
    _check_complete(program, messages=True)
    _check_order(program)
    _check_wires(program)
    circle = walk(program, whole=True).circle
    if circle:
        raise LayoutError(f"pipeline: these ranks wait for each other: {waits(circle)}")


def check_computations(program: Program) -> None:
    """Each stage is on one rank, and computes its part of every micro-batch once; there is no message.

    Raises:
        LayoutError: With the action that is missing, double, or too much.
    """
    _check_pairs(program)
    _check_complete(program, messages=False)


def _check_pairs(program: Program) -> None:
    """A pair is of two passes that one rank does one after the other."""
    following = {
        pair
        for actions in program.ranks
        for pair in pairwise(a for a in actions if program.pairs and not a.is_message)
    }
    for first, second in sorted(program.pairs):
        if first.kind is not Kind.FORWARD or second.kind not in GRADIENTS:
            raise LayoutError(
                f"pipeline: {first} and {second} overlap; expected a forward and a backward pass"
            )
        if following.isdisjoint({(first, second), (second, first)}):
            raise LayoutError(
                f"pipeline: {first} and {second} overlap and do not follow each other on a rank"
            )


def _check_complete(program: Program, *, messages: bool) -> None:
    found = Counter(action for actions in program.ranks for action in actions)
    rank_of = _placed(program)
    twice = next((a for a, n in found.items() if n > 1 and a.kind not in OF_STAGE), None)
    if twice:
        raise LayoutError(f"pipeline: rank {rank_of[twice.stage]} has {twice} {found[twice]} times")
    expected = set(_expected(program, found, rank_of))
    if not messages:
        expected = {action for action in expected if not action.is_message}
    beyond = min((a for a in found.keys() - expected if a.kind not in OF_STAGE), default=None)
    if beyond:
        raise LayoutError(
            f"pipeline: rank {rank_of[beyond.stage]} has {beyond}, which has no place there"
        )
    missing = min(expected - found.keys(), default=None)
    if missing:
        raise LayoutError(f"pipeline: rank {rank_of[missing.stage]} lacks {missing}")


def waits(circle: Mapping[int, Action]) -> str:
    """Who waits where, for messages."""
    return "; ".join(
        f"rank {rank} in {message} for {message.counterpart}" for rank, message in circle.items()
    )


def _placed(program: Program) -> Mapping[int, int]:
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
    program: Program, found: Counter[Action], rank_of: Mapping[int, int]
) -> Iterator[Action]:
    """All computations and messages of a complete program, in no order."""
    microbatches, trains = program.microbatches, any(action.kind in _BACKWARD for action in found)
    possible = MESSAGES if trains else MESSAGES - _BACKWARD
    whole, split = (Kind.BACKWARD,), (Kind.INPUT, Kind.WEIGHT)
    parts = {(action.stage, action.microbatch) for action in found if action.kind in split}
    for stage in range(program.stages):
        messages = [
            kind
            for kind in possible
            if rank_of.get(Action(stage, kind).far, rank_of[stage]) != rank_of[stage]
        ]
        for microbatch in range(microbatches):
            back = split if (stage, microbatch) in parts else whole
            for kind in (Kind.FORWARD, *(back if trains else ()), *messages):
                yield Action(stage, kind, microbatch)


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
    action: Action, stages: int, there: set[Action], rank_of: Mapping[int, int]
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
