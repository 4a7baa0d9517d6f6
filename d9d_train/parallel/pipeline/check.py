"""The proof that a program is complete, keeps every dependency, and ends."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from operator import or_

from d9d_ckpt.errors import LayoutError
from d9d_train.parallel.pipeline.actions import (
    GRADIENTS,
    MESSAGES,
    OF_STAGE,
    SENDS,
    Action,
    Kind,
    Program,
)
from d9d_train.parallel.pipeline.lockstep import walk
from d9d_train.parallel.pipeline.uncollected import uncollected

_BACKWARD = frozenset({Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.SEND_B, Kind.RECV_B})


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
    rank_of, codes = _placed(program), _Codes(program)
    found = bytearray(codes.count)
    for rank, actions in enumerate(program.ranks):
        for action in actions:
            code = codes.of(action)
            if found[code] and action.kind not in OF_STAGE:
                raise LayoutError(
                    f"pipeline: rank {rank} has {action} {actions.count(action)} times"
                )
            found[code] = 1
    expected = codes.expected(found, rank_of, messages=messages)
    if found[:-1] == expected[:-1]:  # the last is that of what concerns whole stages
        return
    pairs = list(enumerate(zip(found[:-1], expected[:-1], strict=True)))
    beyond = min((codes.action(c) for c, (f, e) in pairs if f and not e), default=None)
    if beyond:
        raise LayoutError(
            f"pipeline: rank {rank_of[beyond.stage]} has {beyond}, which has no place there"
        )
    missing = min(codes.action(c) for c, (f, e) in pairs if e and not f)
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


def _check_order(program: Program) -> None:
    """Each rank does what an action needs before it.

    Actions are numbers here: a million of them are marked and looked up in a third of the time that
    tuples take.
    """
    codes = _Codes(program)
    there = bytearray(codes.count)
    for actions in program.ranks:
        for action in actions:
            there[codes.of(action)] = 1
    done = bytearray(codes.count)
    for rank, actions in enumerate(program.ranks):
        for action in actions:
            for need in codes.needs(action, there):
                if not done[need]:
                    raise LayoutError(
                        f"pipeline: rank {rank} has {action} before {codes.action(need)}"
                    )
            done[codes.of(action)] = 1


class _Codes:
    """A number for each action that concerns a micro-batch; those of a whole stage share one."""

    def __init__(self, program: Program) -> None:
        self._row, self._last = program.microbatches, program.stages - 1
        size = program.stages * self._row
        self._kinds = [kind for kind in Kind if kind not in OF_STAGE]
        self._first = {kind: number * size for number, kind in enumerate(self._kinds)}
        self._size, self.count = size, len(self._kinds) * size + 1
        # Stages whose neighbour before them is on the same rank, which sends them nothing.
        rank_of = program.rank_of
        self._joined = [s > 0 and rank_of[s - 1] == rank_of[s] for s in range(program.stages)]

    def of(self, action: Action) -> int:
        """Its number."""
        if action.microbatch is None:
            return self.count - 1
        return self._first[action.kind] + action.stage * self._row + action.microbatch

    def action(self, code: int) -> Action:
        """The action of a number, other than that of stages."""
        kind, place = divmod(code, self._size)
        return Action(place // self._row, self._kinds[kind], place % self._row)

    def expected(
        self, found: bytearray, rank_of: Mapping[int, int], *, messages: bool
    ) -> bytearray:
        """Marks of all computations and messages of a complete program.

        Args:
            found: Marks of those that it has, which say whether it trains, and what comes in two parts.
            rank_of: The rank of each stage.
            messages: Whether it has messages.
        """
        trains = any(self._any(found, kind) for kind in _BACKWARD)
        out = bytearray(self.count)
        for stage in range(self._last + 1):
            kinds = [Kind.FORWARD]
            if messages:
                kinds += [
                    kind
                    for kind in (MESSAGES if trains else MESSAGES - _BACKWARD)
                    if rank_of.get(Action(stage, kind).far, rank_of[stage]) != rank_of[stage]
                ]
            for kind in kinds:
                out[self._of_stage(kind, stage)] = b"\1" * self._row
            if trains:
                first, second = (self._of_stage(kind, stage) for kind in (Kind.INPUT, Kind.WEIGHT))
                parts = bytes(map(or_, found[first], found[second]))
                out[first] = out[second] = parts
                out[self._of_stage(Kind.BACKWARD, stage)] = bytes(1 - part for part in parts)
        return out

    def _of_stage(self, kind: Kind, stage: int) -> slice:
        start = self._first[kind] + stage * self._row
        return slice(start, start + self._row)

    def _any(self, marks: bytearray, kind: Kind) -> bool:
        """Whether any action of a kind is marked."""
        return marks.find(1, self._first[kind], self._first[kind] + self._size) >= 0

    def needs(self, action: Action, there: bytearray) -> tuple[int, ...]:
        """What the same rank does before an action."""
        kind, stage, first = action.kind, action.stage, self._first
        place = stage * self._row + (action.microbatch or 0)
        match kind:
            case Kind.FORWARD:
                return () if not stage else (self._input(stage, place),)
            case Kind.SEND_F:
                return (first[Kind.FORWARD] + place,)
            case Kind.SEND_B:
                return (self._gradient(place, there),)
            case Kind.WEIGHT:
                return (first[Kind.INPUT] + place,)
            case Kind.BACKWARD | Kind.INPUT if stage == self._last:
                return (first[Kind.FORWARD] + place,)
            case Kind.BACKWARD | Kind.INPUT if self._joined[stage + 1]:
                return first[Kind.FORWARD] + place, self._gradient(place + self._row, there)
            case Kind.BACKWARD | Kind.INPUT:
                return first[Kind.FORWARD] + place, first[Kind.RECV_B] + place
        return ()

    def _input(self, stage: int, place: int) -> int:
        """What brings a forward pass its input."""
        if self._joined[stage]:
            return self._first[Kind.FORWARD] + place - self._row
        return self._first[Kind.RECV_F] + place

    def _gradient(self, place: int, there: bytearray) -> int:
        """The computation that gives the gradient of a stage's input."""
        split = self._first[Kind.INPUT] + place
        return split if there[split] else self._first[Kind.BACKWARD] + place


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
