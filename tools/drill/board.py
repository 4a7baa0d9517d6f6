"""What a drill and its processes share: how often each operation was done, and what is to go wrong."""

import fcntl
import mmap
import os
import pickle
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

KINDS = (
    "stat", "statvfs", "list", "open", "create", "close", "read", "write", "truncate", "chmod",
    "fsync", "rename", "link", "unlink", "mkdir", "rmdir", "save", "end",
    "HEAD", "GET", "LIST", "PUT", "BEGIN", "PART", "COMPLETE", "ABORT", "DELETE", "UPLOADS",
)  # fmt: skip
"""Operations of a file system, as the kernel is asked for them, and requests to an object store."""

_WORD = struct.Struct("<q")
_HITS, _VICTIM, _SIZE, _STRUCK, _WHEN, _FIRST = range(6)
_TEXT = 2048
"""Where the fault is, pickled, behind the counters."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: The operation that it happens to.
        number: Which of them, from 1, over all processes.
        effect: What happens.
    """

    kind: str
    number: int
    effect: str


class Board:
    """Counters in memory that every forked process sees.

    The lock is the kernel's, which a process that is killed lets go of.

    Attributes:
        rank: Whose process this is, where there are several ranks.
    """

    def __init__(self) -> None:
        self.rank = 0
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._lock = os.memfd_create("drill")

    def clear(self) -> None:
        """Nothing has happened yet."""
        self._memory[:] = bytes(len(self._memory))

    def count(self, kind: str) -> int:
        """One more of a kind; how many it makes."""
        with self._locked():
            return self._add(_FIRST + KINDS.index(kind))

    def hit(self) -> None:
        """The fault has happened, here and now."""
        with self._locked():
            if self._add(_HITS) == 1:
                self._put(_STRUCK, self.rank)
                self._put(_WHEN, time.monotonic_ns())

    @property
    def hits(self) -> int:
        """How often the fault has happened."""
        return self._get(_HITS)

    @property
    def struck(self) -> int:
        """The rank that the fault has happened to."""
        return self._get(_STRUCK)

    @property
    def when(self) -> float:
        """When that was, by the monotonic clock, which all processes have in common."""
        return self._get(_WHEN) / 1e9

    @property
    def fault(self) -> Fault | None:
        """What is to go wrong."""
        size = self._get(_SIZE)
        found: Fault | None = None
        if size:
            found = pickle.loads(self._memory[_TEXT : _TEXT + size])  # noqa: S301 - our own
        return found

    @fault.setter
    def fault(self, fault: Fault | None) -> None:
        data = pickle.dumps(fault)
        self._memory[_TEXT : _TEXT + len(data)] = data
        self._put(_SIZE, len(data))

    @property
    def counts(self) -> dict[str, int]:
        """How often each kind was counted."""
        found = {kind: self._get(_FIRST + n) for n, kind in enumerate(KINDS)}
        return {kind: count for kind, count in found.items() if count}

    @property
    def victim(self) -> int:
        """The process group that a fault elsewhere kills."""
        return self._get(_VICTIM)

    @victim.setter
    def victim(self, group: int) -> None:
        self._put(_VICTIM, group)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def _add(self, slot: int) -> int:
        value = self._get(slot) + 1
        self._put(slot, value)
        return value

    def _get(self, slot: int) -> int:
        return int(_WORD.unpack_from(self._memory, slot * _WORD.size)[0])

    def _put(self, slot: int, value: int) -> None:
        _WORD.pack_into(self._memory, slot * _WORD.size, value)
