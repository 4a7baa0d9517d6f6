"""Two stages a rank in the shape of a V, the first rank with the first and the last: ZBV, DualPipeV."""

from collections import Counter, deque

from d9d_train.parallel.pipeline.actions import Action, Kind, Program, program
from d9d_train.parallel.pipeline.schedules.needs import check_microbatches, stages_a_rank

DOWN, UP = 0, 1
"""A rank's stage on the way from the first rank to the last, and that on the way back."""


def zbv(stages: int, ranks: int, microbatches: int) -> Program:
    """Computations of ZBV: no bubble between where the first rank starts and the last rank does.

    A rank holds at most ``2 * ranks`` of its two halves of micro-batches.
    https://arxiv.org/abs/2401.10241

    Raises:
        LayoutError: Not two stages a rank, or no micro-batch.
    """
    check_microbatches("zbv", microbatches)
    stages_a_rank("zbv", stages, ranks, exactly=2)
    return program(_zbv(rank, ranks, microbatches) for rank in range(ranks))


def dualpipev(stages: int, ranks: int, microbatches: int) -> Program:
    """Computations of DualPipeV: a forward pass of one stage overlaps a backward pass of the other.

    https://arxiv.org/abs/2412.19437, https://github.com/deepseek-ai/DualPipe

    Raises:
        LayoutError: Not two stages a rank, or fewer micro-batches than stages.
    """
    stages_a_rank("dualpipev", stages, ranks, exactly=2)
    check_microbatches("dualpipev", microbatches, least=stages)
    each = [_dualpipev(rank, ranks, microbatches) for rank in range(ranks)]
    return program(
        (order.actions for order in each), (pair for order in each for pair in order.pairs)
    )


class _Order:
    """The actions of one rank, which takes the micro-batches of each of its stages in order.

    Attributes:
        actions: So far.
        pairs: The overlapped ones.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.actions: list[Action] = []
        self.pairs: list[tuple[Action, Action]] = []
        self._stages = rank, 2 * ranks - 1 - rank
        self._passes: Counter[tuple[int, Kind]] = Counter()
        self._weights: deque[Action] = deque()

    def forward(self, half: int) -> None:
        self._add(half, Kind.FORWARD)

    def input(self, half: int) -> None:
        """The input's part of a backward pass; its weights' part is left to `weight`."""
        done = self._add(half, Kind.INPUT)
        self._weights.append(Action(done.stage, Kind.WEIGHT, done.microbatch))

    def weight(self) -> None:
        """The weights' part that has been left longest."""
        self.actions.append(self._weights.popleft())

    def backward(self, half: int) -> None:
        self._add(half, Kind.BACKWARD)

    def pair(self, there: int, back: int) -> None:
        """A forward pass and a backward pass of the other stage, overlapped."""
        self.pairs.append((self._add(there, Kind.FORWARD), self._add(back, Kind.BACKWARD)))

    def _add(self, half: int, kind: Kind) -> Action:
        way = Kind.FORWARD if kind is Kind.FORWARD else Kind.BACKWARD
        action = Action(self._stages[half], kind, self._passes[half, way])
        self._passes[half, way] += 1
        self.actions.append(action)
        return action


def _zbv(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Made for as many micro-batches as fill the pipeline; those beyond ``microbatches`` are left out."""
    below, order = ranks - rank, _Order(rank, ranks)
    for _ in range(2 * below - 1):
        order.forward(DOWN)
    for _ in range(rank):
        order.forward(UP)
        order.forward(DOWN)
    for _ in range(below):
        order.forward(UP)
        order.input(UP)
        order.weight()
    steady = max(microbatches, 2 * ranks - 1) - ranks
    for turn in range(steady):
        if turn <= steady - below:
            order.forward(DOWN)
        order.input(DOWN)
        order.weight()
        order.forward(UP)
        order.input(UP)
        order.weight()
    for _ in range(rank):
        order.input(DOWN)
        order.input(UP)
    for _ in range(below):
        order.input(DOWN)
        order.weight()
    for _ in range(2 * rank):
        order.weight()
    return [a for a in order.actions if a.microbatch is not None and a.microbatch < microbatches]


def _dualpipev(rank: int, ranks: int, microbatches: int) -> _Order:
    """The eight steps of its authors."""
    below, order = ranks - 1 - rank, _Order(rank, ranks)
    for _ in range(2 * below):
        order.forward(DOWN)
    for _ in range(rank + 1):
        order.forward(DOWN)
        order.forward(UP)
    for _ in range(below):
        order.input(UP)
        order.weight()
        order.forward(UP)
    for turn in range(microbatches - 2 * ranks + rank + 1):
        if turn == 0 and below == 0:
            order.forward(DOWN)  # apart: the last rank's own backward pass waits for nothing
            order.backward(UP)
        else:
            order.pair(DOWN, UP)
        order.pair(UP, DOWN)
    for _ in range(below):
        order.backward(UP)
        order.pair(UP, DOWN)
    for turn in range(2 * (rank + 1)):
        half = DOWN if turn % 2 else UP
        (order.backward if turn <= rank else order.input)(half)
    for _ in range(below):
        order.weight()
        order.input(DOWN)
    for _ in range(rank + 1):
        order.weight()
    return order
