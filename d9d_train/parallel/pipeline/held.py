"""The most that ranks hold at once in a program."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby

from d9d_train.parallel.pipeline.actions import SENDS, Action, Kind, Program, given, taken
from d9d_train.parallel.pipeline.costs import Costs

_ENDS = frozenset({Kind.BACKWARD, Kind.WEIGHT})
"""After these nothing is kept of a micro-batch in a stage."""


def peak_microbatches(program: Program) -> tuple[float, ...]:
    """Of each rank, from the start of F to the end of B or W; one of V stages counts 1/V."""

    def peak(actions: Sequence[Action]) -> float:
        changes = chain.from_iterable(zip(*_changes(actions), strict=True))
        return _most(changes) / max(1, len({action.stage for action in actions}))

    return tuple(map(peak, program.ranks))


def peak_bytes(program: Program, costs: Costs) -> tuple[float, ...]:
    """Of each rank: what its stages keep of micro-batches, and messages.

    A received message is held from the batch that receives it to the end of the computation that uses it,
    a sent one from the computation to the next batch, where the executor waits for it.
    """
    if not costs.message_bytes and not costs.held_bytes:
        return (0.0,) * len(program.ranks)
    stages = program.stages
    return tuple(_most(_bytes(actions, stages, costs)) for actions in program.ranks)


def _most(changes: Iterable[float]) -> float:
    return max(accumulate(changes), default=0.0)


def _changes(actions: Sequence[Action]) -> tuple[list[int], list[int]]:
    """How many more micro-batches the stage of each action holds from its start, and from its end."""
    starts = [int(action.kind is Kind.FORWARD) for action in actions]
    ends = [-int(action.kind in _ENDS) for action in actions]
    return starts, ends if any(ends) else [-start for start in starts]


def _bytes(actions: Sequence[Action], stages: int, costs: Costs) -> Iterator[float]:
    """How much more is held, from one moment to the next."""
    messages = {action for action in actions if action.is_message}
    sending = 0
    changes = zip(actions, *_changes(actions), strict=True)
    for is_message, group in groupby(changes, lambda change: change[0].is_message):
        if is_message:
            sends = [action.kind in SENDS for action, _, _ in group]
            yield costs.message_bytes * (sends.count(False) - sending)
            sending = sends.count(True)
            continue
        for action, start, end in group:
            yield start * costs.held(action.stage)
            yield costs.message_bytes * (given(action, stages) in messages)
            yield end * costs.held(action.stage)
            yield -costs.message_bytes * (taken(action, stages) in messages)
