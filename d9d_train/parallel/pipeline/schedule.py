"""Programs from stages, ranks and micro-batches; pure."""

from collections.abc import Callable, Iterator, Mapping

from d9d_ckpt.errors import LayoutError, UsageError
from d9d_train.parallel.pipeline.actions import (
    SENDS,
    Action,
    Kind,
    Program,
    given,
    program,
    taken,
)
from d9d_train.parallel.pipeline.check import check, check_complete, waits
from d9d_train.parallel.pipeline.lockstep import Lockstep


def gpipe(stages: int, ranks: int, microbatches: int) -> Program:
    """Computations of GPipe: all forward passes, then all backward passes.

    A rank holds every micro-batch.

    Raises:
        LayoutError: Not one stage a rank, or no micro-batch.
    """
    _check_one_stage("gpipe", stages, ranks, microbatches)
    every = range(microbatches)
    return program(
        [_forward(rank, i) for i in every] + [_backward(rank, i) for i in every]
        for rank in range(ranks)
    )


def one_f_one_b(stages: int, ranks: int, microbatches: int) -> Program:
    """Computations of 1F1B: forward passes until the first gradient is near, then one of each in turn.

    Rank r holds at most ``ranks`` - r micro-batches.

    Raises:
        LayoutError: Not one stage a rank, or no micro-batch.
    """
    _check_one_stage("1f1b", stages, ranks, microbatches)
    return program(
        _one_f_one_b(rank, min(ranks - 1 - rank, microbatches), microbatches)
        for rank in range(ranks)
    )


def forward_only(stages: int, ranks: int, microbatches: int) -> Program:
    """Computations of an evaluation.

    Raises:
        LayoutError: Not one stage a rank, or no micro-batch.
    """
    _check_one_stage("forward_only", stages, ranks, microbatches)
    return program([_forward(rank, i) for i in range(microbatches)] for rank in range(ranks))


BUILDERS: Mapping[str, Callable[[int, int, int], Program]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "forward_only": forward_only,
}


def build(name: str, stages: int, ranks: int, microbatches: int) -> Program:
    """A schedule's program with its communication, proven to end.

    Args:
        name: One of `BUILDERS`.
        stages: Of the whole pipeline.
        ranks: Pipeline ranks.
        microbatches: Of a step.

    Raises:
        UsageError: There is no schedule of that name.
        LayoutError: The schedule cannot be made of these numbers.
    """
    if name not in BUILDERS:
        raise UsageError(f"pipeline: no schedule {name!r}; known: {', '.join(BUILDERS)}")
    built = with_communication(BUILDERS[name](stages, ranks, microbatches))
    check(built)
    return built


def with_communication(computations: Program) -> Program:
    """A program of computations with the messages between its ranks.

    A result is sent as soon as it is there. It is received right before it is needed, and earlier only
    where ranks would otherwise wait for each other in a circle.

    Raises:
        LayoutError: A computation is missing or double, or no order of messages helps, because the
            computations themselves wait for each other.
    """
    rank_of, stages = computations.rank_of, computations.stages
    late = program(_late(actions, stages, rank_of) for actions in computations.ranks)
    check_complete(late)
    walk = Lockstep(late.ranks, rank_of)
    while circle := walk.circle():
        send = next((message for message in circle.values() if message.kind in SENDS), None)
        if send is None:
            raise LayoutError(f"pipeline: computations wait for each other: {waits(circle)}")
        walk.hoist(send)
    return program(walk.ranks)


def _late(actions: tuple[Action, ...], stages: int, rank_of: Mapping[int, int]) -> Iterator[Action]:
    """Each computation between the messages that bring what it takes and take what it gives."""

    def across(message: Action | None) -> Iterator[Action]:
        if message is not None and rank_of[message.far] != rank_of[message.stage]:
            yield message

    for action in actions:
        yield from across(taken(action, stages))
        yield action
        yield from across(given(action, stages))


def _one_f_one_b(stage: int, ahead: int, microbatches: int) -> Iterator[Action]:
    """Forward passes stay ``ahead`` of backward passes by that many before and after each pair."""
    yield from (_forward(stage, i) for i in range(ahead))
    for i in range(microbatches):
        if ahead + i < microbatches:
            yield _forward(stage, ahead + i)
        yield _backward(stage, i)


def _forward(stage: int, microbatch: int) -> Action:
    return Action(stage, Kind.FORWARD, microbatch)


def _backward(stage: int, microbatch: int) -> Action:
    return Action(stage, Kind.BACKWARD, microbatch)


def _check_one_stage(name: str, stages: int, ranks: int, microbatches: int) -> None:
    if microbatches < 1:
        raise LayoutError(f"pipeline: {name} with {microbatches} micro-batches; at least 1")
    if ranks < 1 or stages != ranks:
        raise LayoutError(
            f"pipeline: {name} puts one stage on a rank, so {stages} stages do not go on {ranks} ranks"
        )
