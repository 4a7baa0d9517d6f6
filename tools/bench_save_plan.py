"""What it costs to plan a save: 512 ranks by 1,000 tensors at first, nothing worth naming after that.

    python tools/bench_save_plan.py

The ranks are simulated: the plan is a function of what each of them holds. `first` is the plan from
all holdings; `second` what every rank does again before each save, to learn that nothing has changed;
`balance` the most bytes that a rank writes over the mean, of 13 GB that 256 ranks hold in common.
"""

import sys
import time
from collections import Counter

from d9d_ckpt.checkpointer.share import Holding, plan_save
from d9d_ckpt.tensors import Region

_ROUNDS = 5


def sharded(ranks: int, tensors: int) -> list[Holding]:
    """Row shards over all ranks of matrices of two widths."""
    names = tuple(f"model.layers.{n // 10}.weight{n % 10}" for n in range(tensors))
    widths = [(1024, 2048)[n % 2] for n in range(tensors)]
    specs = tuple(("BF16", (8 * ranks, width)) for width in widths)
    return [
        Holding(names, specs, tuple(Region((8 * rank, 0), (8, width)) for width in widths))
        for rank in range(ranks)
    ]


def replicated(ranks: int, tensors: int) -> list[Holding]:
    """The same 13 GB on every rank."""
    shapes = [(4096, 3200 + 16 * (n % 7)) for n in range(tensors)]
    one = Holding(
        tuple(f"t{n:03}" for n in range(tensors)),
        tuple(("BF16", shape) for shape in shapes),
        tuple(Region.whole(shape) for shape in shapes),
    )
    return [one] * ranks


def fastest(holdings: list[Holding]) -> tuple[float, float]:
    """Seconds of a plan, and of telling that a structure is the one of the save before."""
    plans, marks = [], []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        plan_save(holdings)
        plans.append(time.perf_counter() - began)
        again = Holding(holdings[0].names, holdings[0].specs, holdings[0].boxes)
        began = time.perf_counter()
        if again.mark != holdings[0].mark:
            raise SystemExit("equal structures have different marks")
        marks.append(time.perf_counter() - began)
    return min(plans), min(marks)


def main() -> None:
    """Measure and print."""
    first, second = fastest(sharded(512, 1000))
    written: Counter[int] = Counter()
    for target in plan_save(replicated(256, 500)).targets:
        written[target.rank] += target.nbytes
    mean = sum(written.values()) / 256
    sys.stdout.write(
        f"first save, 512 ranks x 1,000 tensors: {first:.3f} s\n"
        f"second save, 1,000 tensors: {1000 * second:.2f} ms\n"
        f"balance of {sum(written.values()) / 1e9:.1f} GB over 256 ranks: "
        f"{max(written.values()) / mean:.4f}\n"
    )


if __name__ == "__main__":
    main()
