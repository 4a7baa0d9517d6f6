"""The messages between the ranks of a program of computations."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from operator import itemgetter

from d9d_ckpt.errors import LayoutError
from d9d_train.parallel.pipeline.actions import Action, Program, given, program, taken
from d9d_train.parallel.pipeline.check import check_computations, waits
from d9d_train.parallel.pipeline.costs import Costs
from d9d_train.parallel.pipeline.edges import Edges
from d9d_train.parallel.pipeline.lockstep import find_circle

_EQUAL = Costs()
"""Receives are placed for stages that are equally fast."""
from d9d_train.parallel.pipeline.uncollected import uncollected


@uncollected()
def with_communication(computations: Program) -> Program:
    """A program of computations with the messages between its ranks.

    A result is sent as soon as it is there. Its receive begins before the first computation of its rank
    that starts no earlier than the send, where all stages are equally fast and a backward pass takes twice
    as long as a forward pass; from then on it travels while the rank computes what comes before its use.
    It does not begin earlier, because batches of messages are done in order on NCCL: two ranks that each
    wait for what the other sends only after its next computation would wait for ever. So every wait is
    for something that started earlier on that clock, and ranks get to the end however fast they are.

    Of an overlapped pair, what can start first comes first, and each result is sent when it is there.

    Raises:
        LayoutError: A computation is missing or double, or computations wait for each other.
    """
    check_computations(computations)
    return _Exchange(computations).program()


class _Exchange:
    """Computations on the clock, and the messages between them."""

    def __init__(self, computations: Program) -> None:
        self._computations = computations
        self._stages = computations.stages
        self._rank_of = computations.rank_of
        self._edges = Edges(computations)
        self._sent: list[float | None] = [None] * self._edges.count
        self._sends: list[tuple[float, Action]] = []
        self._starts: list[list[float]] = [[] for _ in computations.ranks]
        self._done: list[list[tuple[Action, ...]]] = [[] for _ in computations.ranks]
        self._waiting: dict[int, tuple[int, Action]] = {}
        self._ready = deque(range(len(computations.ranks)))

    def program(self) -> Program:
        """All of it in order."""
        self._run()
        receives: list[dict[int, list[Action]]] = [{} for _ in self._starts]
        for time, send in sorted(self._sends, key=itemgetter(0)):
            rank = self._rank_of[send.far]
            before = bisect_left(self._starts[rank], time)
            receives[rank].setdefault(before, []).append(send.counterpart)
        ranks = (
            chain.from_iterable(
                (*begun.get(before, ()), *done) for before, done in enumerate(self._done[rank])
            )
            for rank, begun in enumerate(receives)
        )
        return program(ranks, self._computations.pairs)

    def _run(self) -> None:
        ranks = [self._steps(rank) for rank in range(len(self._starts))]
        while self._ready:
            rank = self._ready.popleft()
            for edge, action in islice(ranks[rank], 1):
                self._waiting[edge] = rank, action
        arrivals = {rank: taken(action, self._stages) for rank, action in self._waiting.values()}
        circle = find_circle({r: m for r, m in arrivals.items() if m}, self._rank_of)
        if circle:
            raise LayoutError(f"pipeline: computations wait for each other: {waits(circle)}")

    def _steps(self, rank: int) -> Iterator[tuple[int, Action]]:
        """Do what the rank computes; gives each edge that it waits for, and what takes it."""
        clock = 0.0
        for cell in self._computations.cells(rank):
            ready = []
            for action in cell:
                edge = self._needed(action)
                if edge is not None and self._sent[edge] is None:
                    yield edge, action
                ready.append(
                    (clock if edge is None else max(clock, self._sent[edge] or 0.0), action)
                )
            for start, action in ready if len(cell) == 1 else sorted(ready, key=itemgetter(0)):
                self._starts[rank].append(max(start, clock))
                clock = max(start, clock) + _EQUAL.of(action)
                send = self._across(given(action, self._stages))
                self._done[rank].append((action,) if send is None else (action, send))
                if send is not None:
                    self._send(send, clock)

    def _send(self, send: Action, now: float) -> None:
        edge = self._edges.of(send)
        assert edge is not None  # noqa: S101 - for the type checker
        self._sent[edge] = now
        self._sends.append((now, send))
        if edge in self._waiting:
            self._ready.append(self._waiting.pop(edge)[0])

    def _needed(self, action: Action) -> int | None:
        """The edge on which another rank sends what it takes."""
        return self._edges.of(action) if self._across(taken(action, self._stages)) else None

    def _across(self, message: Action | None) -> Action | None:
        """The message, if it is one between two ranks."""
        if message is None or self._rank_of[message.far] == self._rank_of[message.stage]:
            return None
        return message
