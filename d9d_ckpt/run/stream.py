"""One worker's data path: read, verify, move, hash, write, within fixed buffers."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np

from d9d_ckpt.codecs import zstd
from d9d_ckpt.codecs.checksum import block_digests, digest, to_hex
from d9d_ckpt.errors import CorruptError
from d9d_ckpt.formats.base import Extent
from d9d_ckpt.graph.pieces import Piece, cells
from d9d_ckpt.plan.plan import Plan
from d9d_ckpt.plan.schedule import Limits, Move, Output, Pack, Read, Scatter, Task
from d9d_ckpt.run.gather import Buffer, compute, copy
from d9d_ckpt.run.journal import Written
from d9d_ckpt.storage.store import FileStore, Store
from d9d_ckpt.tensors import BLOCK, Coding


class Writer(Protocol):
    """Where outputs go."""

    def write(self, target: int, start: int, view: memoryview) -> Extent | None:
        """Put ``view`` at byte ``start`` of a target; where that is, if it was not known before."""
        ...


class Place(NamedTuple):
    """Where a target's bytes lie: a file's URL and the first byte."""

    url: str
    offset: int


Places = Sequence[Place] | Mapping[int, Place]
"""By number of a target."""

_KEPT_VIEWS = 256
"""Places of scattering reads kept: tiles repeat a few of them."""

_SMALL_WRITE = 64 << 10
_PENDING = 1 << 20


class FileWriter:
    """Targets in files that exist already; small neighbours are written together."""

    def __init__(self, store: FileStore, places: Places) -> None:
        self._store, self._places = store, places
        self._pending = bytearray()
        self._url, self._offset = "", 0

    def write(self, target: int, start: int, view: memoryview) -> Extent | None:
        place = self._places[target]
        self.put(place.url, place.offset + start, view)
        return None

    def put(self, url: str, offset: int, view: memoryview) -> None:
        """Write ``view`` at ``offset`` of a file."""
        follows = url == self._url and offset == self._offset + len(self._pending)
        if not follows or len(self._pending) + len(view) > _PENDING:
            self.flush()
        if len(view) >= _SMALL_WRITE:
            self.flush()
            self._store.write(url, offset, view)
            return
        if not self._pending:
            self._url, self._offset = url, offset
        self._pending += view

    def flush(self) -> None:
        """Write what is pending."""
        if self._pending:
            with memoryview(self._pending) as view:
                self._store.write(self._url, self._offset, view)
            self._pending.clear()


class Appender:
    """Encoded targets, each put behind the one before it in its file.

    Args:
        writer: Who writes.
        places: File and end of the header, by target.
        ends: Where to go on in files that an earlier run has begun, by URL.
    """

    def __init__(self, writer: FileWriter, places: Places, ends: Mapping[str, int]) -> None:
        self._writer, self._places, self._ends = writer, places, dict(ends)

    def write(self, target: int, start: int, view: memoryview) -> Extent | None:
        if start:
            raise ValueError(f"target {target} is not encoded in one piece")
        url, first = self._places[target]
        offset = self._ends.get(url, first)
        self._writer.put(url, offset, view)
        self._ends[url] = offset + len(view)
        return Extent(offset, len(view))


class Streamer:
    """Runs tasks; keeps counts and the digests of what it wrote.

    Attributes:
        digests: Per target, (first block, digests) of each output.
        extents: Places of targets that were not known before.
        bytes_read: Bytes asked of the source.
        bytes_written: Bytes given to the writer.
    """

    def __init__(
        self,
        plan: Plan,
        limit: Limits,
        store: Store,
        writer: Writer,
        *,
        codec: zstd.Zstd | None = None,
        digests: bool = True,
        note: Callable[[Sequence[Written]], None] | None = None,
    ) -> None:
        self.digests: dict[int, list[tuple[int, list[int]]]] = {}
        self.extents: dict[int, Extent] = {}
        self.bytes_read = 0
        self.bytes_written = 0
        self._codec, self._hashing, self._note = codec, digests, note
        self._most_kept = limit.kept
        self._plan, self._store, self._writer = plan, store, writer
        self._source: Buffer = np.empty(limit.source, np.uint8)
        self._window: Buffer = np.empty(limit.sweep, np.uint8)
        self._encoded: Buffer = np.empty(limit.encoded, np.uint8)
        self._between: Buffer = np.empty(limit.gap, np.uint8)
        self._out: Buffer = np.empty(limit.tile, np.uint8)
        self._kept: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._verified: set[int] = set()
        self._views: dict[Piece, list[memoryview]] = {}

    def run(self, task: Task) -> tuple[int, int]:
        """Execute one task; the bytes of the targets made and the targets brought to their end."""
        nbytes = ended = 0
        noted: list[Written] = []
        for source in task.verify:
            self._verify_whole(source)
        self._read(task.reads)
        swept: dict[int, list[Piece]] = {}
        for pack in task.packs:
            if pack.sweep:
                swept.setdefault(pack.source, []).append(pack.piece)
            else:
                self._pack(pack)
        for source, pieces in swept.items():
            self._sweep(source, pieces)
        for output in task.outputs:
            view = self._assemble(output)
            if self._codec is not None:
                itemsize = self._plan.targets[output.target].spec.dtype.itemsize
                view = memoryview(self._codec.encode(view, itemsize))
            found = block_digests(view) if self._hashing else []
            extent = self._writer.write(output.target, output.start, view)
            if extent is not None:
                self.extents[output.target] = extent
            if self._hashing:
                first = output.start // BLOCK
                self.digests.setdefault(output.target, []).append((first, found))
                noted.append(Written(output.target, first, found, extent))
            nbytes += output.nbytes
            self.bytes_written += len(view)
            ended += output.start + output.nbytes == self._plan.targets[output.target].nbytes
        if self._note is not None:
            self._note(noted)
        return nbytes, ended

    def _read(self, reads: Sequence[Read]) -> None:
        """Fill the source buffer, neighbours in one call, and check every whole block."""
        wanted = [left for read in reads if (left := self._from_kept(read)).nbytes]
        start = 0
        for k in range(1, len(wanted) + 1):
            if k == len(wanted) or not self._follows(wanted[k - 1], wanted[k]):
                self._fetch(wanted[start:k])
                start = k
        for read in reads:
            if read.shared:
                self._keep(read)

    def _from_kept(self, read: Read) -> Read:
        """What is left to read when its first block was kept from the task before."""
        kept = self._kept.pop((read.source, read.offset), None)
        if kept is None:
            return read
        done = min(len(kept), read.nbytes)
        self._source[read.at : read.at + done] = np.frombuffer(kept, np.uint8, done)
        return Read(read.source, read.offset + done, read.nbytes - done, read.at + done)

    def _keep(self, read: Read) -> None:
        start = max((read.offset + read.nbytes - 1) // BLOCK * BLOCK, read.offset)
        low = read.at + start - read.offset
        self._kept[read.source, start] = self._source[low : read.at + read.nbytes].tobytes()
        if len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)

    def _follows(self, a: Read, b: Read) -> bool:
        """Whether ``b`` is read with ``a``, which lies before it in the file, in one call."""
        left, right = self._plan.sources[a.source], self._plan.sources[b.source]
        if left.file != right.file or (left.coding is None) != (right.coding is None):
            return False
        if left.coding is not None:
            return left.offset + left.nbytes == right.offset
        gap = right.offset + b.offset - (left.offset + a.offset + a.nbytes)
        return 0 <= gap <= len(self._between)

    def _fetch(self, reads: Sequence[Read]) -> None:
        chunk = self._plan.sources[reads[0].source]
        if chunk.coding is not None:
            self._decode(reads)
            return
        start = at = chunk.offset + reads[0].offset
        begin = end = reads[0].at
        views: list[memoryview] = []
        for read in reads:
            low = self._plan.sources[read.source].offset + read.offset
            if low > at or read.at != end:
                views += [self._source[begin:end].data, self._between[: low - at].data]
                begin = read.at
            at, end = low + read.nbytes, read.at + read.nbytes
        views.append(self._source[begin:end].data)
        self._store.read_into(chunk.file, start, views)
        self.bytes_read += at - start
        for read in reads:
            if self._plan.sources[read.source].xxh3 is not None:
                self._verify(read)

    def _decode(self, reads: Sequence[Read]) -> None:
        """Fill the source buffer from encoded chunks in a row, as many in one call as fit."""
        batch: list[Read] = []
        filled = 0
        for read in reads:
            nbytes = self._plan.sources[read.source].nbytes
            if filled + nbytes > len(self._encoded):
                self._decode_batch(batch, filled)
                batch, filled = [], 0
            batch.append(read)
            filled += nbytes
        self._decode_batch(batch, filled)

    def _decode_batch(self, reads: Sequence[Read], nbytes: int) -> None:
        first = self._plan.sources[reads[0].source]
        self._store.read_into(first.file, first.offset, [self._encoded[:nbytes].data])
        self.bytes_read += nbytes
        at = 0
        for read in reads:
            stored = self._encoded[at : at + self._plan.sources[read.source].nbytes]
            self._decode_one(read.source, stored, self._source[read.at : read.at + read.nbytes])
            at += len(stored)

    def _decode_one(self, source: int, stored: Buffer, out: Buffer) -> None:
        chunk = self._plan.sources[source]
        self._check(source, 0, stored)
        try:
            zstd.decode(stored.data, cast("Coding", chunk.coding).itemsize, out)
        except ValueError as error:
            raise CorruptError(
                f"{chunk.file}: bytes {chunk.offset} to {chunk.offset + chunk.nbytes} do not decode: "
                f"{error}; restore the file, or list all damage with d9d-ckpt verify"
            ) from error

    def _pack(self, pack: Pack) -> None:
        """Read every run by itself."""
        chunk, piece = self._plan.sources[pack.source], pack.piece
        run, outer = 1, piece.digits
        if outer and outer[-1][1:] == (1, 1):
            run, outer = outer[-1].count, outer[:-1]
        first = chunk.offset + piece.base
        offsets = np.array([first], np.int64)
        for d in outer:
            offsets = (offsets[:, None] + np.arange(d.count) * d.address).reshape(-1)
        total = run * len(offsets)
        view = self._source[piece.target : piece.target + total].data
        self._store.read_runs(chunk.file, offsets.tolist(), run, view)
        self.bytes_read += total

    def _sweep(self, source: int, pieces: Sequence[Piece]) -> None:
        """Read through the chunk in windows and pick the runs out of each; whole blocks are checked."""
        chunk, size = self._plan.sources[source], len(self._window)
        if chunk.coding is not None:
            self._pick(source, pieces)
            return
        low = min(p.base for p in pieces) // BLOCK * BLOCK
        stop = max(p.base + p.reach for p in pieces) + 1
        high = min(-(-stop // BLOCK) * BLOCK, chunk.nbytes)
        bounds = [0, *range(low + size, high, size), high]
        parts: dict[int, list[Piece]] = {}
        for piece in pieces:
            for cell, part in cells(piece, high, bounds):
                parts.setdefault(cell, []).append(part)
        for cell in sorted(parts):
            start = max(bounds[cell], low)
            window = self._window[: bounds[cell + 1] - start]
            self._store.read_into(chunk.file, chunk.offset + start, [window.data])
            self.bytes_read += len(window)
            if chunk.xxh3 is not None and source not in self._verified:
                self._check(source, start, window)
            for part in parts[cell]:
                inside = Piece(part.base - start, part.target, part.digits)
                copy(window, self._source, inside)

    def _pick(self, source: int, pieces: Sequence[Piece]) -> None:
        """Decode a chunk and pick the runs out of it."""
        chunk = self._plan.sources[source]
        stored, block = self._encoded[: chunk.nbytes], self._window[: chunk.extent]
        self._store.read_into(chunk.file, chunk.offset, [stored.data])
        self.bytes_read += len(stored)
        self._decode_one(source, stored, block)
        for piece in pieces:
            copy(block, self._source, piece)

    def _verify(self, read: Read) -> None:
        """Check the blocks that lie whole in what was read."""
        if read.source not in self._verified:
            self._check(read.source, read.offset, self._source[read.at : read.at + read.nbytes])

    def _check(self, source: int, offset: int, bytes_: Buffer) -> None:
        chunk = self._plan.sources[source]
        view, expected = bytes_.data, chunk.xxh3 or ()
        for block in range(-(-offset // BLOCK), len(expected)):
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
            block = self._out[: min(BLOCK, chunk.nbytes - low)]
            self._store.read_into(chunk.file, chunk.offset + low, [block.data])
            self.bytes_read += len(block)
            self._check(source, low, block)
        self._verified.add(source)

    def _scatter(self, scatter: Scatter) -> None:
        """Read straight to the places in the output buffer."""
        chunk = self._plan.sources[scatter.source]
        views = self._views.get(scatter.piece)
        if views is None:
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            views = self._views[scatter.piece] = _runs(self._out, scatter.piece)
        self._store.read_into(chunk.file, chunk.offset + scatter.offset, views)
        self.bytes_read += scatter.nbytes

    def _assemble(self, output: Output) -> memoryview:
        """The output's bytes: straight from the source buffer where they lie there in order."""
        if len(output.moves) == 1 and _is_plain(output.moves[0], output.nbytes):
            base = output.moves[0].piece.base
            return self._source[base : base + output.nbytes].data
        out = self._out[: output.nbytes]
        if any(move.fill for move in output.moves):
            out.fill(0)
        for scatter in output.direct:
            self._scatter(scatter)
        for move in output.moves:
            if move.how.computed and not move.fill:
                compute(self._source, out, move)
            elif not move.fill:
                copy(self._source, out, move.piece)
        return out.data


def _runs(out: Buffer, piece: Piece) -> list[memoryview]:
    """The contiguous runs of the piece's targets, in the order of their addresses."""
    *outer, inner = sorted(piece.digits, key=lambda d: -d.address)
    starts = [piece.target]
    for d in outer:
        starts = [start + k * d.stride for start in starts for k in range(d.count)]
    return [out[start : start + inner.count].data for start in starts]


def _is_plain(move: Move, nbytes: int) -> bool:
    digits = move.piece.digits
    return (
        not move.fill and not move.how.computed and len(digits) == 1 and digits[0] == (nbytes, 1, 1)
    )
