"""Wanted byte runs as few requests, and what comes back put in its places; without I/O."""

from collections import deque
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


class Filling:
    """Views that the bytes of one range fill, one view after the other.

    Attributes:
        nbytes: Bytes in all.
        done: Bytes that are in place.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = deque(view for view in views if len(view))
        self.nbytes = sum(map(len, self._views))
        self.done = 0

    def put(self, data: bytes) -> None:
        """The next bytes, no more than are missing."""
        self.done += len(data)
        rest = memoryview(data)
        while rest:
            view = self._views.popleft()
            count = min(len(view), len(rest))
            view[:count] = rest[:count]
            rest = rest[count:]
            if count < len(view):
                self._views.appendleft(view[count:])


def fillings(views: Sequence[memoryview], largest: int) -> list[Filling]:
    """``views`` in groups of ``largest`` bytes, the last one shorter; views are cut where it needs."""
    groups: list[list[memoryview]] = []
    room = 0
    for view in views:
        rest = view
        while len(rest):
            if not room:
                groups.append([])
                room = largest
            groups[-1].append(rest[:room])
            taken = len(groups[-1][-1])
            rest, room = rest[taken:], room - taken
    return [Filling(group) for group in groups]
