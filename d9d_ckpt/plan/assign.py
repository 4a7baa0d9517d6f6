"""Targets to units of work: what reads the same bytes stays together, large ones are cut."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from d9d_ckpt.plan.plan import FROM, SOURCE, TARGET, Plan
from d9d_ckpt.tensors import BLOCK

SHORT = 64 << 10
"""Runs of fewer bytes are read with their neighbours', so that no byte is read twice."""

_UNIT = 32 << 20
"""Bytes of one unit: enough to make its overhead nothing, little enough to balance workers."""

_REMOTE_UNIT = 8 << 20

_MOST_UNITS = 8192


class Span(NamedTuple):
    """Bytes ``[low, high)`` of a target; cut at whole checksum blocks."""

    target: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Work that one worker takes at once.

    Attributes:
        spans: What it writes.
    """

    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it writes."""
        return sum(span.high - span.low for span in self.spans)


def units(plan: Plan, *, remote: bool = False) -> list[Unit]:
    """All work, in the order in which the targets are stored.

    Args:
        plan: The plan.
        remote: Whether the source answers slowly, so that many small units keep all workers waiting
            at once until the end.
    """
    size = max(_REMOTE_UNIT if remote else _UNIT, plan.bytes_written // _MOST_UNITS)
    out: list[Unit] = []
    batch: list[Span] = []
    batched = 0
    for cluster in _clusters(plan):
        nbytes = sum(plan.targets[t].nbytes for t in cluster)
        if nbytes > size:
            parts = min(-(-nbytes // size), _most_parts(plan, cluster))
            out.extend(_part(plan, cluster, part, parts) for part in range(parts))
            continue
        if batched + nbytes > size:
            out.append(Unit(tuple(batch)))
            batch, batched = [], 0
        batch += (Span(t, 0, plan.targets[t].nbytes) for t in cluster)
        batched += nbytes
    if batch:
        out.append(Unit(tuple(batch)))
    return out


def without(work: Iterable[Unit], done: Mapping[int, Collection[int]]) -> list[Unit]:
    """``work`` but for finished blocks, given by target and number."""
    out = []
    for unit in work:
        spans = tuple(part for span in unit.spans for part in _unfinished(span, done))
        if spans or not unit.spans:
            out.append(Unit(spans))
    return out


def _unfinished(span: Span, done: Mapping[int, Collection[int]]) -> Iterator[Span]:
    """The stretches of a span that lie in no finished block."""
    finished = done.get(span.target, ())
    start = span.low
    for low in range(span.low, span.high, BLOCK):
        if low // BLOCK in finished:
            if start < low:
                yield Span(span.target, start, low)
            start = min(low + BLOCK, span.high)
    if start < span.high or span.low == span.high:
        yield Span(span.target, start, span.high)


def _part(plan: Plan, cluster: Sequence[int], part: int, parts: int) -> Unit:
    """The same share of every target of a cluster, so that what they share is read once."""
    spans = []
    for t in cluster:
        total = plan.targets[t].nbytes
        blocks = -(-total // BLOCK)
        low, high = (min(k * blocks // parts * BLOCK, total) for k in (part, part + 1))
        if low < high:
            spans.append(Span(t, low, high))
    return Unit(tuple(spans))


def _most_parts(plan: Plan, cluster: Sequence[int]) -> int:
    """Parts that still hold a block of the smallest target each."""
    smallest = min(plan.targets[t].nbytes for t in cluster)
    return max(1, smallest // BLOCK)


def _clusters(plan: Plan) -> list[list[int]]:
    """Targets that read short runs from overlapping stretches of one source, in stored order."""
    group = list(range(len(plan.targets)))

    def root(t: int) -> int:
        while group[t] != t:
            group[t] = group[group[t]]
            t = group[t]
        return t

    rows = plan.rows
    short = np.flatnonzero(
        (rows[:, SOURCE] >= 0) & (plan.row_runs < SHORT) & (plan.row_hulls > plan.row_runs)
    )
    order = short[np.lexsort((rows[short, FROM], rows[short, SOURCE]))]
    last_source, reach, last_target = -1, 0, -1
    sources, starts = rows[order, SOURCE].tolist(), rows[order, FROM].tolist()
    stops, targets = (
        (rows[order, FROM] + plan.row_hulls[order]).tolist(),
        rows[order, TARGET].tolist(),
    )
    for source, start, stop, target in zip(sources, starts, stops, targets, strict=True):
        if source == last_source and start < reach:
            a, b = root(last_target), root(target)
            group[max(a, b)] = min(a, b)
            reach = max(reach, stop)
        else:
            last_source, reach = source, stop
        last_target = target
    clusters: dict[int, list[int]] = {}
    for t in range(len(plan.targets)):
        clusters.setdefault(root(t), []).append(t)
    return list(clusters.values())


def split_queue(sizes: Sequence[int], workers: int) -> list[list[int]]:
    """Item numbers in ``workers`` contiguous runs of about equal bytes."""
    total, done = sum(sizes), 0
    out: list[list[int]] = [[] for _ in range(workers)]
    for number, nbytes in enumerate(sizes):
        middle = done + nbytes / 2
        out[min(workers - 1, int(middle * workers / total)) if total else 0].append(number)
        done += nbytes
    return out
