"""What a drill and its processes share: how often each operation was done, and what is to go wrong."""

import fcntl
import mmap
import os
import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

KINDS = (
    "stat", "statvfs", "list", "open", "create", "close", "read", "write", "truncate", "chmod",
    "fsync", "rename", "link", "unlink", "mkdir", "rmdir", "end",
    "HEAD", "GET", "LIST", "PUT", "BEGIN", "PART", "COMPLETE", "ABORT", "DELETE", "UPLOADS",
)  # fmt: skip
"""Operations of a file system, as the kernel is asked for them, and requests to an object store."""

_WORD = struct.Struct("<q")
_HITS, _VICTIM, _SIZE, _FIRST = range(4)
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
    """

    def __init__(self) -> None:
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
        """The fault has happened."""
        with self._locked():
            self._add(_HITS)

    @property
    def hits(self) -> int:
        """How often the fault has happened."""
        return self._get(_HITS)

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
