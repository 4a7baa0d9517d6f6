"""One worker's data path: read, verify, move, hash, write, within fixed buffers."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from d9d_ckpt.codecs.checksum import block_digests, digest, to_hex
from d9d_ckpt.errors import CorruptError
from d9d_ckpt.plan.plan import Plan
from d9d_ckpt.plan.schedule import Limits, Move, Output, Read, Task
from d9d_ckpt.run.gather import Buffer, cast, copy
from d9d_ckpt.storage.store import Store
from d9d_ckpt.tensors import BLOCK

_KEPT_BLOCKS = 16
"""Verified blocks kept because the next task wants the rest of them."""


class Writer(Protocol):
    """Where outputs go."""

    def write(self, target: int, start: int, view: memoryview) -> None:
        """Put ``view`` at byte ``start`` of a target."""
        ...


class Place(NamedTuple):
    """Where a target's bytes lie: a file's URL and the first byte."""

    url: str
    offset: int


class FileWriter:
    """Targets in files that exist already."""

    def __init__(self, store: Store, places: Sequence[Place]) -> None:
        self._store, self._places = store, places

    def write(self, target: int, start: int, view: memoryview) -> None:
        place = self._places[target]
        self._store.write(place.url, place.offset + start, view)


class Streamer:
    """Runs tasks; keeps counts and the digests of what it wrote.

    Attributes:
        digests: Per target, (first block, digests) of each output.
        bytes_read: Bytes asked of the source.
        bytes_written: Bytes given to the writer.
    """

    def __init__(
        self, plan: Plan, limit: Limits, store: Store, writer: Writer, *, digests: bool = True
    ) -> None:
        self.digests: dict[int, list[tuple[int, list[int]]]] = {}
        self.bytes_read = 0
        self.bytes_written = 0
        self._hashing = digests
        self._plan, self._store, self._writer = plan, store, writer
        self._source: Buffer = np.empty(limit.source + limit.tile, np.uint8)
        self._out: Buffer = np.empty(limit.tile, np.uint8)
        self._kept: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._verified: set[int] = set()

    def run(self, task: Task) -> None:
        """Execute one task."""
        for source in task.verify:
            self._verify_whole(source)
        for read in task.reads:
            self._read(read)
        for output in task.outputs:
            view = self._assemble(output)
            if self._hashing:
                self.digests.setdefault(output.target, []).append(
                    (output.start // BLOCK, block_digests(view))
                )
            self._writer.write(output.target, output.start, view)
            self.bytes_written += len(view)

    def _read(self, read: Read) -> None:
        chunk = self._plan.sources[read.source]
        view = memoryview(self._source)[read.at : read.at + read.nbytes]
        kept = None
        if read.offset % BLOCK == 0:
            kept = self._kept.pop((read.source, read.offset // BLOCK), None)
        done = 0
        if kept is not None:
            done = min(len(kept), read.nbytes)
            view[:done] = kept[:done]
        if done < read.nbytes:
            self._store.read_into(chunk.file, chunk.offset + read.offset + done, view[done:])
            self.bytes_read += read.nbytes - done
        if chunk.xxh3 is not None and read.source not in self._verified:
            self._verify(read.source, read.offset + done, view[done:])
        if read.shared:
            last = (read.offset + read.nbytes - 1) // BLOCK
            self._kept[read.source, last] = bytes(view[last * BLOCK - read.offset :])
            if len(self._kept) > _KEPT_BLOCKS:
                self._kept.popitem(last=False)

    def _verify(self, source: int, offset: int, view: memoryview) -> None:
        """Check the blocks that lie whole in ``view``, which starts at ``offset`` of the chunk."""
        chunk = self._plan.sources[source]
        expected = chunk.xxh3 or ()
        first = -(-offset // BLOCK)
        for block in range(first, len(expected)):
            low = block * BLOCK - offset
            high = min(low + BLOCK, chunk.nbytes - offset)
            if high > len(view):
                return
            found = digest(view[low:high])
            if found != expected[block]:
                at = chunk.offset + block * BLOCK
                raise CorruptError(
                    f"{chunk.file}: bytes {at} to {at + high - low} are damaged: checksum "
                    f"{to_hex(expected[block])} was recorded, {to_hex(found)} found; restore the "
                    "file, or list all damage with d9d-ckpt verify"
                )

    def _verify_whole(self, source: int) -> None:
        if source in self._verified:
            return
        chunk = self._plan.sources[source]
        for low in range(0, chunk.nbytes, BLOCK):
            view = memoryview(self._out)[: min(BLOCK, chunk.nbytes - low)]
            self._store.read_into(chunk.file, chunk.offset + low, view)
            self.bytes_read += len(view)
            self._verify(source, low, view)
        self._verified.add(source)

    def _assemble(self, output: Output) -> memoryview:
        """The output's bytes: straight from the source buffer where they lie there in order."""
        if len(output.moves) == 1 and _is_plain(output.moves[0], output.nbytes):
            base = output.moves[0].piece.base
            return memoryview(self._source)[base : base + output.nbytes]
        out = self._out[: output.nbytes]
        if any(move.fill for move in output.moves):
            out.fill(0)
        for move in output.moves:
            if move.fill:
                continue
            if move.casts:
                cast(self._source, out, move.piece, move.dtype, move.casts)
            else:
                copy(self._source, out, move.piece)
        return memoryview(out)


def _is_plain(move: Move, nbytes: int) -> bool:
    digits = move.piece.digits
    return (
        not move.fill
        and not move.casts
        and len(digits) == 1
        and digits[0] == (nbytes, 1, 1)
    )
