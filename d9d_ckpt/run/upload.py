"""Objects written in parts: each part is whole checksum blocks, made in one buffer and sent at once."""

import logging
import resource
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import zip_longest

from d9d_ckpt.codecs.zstd import Zstd
from d9d_ckpt.errors import CkptError, StorageError
from d9d_ckpt.formats.base import Arrangement, Content, Extent, Sink
from d9d_ckpt.plan.assign import Lot, Span, Unit, members
from d9d_ckpt.plan.plan import Plan
from d9d_ckpt.plan.schedule import Limits, tasks
from d9d_ckpt.run.journal import Written, note
from d9d_ckpt.run.stream import Appender, FileWriter, Place, Streamer, Writer
from d9d_ckpt.run.workers import Outcome, Progress
from d9d_ckpt.storage.local import LocalStore
from d9d_ckpt.storage.opening import store_for
from d9d_ckpt.storage.store import ObjectStore, Options, Upload, join
from d9d_ckpt.tensors import BLOCK

_LOG = logging.getLogger(__name__)

PART = 8 << 20
"""Bytes of a part at least, but for the last: above the 5 MiB that S3 asks for."""

_ABREAST = 4
"""Objects whose parts are sent in turns."""

_MOST_PARTS = 9000
"""Parts of an object at most, of the 10,000 that S3 allows."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of an object.

    Attributes:
        file: Number of the object in the arrangement.
        number: From 1.
        offset: First byte in the object.
        nbytes: Its size.
        unit: The targets' bytes in it; the header is the rest of part 1.
    """

    file: int
    number: int
    offset: int
    nbytes: int
    unit: Unit


