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

_SMALL_UNIT = 16 << 20
"""What one connection to a store fetches in some milliseconds."""

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


def units(plan: Plan, *, small: bool = False) -> list[Unit]:
    """All work, in the order in which the targets are stored.

    Args:
        plan: The plan.
        small: Whether many small units are better: where the source answers slowly, all workers are
            kept waiting at once until the end.
    """
    size = max(_SMALL_UNIT if small else _UNIT, plan.bytes_written // _MOST_UNITS)
    clusters = _clusters(plan)
    return _grouped(plan, _interleaved(plan, clusters, size) if small else clusters, size)


def _grouped(plan: Plan, clusters: Sequence[Sequence[int]], size: int) -> list[Unit]:
    """Clusters in units of about ``size`` bytes."""
    out: list[Unit] = []
    batch: list[Span] = []
    batched = 0
    for cluster in clusters:
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


Lot = tuple[Unit, ...]
"""Units that one worker does one after the other."""

_COLUMN = 256 << 20
"""Bytes of a column at least, where there are enough of them for all workers."""

_LEAST_COLUMNS = 8
_RANKS = 4
"""Ranks that may share a column of the least size; more make it larger, so that files do not get small."""


def columns(plan: Plan) -> list[Lot]:
    """All work in lots whose targets can go to files that nobody else writes."""
    least = min(_COLUMN, plan.bytes_written // _LEAST_COLUMNS)
    out: list[Lot] = []
    lot: list[Unit] = []
    ranks: set[int] = set()
    nbytes = 0
    for unit in _grouped(plan, _clusters(plan), min(_UNIT, max(BLOCK, least // 4))):
        lot.append(unit)
        ranks.update(plan.targets[span.target].rank for span in unit.spans)
        nbytes += unit.nbytes
        if nbytes >= least * max(1.0, len(ranks) / _RANKS):
            out.append(tuple(lot))
            lot, ranks, nbytes = [], set(), 0
    if lot:
        out.append(tuple(lot))
    return out


def members(lot: Lot) -> list[int]:
    """The targets of a lot."""
    return [span.target for unit in lot for span in unit.spans]


def weight(lot: Lot) -> int:
    """Bytes that a lot writes."""
    return sum(unit.nbytes for unit in lot)


def without(work: Iterable[Lot], done: Mapping[int, Collection[int]]) -> list[Lot]:
    """``work`` but for finished blocks, given by target and number."""
    out = []
    for lot in work:
        left = []
        for unit in lot:
            spans = tuple(part for span in unit.spans for part in _unfinished(span, done))
            if spans or not unit.spans:
                left.append(Unit(spans))
        if left:
            out.append(tuple(left))
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


def _interleaved(plan: Plan, clusters: Sequence[list[int]], size: int) -> list[list[int]]:
    """Clusters above ``size`` that read from the same stretch of a file joined, in stored order.

    Split experts lie in a file as down, gate, up, down, ...: read for one target alone they are one
    request each, read for both they are one stretch.
    """
    large = [c for c in clusters if sum(plan.targets[t].nbytes for t in c) > size]
    found = sorted((s, c) for c in large if (s := _stretch(plan, c)) is not None)
    joined: list[tuple[str, int, list[int]]] = []
    for (file, low, high), cluster in found:
        if joined and joined[-1][0] == file and low < joined[-1][1]:
            _, reach, members = joined.pop()
            joined.append((file, max(reach, high), members + cluster))
        else:
            joined.append((file, high, cluster))
    placed = {t for _, _, members in joined for t in members}
    out = [sorted(members) for _, _, members in joined]
    return sorted(out + [c for c in clusters if c[0] not in placed])


def _stretch(plan: Plan, cluster: Sequence[int]) -> tuple[str, int, int] | None:
    """File, first byte and end of all that a cluster reads; None where that is several files or none."""
    rows = np.concatenate([np.arange(plan.starts[t], plan.starts[t + 1]) for t in cluster])
    rows = rows[plan.rows[rows, SOURCE] >= 0]
    chunks = [plan.sources[n] for n in plan.rows[rows, SOURCE].tolist()]
    if len({chunk.file for chunk in chunks}) != 1:
        return None
    starts = np.array([chunk.offset for chunk in chunks]) + plan.rows[rows, FROM]
    return chunks[0].file, int(starts.min()), int((starts + plan.row_hulls[rows]).max())


def split_queue(sizes: Sequence[int], workers: int) -> list[list[int]]:
    """Item numbers in ``workers`` contiguous runs of about equal bytes."""
    total, done = sum(sizes), 0
    out: list[list[int]] = [[] for _ in range(workers)]
    for number, nbytes in enumerate(sizes):
        middle = done + nbytes / 2
        out[min(workers - 1, int(middle * workers / total)) if total else 0].append(number)
        done += nbytes
    return out
