"""Ranks that run a program in memory, as the executor runs it."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from typing import NamedTuple

from d9d_train.parallel.pipeline.actions import MESSAGES, SENDS, Action, Program
from d9d_train.parallel.pipeline.edges import Edges


class Span(NamedTuple):
    """A computation from ``start`` to ``end``, in the unit of its costs."""

    action: Action
    start: float
    end: float


def free(_: Action) -> float:
    """What takes no time."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Walk:
    """How far ranks get with a program.

    Attributes:
        spans: What each rank computes, in order.
        circle: Ranks that wait for each other and the message of each, in the order of waiting; empty
            when all get to the end.
    """

    spans: tuple[tuple[Span, ...], ...]
    circle: Mapping[int, Action]


def walk(
    program: Program,
    duration: Callable[[Action], float] = free,
    transfer: Callable[[Action], float] = free,
    *,
    whole: bool = False,
) -> Walk:
    """Run all ranks, each action as early as it can be.

    Consecutive messages are one batch. A rank begins it once its last one is done, goes on, and waits where
    a computation takes what a message brings. A message meets its counterpart when both have begun, and a
    batch is done when all of its messages are. Who waits does so for certain messages, so whether all get
    to the end does not depend on how fast any rank is: one walk decides for all timings.

    Args:
        program: With every message and its counterpart, in the same order at both ends.
        duration: Of a computation.
        transfer: Of a message, from when it has met its counterpart.
        whole: Computations wait for the whole batch of what they take, as they do on NCCL, where a batch
            is one kernel; otherwise for the message, as on gloo.
    """
    return _Lockstep(program, duration, transfer, whole).run()


def find_circle(waiting: Mapping[int, Action], rank_of: Mapping[int, int]) -> dict[int, Action]:
    """Ranks that wait for each other, of all that wait for the other end of a message."""
    path: list[int] = []
    rank = min(waiting, default=None)
    if rank is None:
        return {}
    while rank not in path:
        path.append(rank)
        rank = rank_of[waiting[rank].far]
    return {each: waiting[each] for each in path[path.index(rank) :]}


@dataclass(slots=True)
class _Batch:
    """Consecutive messages of a rank.

    Attributes:
        rank: Whose.
        messages: All of them, each with the number of its edge.
        open: Those that have not met their counterparts.
        began: When; None before.
        done: When the last of those that have met is there.
    """

    rank: int
    messages: list[tuple[int, Action]]
    open: int
    began: float | None = None
    done: float = 0.0


class _Lockstep:
    def __init__(
        self,
        program: Program,
        duration: Callable[[Action], float],
        transfer: Callable[[Action], float],
        whole: bool,
    ) -> None:
        self._rank_of = program.rank_of
        self._duration = duration
        self._transfer = transfer
        self._whole = whole
        self._edges = Edges(program)
        # By edge: the batches of its two ends, and when it is there.
        self._sends: list[_Batch | None] = [None] * self._edges.count
        self._receives: list[_Batch | None] = [None] * self._edges.count
        self._there: list[float | None] = [None] * self._edges.count
        self._spans: list[list[Span]] = [[] for _ in program.ranks]
        self._ready = deque(range(len(program.ranks)))
        self._parts = [
            [self._part(rank, *part) for part in groupby(actions, _is_message)]
            for rank, actions in enumerate(program.ranks)
        ]

    def run(self) -> Walk:
        ranks = [self._steps(rank) for rank in range(len(self._parts))]
        waiting: dict[int, _Batch] = {}
        while self._ready:
            rank = self._ready.popleft()
            waiting.pop(rank, None)
            for batch in islice(ranks[rank], 1):
                waiting[rank] = batch
        circle = find_circle({r: self._unmet(b) for r, b in waiting.items()}, self._rank_of)
        return Walk(tuple(map(tuple, self._spans)), circle)

    def _part(
        self, rank: int, is_message: bool, actions: Iterable[Action]
    ) -> _Batch | list[tuple[int | None, Action]]:
        """A batch, or computations with the edges that they take."""
        numbered = [(self._edges.of(action), action) for action in actions]
        if not is_message:
            return numbered
        messages = [(edge, action) for edge, action in numbered if edge is not None]
        batch = _Batch(rank, messages, len(messages))
        for edge, message in messages:
            (self._sends if message.kind in SENDS else self._receives)[edge] = batch
        return batch

    def _steps(self, rank: int) -> Iterator[_Batch]:
        """Do what the rank does; gives the batch that it waits for, again until that is over."""
        clock, last, spans = 0.0, None, self._spans[rank]
        for part in self._parts[rank]:
            if isinstance(part, _Batch):
                if last is not None:
                    while last.open:
                        yield last
                    clock = max(clock, last.done)
                last = part
                self._begin(last, clock)
                continue
            for edge, action in part:
                batch = None if edge is None else self._receives[edge]
                if edge is not None and batch is not None:
                    while batch.open if self._whole else self._there[edge] is None:
                        yield batch
                    clock = max(clock, batch.done if self._whole else self._there[edge] or 0.0)
                end = clock + self._duration(action)
                spans.append(Span(action, clock, end))
                clock = end
        while last is not None and last.open:
            yield last

    def _begin(self, batch: _Batch, now: float) -> None:
        """Let its messages meet those of their counterparts that have begun before."""
        batch.began = now
        for edge, message in batch.messages:
            other = (self._receives if message.kind in SENDS else self._sends)[edge]
            if other is None or other.began is None:
                continue
            there = max(now, other.began) + self._transfer(message)
            self._there[edge] = there
            batch.open -= 1
            batch.done = max(batch.done, there)
            other.open -= 1
            other.done = max(other.done, there)
            self._ready.append(other.rank)

    def _unmet(self, batch: _Batch) -> Action:
        return next(message for edge, message in batch.messages if self._there[edge] is None)


def _is_message(action: Action) -> bool:
    return action.kind in MESSAGES
