"""How long it takes to build, prove and simulate schedules of many ranks, in seconds of one core.

python tools/bench_schedules.py [--ranks 128] [--microbatches 512]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import process_time

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from d9d_train.parallel.pipeline.check import check
from d9d_train.parallel.pipeline.communicate import with_communication
from d9d_train.parallel.pipeline.schedule import BUILDERS, placement
from d9d_train.parallel.pipeline.simulate import simulate


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line a schedule."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=512)
    args = parser.parse_args(argv)
    print(f"{'':>12} {'actions':>9} {'build':>6} {'prove':>6} {'simulate':>8} {'in all':>6}")
    for name, builder in BUILDERS.items():
        stages = placement(name)[0] * args.ranks
        began = process_time()
        program = with_communication(builder(stages, args.ranks, args.microbatches))
        built = process_time()
        check(program)
        proven = process_time()
        simulate(program)
        ended = process_time()
        actions = sum(map(len, program.ranks))
        print(
            f"{name:>12} {actions:>9,} {built - began:>6.1f} {proven - built:>6.1f} "
            f"{ended - proven:>8.1f} {ended - began:>6.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
