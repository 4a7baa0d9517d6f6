"""Runs that are killed, and runs that move, beside runs that nobody interrupts.

    python tools/train_drill.py --kills 20   # all ranks, or one and then the rest, at random moments
    python tools/train_drill.py --pairs      # 3 steps here and 3 there, over twelve pairs of topologies

Killed runs have four ranks (pipeline, FSDP, expert parallelism), float32, `deterministic`, and an
asynchronous save every step or two; each start has to go on from a whole step, no earlier than the start
before, and in the end losses, parameters and optimizer state have to be those of the run that was never
killed, to the bit. Pairs of topologies are in float64, where all of these agree within 1e-10.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

from helpers.kills import SAME, WHERE, lives, state
from helpers.runs import (
    ALONE,
    BOUND,
    HALF,
    PAIRS,
    STEPS,
    Place,
    differences,
    farthest,
    told_apart,
)

_STEPS_A_KILL = 6
"""More than a life takes on average, so that the run is not over before the last kill."""


def main() -> int:
    """Both drills print a table; 0 if all of it is good."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="kill a run N times")
    parser.add_argument("--pairs", action="store_true", help="twelve pairs of topologies")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    if not (args.kills or args.pairs):
        parser.error("nothing to do: --kills N, or --pairs")
    with tempfile.TemporaryDirectory() as folder:
        good = not args.kills or kills(Path(folder) / "kills", args.kills, args.seed)
        good &= not args.pairs or pairs(Path(folder) / "pairs")
    return 0 if good else 1


def kills(folder: Path, count: int, seed: int) -> bool:
    """Kill a run ``count`` times, then let it finish."""
    steps = _STEPS_A_KILL * count
    whole, place = Place(folder / "whole"), Place(folder / "killed")
    whole.train(steps, WHERE, SAME)
    print(f"{'':>4} {'began':>6} {'told':>5} {'whole':>6}  {'half-written':<12}  killed")
    done, good, before = 0, True, 0
    for life in lives(place, steps, random.Random(seed)):
        if not life.killed:
            break
        done += 1
        held = life.began >= before and life.whole >= life.began
        good, before = good and held, life.began
        broken = ", ".join(map(str, life.broken)) or "-"
        print(
            f"{done:>4} {life.began:>6} {life.told:>5} {life.whole:>6}  {broken:<12}  {life.kill}"
            f"{'' if held else '  WENT BACK'}",
            flush=True,
        )
        if done == count:
            break
    print(f"left at step {state(place)[0]} of {steps}; now to the end")
    place.train(steps, WHERE, SAME)
    state_apart, told = farthest(whole, place), told_apart(whole, place)
    print(
        f"{done} kills: last loss {place.lines()[-1]['loss']!r}, unkilled {whole.lines()[-1]['loss']!r}; "
        f"largest difference of losses and norms {told}, of parameters and optimizer state {state_apart}"
    )
    return good and done == count and state_apart == told == 0


def pairs(folder: Path) -> bool:
    """Three steps on one topology and three on another, beside six of one process."""
    whole = Place(folder / "whole")
    whole.train(STEPS, ALONE)
    worst = 0.0
    print(f"{'':<26} {'state':>8} {'metrics':>8} {'seconds':>8}")
    for number, (name, (first, second)) in enumerate(PAIRS.items()):
        begun = time.perf_counter()
        place = Place(folder / str(number))
        place.train(HALF, first)
        place.train(STEPS, second)
        apart, told = farthest(whole, place), told_apart(whole, place)
        worst = max(worst, apart, told)
        wrong = [name for name, by in differences(whole, place).items() if by >= BOUND]
        seconds = time.perf_counter() - begun
        print(
            f"{name:<26} {apart:8.1e} {told:8.1e} {seconds:8.1f}  {', '.join(wrong[:4])}",
            flush=True,
        )
    print(f"{len(PAIRS)} pairs, largest difference {worst:.1e}, bound {BOUND}")
    return worst < BOUND


if __name__ == "__main__":
    sys.exit(main())
