"""All forward passes before all backward passes: GPipe, looped breadth-first, and evaluation."""

from d9d_train.parallel.pipeline.actions import Action, Kind, Program, program
from d9d_train.parallel.pipeline.schedules.needs import check_microbatches, stages_a_rank


def gpipe(stages: int, ranks: int, microbatches: int) -> Program:
    """Computations of GPipe, one stage a rank; a rank holds every micro-batch.

    Raises:
        LayoutError: Not one stage a rank, or no micro-batch.
    """
    check_microbatches("gpipe", microbatches)
    stages_a_rank("gpipe", stages, ranks, exactly=1)
    every = range(microbatches)
    return program(
        [Action(rank, kind, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in every]
        for rank in range(ranks)
    )


def looped_bfs(stages: int, ranks: int, microbatches: int) -> Program:
    """Computations of breadth-first pipelining: every micro-batch through one stage, then through the next.

    Parameters of a stage are gathered once for all micro-batches; a rank holds every micro-batch.
    https://arxiv.org/abs/2211.05953

    Raises:
        LayoutError: Not the same number of stages on every rank, or no micro-batch.
    """
    check_microbatches("looped_bfs", microbatches)
    stages_a_rank("looped_bfs", stages, ranks)
    every = range(microbatches)

    def actions(rank: int) -> list[Action]:
        mine = range(rank, stages, ranks)
        there = [Action(stage, Kind.FORWARD, i) for stage in mine for i in every]
        back = [Action(s, Kind.BACKWARD, i) for s in reversed(mine) for i in reversed(every)]
        return there + back

    return program(map(actions, range(ranks)))


def forward_only(stages: int, ranks: int, microbatches: int) -> Program:
    """Computations of an evaluation: `looped_bfs` there, and not back.

    Raises:
        LayoutError: Not the same number of stages on every rank, or no micro-batch.
    """
    check_microbatches("forward_only", microbatches)
    stages_a_rank("forward_only", stages, ranks)
    return program(
        [
            Action(stage, Kind.FORWARD, i)
            for stage in range(rank, stages, ranks)
            for i in range(microbatches)
        ]
        for rank in range(ranks)
    )