def parts_of(arrangement: Arrangement, plan: Plan, file: int) -> list[Part]:
    """An object in parts that are cut at whole checksum blocks of its targets."""
    out = arrangement.files[file]
    size = max(PART, out.nbytes // _MOST_PARTS)
    parts: list[Part] = []
    spans: list[Span] = []
    start, at = 0, len(out.header)
    for target in out.targets:
        total = plan.targets[target].nbytes
        low = 0
        while low < total:
            room = max(BLOCK, (size - (at - start)) // BLOCK * BLOCK)
            high = min(total, low + room)
            spans.append(Span(target, low, high))
            at += high - low
            low = high
            if at - start >= size:
                parts.append(Part(file, len(parts) + 1, start, at - start, Unit(tuple(spans))))
                spans, start = [], at
    if spans or not parts:
        parts.append(Part(file, len(parts) + 1, start, at - start, Unit(tuple(spans))))
    return parts


@dataclass(frozen=True)
class Uploads:
    """What is to be written as objects.

    Attributes:
        plan: The plan.
        sink: The format.
        arrangement: The objects.
        files: Which of them this process writes.
        limit: Buffers of a thread.
        threads: Parts in flight.
        source: URL of the source.
        destination: URL of the destination.
        options: Storage options.
        check: Raises when the destination is no longer this save's; called before objects appear.
        codec: How targets are encoded; None leaves them as they are.
        lots: Where they are encoded, the lots whose objects are ``files``.
    """

    plan: Plan
    sink: Sink
    arrangement: Arrangement
    files: Sequence[int]
    limit: Limits
    threads: int
    source: str
    destination: str
    options: Options
    check: Callable[[], None]
    codec: Zstd | None = None
    lots: Sequence[Lot] = ()


class PartWriter:
    """The buffer of the part that a thread is making."""

    def __init__(self, arrangement: Arrangement) -> None:
        self._places = arrangement.places
        self._buffer = bytearray()
        self._offset = 0

    def begin(self, part: Part) -> memoryview:
        """Start over; the buffer."""
        if len(self._buffer) < part.nbytes:
            self._buffer = bytearray(part.nbytes)
        self._offset = part.offset
        return memoryview(self._buffer)[: part.nbytes]

    def write(self, target: int, start: int, view: memoryview) -> None:
        at = self._places[target][1] + start - self._offset
        self._buffer[at : at + len(view)] = view


class _Nowhere:
    """Outputs that only their digests are wanted of."""

    def write(self, target: int, start: int, view: memoryview) -> None:
        """Let it go."""


class _Thread(threading.local):
    """What each thread keeps for itself."""

    writer: PartWriter | None = None
    streamer: Streamer | None = None
    hasher: Streamer | None = None


class Uploader:
    """Makes and sends every part, those of one object in order.

    Servers that pass parts on as they come wait for the first one, so it cannot be kept for last. Where
    a header holds the checksums of what follows it, the source is therefore read twice: once to hash
    what will be written, once to send it. Objects whose targets are encoded are made in a temporary
    directory of this machine, a lot at a time, since only then it is known where in them what lies.
    """

    def __init__(self, uploads: Uploads, store: ObjectStore, progress: Progress) -> None:
        self._uploads, self._store, self._progress = uploads, store, progress
        self._own = _Thread()
        self._lock = threading.Lock()
        self._streamers: list[Streamer] = []
        self._digests: dict[int, list[tuple[int, list[int]]]] = {}
        self._extents: dict[int, Extent] = {}
        self._open: dict[int, Upload] = {}
        self._left: dict[int, int] = {}
        self._failed = threading.Event()

    def run(self) -> Outcome:
        """Everything; each object exists when this returns.

        Raises:
            CkptError: What stopped the first part that failed; no object is left open.
        """
        u = self._uploads
        try:
            with ThreadPoolExecutor(u.threads) as pool:
                if u.codec is None:
                    self._send_parts(pool)
                else:
                    self._finish([pool.submit(self._stage, lot) for lot in u.lots])
        except BaseException:
            self._drop()
            raise
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        read = sum(s.bytes_read for s in self._streamers)
        written = sum(self._content(file).nbytes(file) for file in u.files)
        return Outcome(self._digests, read, written, rss, self._extents)

    def _send_parts(self, pool: ThreadPoolExecutor) -> None:
        u = self._uploads
        parts = _interleaved([parts_of(u.arrangement, u.plan, file) for file in u.files])
        if not u.sink.plain_headers:
            self._finish([pool.submit(self._hash, part) for part in parts])
        for file in u.files:
            self._open[file] = self._store.upload(self._url(file))
        self._left = Counter(part.file for part in parts)
        self._finish([pool.submit(self._send, part) for part in parts])

    def _drop(self) -> None:
        """Abort every upload; a server that refuses even that must not hide why it came to it."""
        for upload in list(self._open.values()):
            try:
                upload.abort()
            except CkptError as error:
                _LOG.warning("an unfinished upload is left behind: %s", error)

    def _finish(self, futures: Sequence["Future[None]"]) -> None:
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            # An interrupt: the pool must not go through all the rest before it ends.
            self._failed.set()
            for future in futures:
                future.cancel()
            raise
        failed = [f for f in futures if f.done() and f.exception() is not None]
        if failed:
            self._failed.set()
            for future in futures:
                future.cancel()
            failed[0].result()

    def _hash(self, part: Part) -> None:
        self._check()
        own, u = self._own, self._uploads
        if own.hasher is None:
            own.hasher = self._streamer(_Nowhere(), digests=True)
        for task in tasks(u.plan, part.unit, u.limit):
            own.hasher.run(task)
        self._collect(own.hasher)

    def _send(self, part: Part) -> None:
        self._check()
        own, u = self._own, self._uploads
        if own.writer is None or own.streamer is None:
            own.writer = PartWriter(u.arrangement)
            own.streamer = self._streamer(own.writer, digests=u.sink.plain_headers)
        view = own.writer.begin(part)
        for task in tasks(u.plan, part.unit, u.limit):
            self._tell(*own.streamer.run(task))
        self._collect(own.streamer)
        if part.number == 1:
            header = u.sink.header(self._content(part.file), part.file)
            view[: len(header)] = header
        self._open[part.file].put(part.number, part.offset, view)
        with self._lock:
            self._left[part.file] -= 1
            last = not self._left[part.file]
        if last:
            self._complete(part.file)

    def _stage(self, lot: Lot) -> None:
        """Encode a lot to files of this machine and send them."""
        self._check()
        u, store = self._uploads, LocalStore()
        placed = {target: u.arrangement.places[target] for target in members(lot)}
        with tempfile.TemporaryDirectory(prefix="d9d-ckpt-") as folder:
            paths = {file: f"{folder}/{file}" for file, _ in placed.values()}
            places = {t: Place(paths[file], offset) for t, (file, offset) in placed.items()}
            try:
                for file, path in paths.items():
                    store.create(path, len(u.arrangement.files[file].header))
                writer = FileWriter(store, places)
                streamer = self._streamer(Appender(writer, places, {}), digests=True)
                for unit in lot:
                    for task in tasks(u.plan, unit, u.limit):
                        self._check()
                        self._tell(*streamer.run(task))
                writer.flush()
                self._collect(streamer)
                for file, path in sorted(paths.items()):
                    header = u.sink.header(self._content(file), file)
                    store.write(path, 0, memoryview(header))
                    self._send_file(file, store, path)
                    store.delete(path)
            finally:
                store.close()

    def _send_file(self, file: int, store: LocalStore, path: str) -> None:
        total = store.size(path)
        buffer = memoryview(bytearray(min(total, max(PART, total // _MOST_PARTS))))
        self._open[file] = self._store.upload(self._url(file))
        for number, low in enumerate(range(0, total, len(buffer)), 1):
            self._check()
            view = buffer[: min(len(buffer), total - low)]
            store.read_into(path, low, [view])
            self._open[file].put(number, low, view)
        self._complete(file)

    def _complete(self, file: int) -> None:
        """Make an object exist, and note what is in it for a run that has to go on from there."""
        u = self._uploads
        u.check()
        self._open[file].complete()
        with self._lock:
            del self._open[file]
            content = self._content(file)
        written = [
            Written(target, 0, content.digests[target], content.extents.get(target))
            for target in u.arrangement.files[file].targets
        ]
        note(self._store, u.destination, u.sink.save_id, file, written)

    def _content(self, file: int) -> Content:
        """What is known of an object."""
        u = self._uploads
        digests = _in_order(self._digests, u.arrangement.files[file].targets)
        return Content(u.plan.targets, u.arrangement, digests, extents=self._extents)

    def _url(self, file: int) -> str:
        return join(self._uploads.destination, self._uploads.arrangement.files[file].name)

    def _tell(self, nbytes: int, ended: int) -> None:
        with self._lock:
            self._progress(nbytes, ended)

    def _check(self) -> None:
        if self._failed.is_set():
            raise StorageError("another part has failed")

    def _streamer(self, writer: Writer, *, digests: bool) -> Streamer:
        u = self._uploads
        source = store_for(u.source, u.options)
        made = Streamer(u.plan, u.limit, source, writer, codec=u.codec, digests=digests)
        with self._lock:
            self._streamers.append(made)
        return made

    def _collect(self, streamer: Streamer) -> None:
        with self._lock:
            for target, found in streamer.digests.items():
                self._digests.setdefault(target, []).extend(found)
            self._extents.update(streamer.extents)
        streamer.digests.clear()
        streamer.extents.clear()


def _interleaved(objects: Sequence[Sequence[Part]]) -> list[Part]:
    """Parts in the order in which they are sent: some objects side by side, each from its first part on.

    A server that passes parts on as they come takes those of one object one after the other.
    """
    out: list[Part] = []
    for first in range(0, len(objects), _ABREAST):
        rows = zip_longest(*objects[first : first + _ABREAST])
        out += [part for row in rows for part in row if part is not None]
    return out


def _in_order(
    found: Mapping[int, list[tuple[int, list[int]]]], targets: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Digests of targets in block order."""
    return {t: tuple(d for _, part in sorted(found.get(t, ())) for d in part) for t in targets}
