"""Layers of pipeline stages by what they cost."""

from collections.abc import Sequence
from itertools import accumulate

from d9d_ckpt.errors import LayoutError


def balanced(costs: Sequence[float], last: float, stages: int) -> tuple[int, ...]:
    """How many consecutive layers each stage gets, so that the most expensive one costs least.

    Args:
        costs: Of each layer.
        last: Of what the last stage has besides: the head and its loss.
        stages: How many there are; each gets a layer at least.

    Returns:
        Counts; of those that are as good, the one whose first stages are longest.

    Raises:
        LayoutError: More stages than layers.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise LayoutError(f"mesh.stages: {stages} stages for {layers} layers; at most {layers}")
    sums = [0.0, *accumulate(costs)]
    # best[n]: the most expensive stage of the n-th layer and all after it, cut into ``left`` stages.
    best = [sums[layers] - sums[n] + last for n in range(layers)] + [float("inf")]
    cuts: list[list[int]] = []
    for left in range(2, stages + 1):
        row, now = [layers] * (layers + 1), [float("inf")] * (layers + 1)
        for n in range(layers - left + 1):
            ends = range(n + 1, layers - left + 2)
            row[n] = min(ends, key=lambda end: (max(sums[end] - sums[n], best[end]), -end))
            now[n] = max(sums[row[n]] - sums[n], best[row[n]])
        best = now
        cuts.append(row)
    counts, at = [], 0
    for row in reversed(cuts):
        counts.append(row[at] - at)
        at = row[at]
    return (*counts, layers - at)
