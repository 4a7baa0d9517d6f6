"""What a program takes: time, idleness, micro-batches and bytes held."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from d9d_train.parallel.pipeline.actions import Program
from d9d_train.parallel.pipeline.costs import Costs
from d9d_train.parallel.pipeline.held import peak_bytes, peak_microbatches
from d9d_train.parallel.pipeline.lockstep import Span, walk
from d9d_train.parallel.pipeline.uncollected import uncollected


@dataclass(frozen=True)
class Simulation:
    """A program on the clock.

    Attributes:
        program: What was run.
        spans: What each rank computes, and when.
        peak_microbatches: The most that each rank holds at once, from the start of F to the end of B or
            W; one of V stages counts 1/V.
        peak_bytes: The most that each rank holds at once: of micro-batches, of received messages until
            they are used, and of sent ones until the rank's next batch of messages.
    """

    program: Program
    spans: tuple[tuple[Span, ...], ...]
    peak_microbatches: tuple[float, ...]
    peak_bytes: tuple[float, ...]

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end, in the unit of the costs."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks."""
        return self.idle(sum(self.busy) / max(1, len(self.spans)))

    def idle(self, busy: float) -> float:
        """The idle share of a rank that computes for so long."""
        return 1 - busy / self.makespan if self.makespan else 0.0

    def to_json(self) -> dict[str, Any]:
        """The figures and the actions, computations only."""
        ranks = range(len(self.spans))
        return {
            "ranks": len(self.spans),
            "stages": self.program.stages,
            "microbatches": self.program.microbatches,
            "makespan": self.makespan,
            "bubble": self.bubble,
            "peak_microbatches": list(self.peak_microbatches),
            "peak_bytes": list(self.peak_bytes),
            "actions": [self.program.computations.texts(rank) for rank in ranks],
        }


@uncollected()
def simulate(program: Program, costs: Costs | None = None) -> Simulation:
    """Run a program in memory as the executor runs it, and measure it.

    Args:
        program: That `check` has proven, as `build` and `from_csv` give them.
        costs: One unit of time for each of F, I and W, and none for messages, if not given.

    Raises:
        LayoutError: The costs are of other stages.
    """
    costs = costs or Costs()
    costs.check_stages(program.stages)
    walked = walk(program, costs.of, costs.transfer)
    spans = tuple(
        tuple(span for span in spans if span.action.microbatch is not None)
        for spans in walked.spans
    )
    return Simulation(program, spans, peak_microbatches(program), peak_bytes(program, costs))
