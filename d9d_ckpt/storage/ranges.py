"""Wanted byte runs as few requests, without I/O."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

GAP = 64 << 10
"""Bytes between two runs that are read through: a request takes longer than they do."""

LARGEST = 8 << 20


class Request(NamedTuple):
    """One range of a file, and the numbers of the runs in it."""

    offset: int
    nbytes: int
    runs: tuple[int, ...]


def coalesced(
    offsets: Sequence[int], nbytes: int, *, gap: int = GAP, largest: int = LARGEST
) -> Iterator[Request]:
    """Runs of ``nbytes`` from ``offsets`` as requests sorted by offset.

    Runs at most ``gap`` apart share a request of at most ``largest`` bytes.
    """
    order = sorted(range(len(offsets)), key=lambda n: offsets[n])
    group: list[int] = []
    start = stop = 0
    for n in order:
        offset = offsets[n]
        if group and (offset - stop > gap or offset + nbytes - start > largest):
            yield Request(start, stop - start, tuple(group))
            group = []
        if not group:
            start = offset
        group.append(n)
        stop = max(stop if len(group) > 1 else 0, offset + nbytes)
    if group:
        yield Request(start, stop - start, tuple(group))
