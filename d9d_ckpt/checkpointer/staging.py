"""What one save was given: a slot, memory that a trainer and its writer process share, or live tensors."""

import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_PAGE = 2 << 20
"""Slots are whole huge pages, which registered memory is handled in."""


class Staging:
    """A slot: memory without a name, so that nothing of it outlives the processes that hold it.

    It only grows. Copies reach 12 GB/s into memory that was written before, 4 into fresh pages.

    Attributes:
        fd: Its descriptor, for the writer process; the same whatever the size.
        view: uint8 [nbytes], all of it.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("d9d-ckpt")
        self._closing = weakref.finalize(self, os.close, self.fd)
        self.view: Bytes = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return len(self.view)

    def reserve(self, nbytes: int) -> bool:
        """Grow to ``nbytes`` at least; whether the memory is at another address now.

        What was written stays. Views that were handed out see the same bytes, and keep the old
        mapping until they are dropped.
        """
        if nbytes <= self.nbytes:
            return False
        whole = -(-nbytes // _PAGE) * _PAGE
        os.ftruncate(self.fd, whole)
        self.view = np.frombuffer(mmap.mmap(self.fd, whole), np.uint8)
        return True

    def close(self) -> None:
        """Let go of it; the memory is free once the views and the writer's mapping are gone."""
        self._closing()
        self.fd = -1
        self.view = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Lent:
    """A slot as the writer process sees it, read-only.

    Attributes:
        fd: Its own descriptor.
        view: All of it.
    """

    fd: int
    view: memoryview

    @classmethod
    def map(cls, fd: int, nbytes: int) -> "Lent":
        """The slot behind ``fd``, which is then this object's."""
        try:
            return cls(fd, memoryview(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)))
        except BaseException:
            os.close(fd)
            raise

    def read(self, at: int, nbytes: int) -> memoryview:
        """``nbytes`` from byte ``at`` on."""
        return self.view[at : at + nbytes]

    @property
    def path(self) -> str:
        """A path at which this process can read it as a file."""
        return f"/proc/self/fd/{self.fd}"

    def close(self) -> None:
        """Let go of it."""
        self.view.release()
        os.close(self.fd)


@dataclass(frozen=True)
class Live:
    """Tensors where they are, under the addresses that they would have in a slot.

    Attributes:
        offsets: First byte of each tensor, ascending.
        views: Their bytes.
    """

    offsets: Sequence[int]
    views: Sequence[memoryview]

    def read(self, at: int, nbytes: int) -> memoryview:
        """``nbytes`` of one tensor from byte ``at`` on."""
        number = bisect_right(self.offsets, at) - 1
        low = at - self.offsets[number]
        return self.views[number][low : low + nbytes]
