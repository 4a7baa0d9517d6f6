"""Numbers for what goes from stage to stage."""

from d9d_train.parallel.pipeline.actions import Action, Kind, Program


class Edges:
    """Numbers the outputs and gradients between stages, from 0.

    A message and its counterpart have the same number, which is also that of what the one stage's
    computation gives and the other's takes. They index lists, which are quicker to look into than a dict
    of actions.

    Attributes:
        count: One more than the highest.
    """

    def __init__(self, program: Program) -> None:
        row, gradients = program.microbatches, (program.stages + 1) * program.microbatches
        self.count = 2 * gradients
        self._row = row
        self._taken = {
            Kind.FORWARD: 0,
            Kind.RECV_F: 0,
            Kind.SEND_F: row,
            Kind.BACKWARD: gradients,
            Kind.INPUT: gradients,
            Kind.RECV_B: gradients,
            Kind.SEND_B: gradients - row,
        }

    def of(self, action: Action) -> int | None:
        """Of a message, or of what a computation takes, also at an end of the pipeline; None of others."""
        first = self._taken.get(action.kind)
        if first is None or action.microbatch is None:
            return None
        return first + action.stage * self._row + action.microbatch
