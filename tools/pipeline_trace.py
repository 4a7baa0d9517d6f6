"""The executor on the clock: ranks whose stages sleep, beside what the simulator says.

    python tools/pipeline_trace.py                                  # every schedule, 4 ranks, 8 micro-batches
    python tools/pipeline_trace.py --only zbv --costs F=1,I=2,W=1   # one of them, with other costs
    python tools/pipeline_trace.py --csv program.csv                # a program of one's own

Stages run on forked gloo ranks and send what a real one would, of a few bytes; each part of a pass sleeps
for as long as it costs. The table shows, in seconds, the time from the first rank's start to the last one's
end, what the simulator says of it, and how much longer it was. Exits with 1 when that is over ``--bound``.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from helpers.ranks import launch
from torch import nn

from d9d_kernels.gradmask import needs
from d9d_train.batch import Batch
from d9d_train.mesh import Axis
from d9d_train.parallel.pipeline.actions import Program
from d9d_train.parallel.pipeline.costs import Costs, parse_costs
from d9d_train.parallel.pipeline.run import Executor
from d9d_train.parallel.pipeline.schedule import BUILDERS, build, from_csv, placement
from d9d_train.parallel.pipeline.simulate import simulate

RUNS = 2


class Sleep(torch.autograd.Function):
    """Takes its time in every part of a pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: Sequence[float]
    ) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds[0])
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        for_input, for_weight, _ = needs(ctx)
        _, of_input, of_weight = ctx.seconds
        time.sleep(of_input * for_input + of_weight * for_weight)
        return (grad if for_input else None), (grad.sum() if for_weight else None), None


class Stage(nn.Module):
    """Sleeps instead of computing."""

    def __init__(self, seconds: Sequence[float]) -> None:
        super().__init__()
        self.seconds = seconds
        self.embed, self.weight = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def forward(self, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        x = self.embed * 1 if hidden is None else hidden
        out: torch.Tensor = Sleep.apply(x, self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True)
class Outcome:
    """A program's time, in seconds."""

    measured: float
    simulated: float

    @property
    def excess(self) -> float:
        """The share by which it took longer."""
        return self.measured / self.simulated - 1


def outcome(program: Program, costs: Costs, unit: float) -> Outcome:
    """Run a program to warm up, then on the clock, of which the best counts: others use the machine too.

    Args:
        program: With communication.
        costs: The same for all stages.
        unit: Seconds of a cost of 1.
    """
    seconds = [unit * float(cost) for cost in (costs.forward, costs.input, costs.weight)]  # type: ignore[arg-type]
    trains = program != program.forward
    empty = torch.zeros((1, 1), dtype=torch.int64)
    batch = Batch(empty, empty, empty[0], empty, empty[0], packed=False)

    def work(rank: int) -> list[tuple[float, float]]:
        axis = Axis(len(program.ranks), rank, dist.group.WORLD)
        own = [stage for stage, place in program.rank_of.items() if place == rank]
        times = []
        for scale in (0.0, *[1.0] * RUNS):
            stages = {stage: Stage([scale * s for s in seconds]) for stage in own}
            executor = Executor(stages, program, axis, lambda _: ((), torch.float32))
            batches = [batch] * program.microbatches
            dist.barrier()
            started = time.monotonic()
            if trains:
                executor.step(batches, 1.0)
            else:
                executor.evaluate(batches)
            times.append((started, time.monotonic()))
        return times[1:]

    runs = [
        zip(*ranks, strict=True) for ranks in zip(*launch(len(program.ranks), work), strict=True)
    ]
    measured = min(max(ends) - min(starts) for starts, ends in runs)
    return Outcome(measured, unit * simulate(program, costs).makespan)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and say whether all are within the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--only", choices=sorted(BUILDERS))
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--costs", type=parse_costs, default=Costs())
    parser.add_argument("--unit", type=float, default=0.05, help="seconds of a cost of 1")
    parser.add_argument("--bound", type=float, default=0.1)
    given = parser.parse_args(arguments)
    worst = 0.0
    print(f"{'schedule':12} {'simulated':>10} {'measured':>10} {'longer':>8}")
    for name, program in programs(given):
        found = outcome(program, given.costs, given.unit)
        worst = max(worst, found.excess)
        print(f"{name:12} {found.simulated:10.3f} {found.measured:10.3f} {found.excess:8.1%}")
    return int(worst > given.bound)


def programs(given: argparse.Namespace) -> Iterator[tuple[str, Program]]:
    """Those asked for, by name."""
    if given.csv is not None:
        yield given.csv.stem, from_csv(given.csv.read_text())
        return
    for name in [given.only] if given.only else BUILDERS:
        stages = placement(name)[0] * given.ranks
        yield name, build(name, stages, given.ranks, given.microbatches)


if __name__ == "__main__":
    sys.exit(main())
