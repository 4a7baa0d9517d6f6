"""Objects written in parts: each part is whole checksum blocks, made in one buffer and sent at once."""

import logging
import resource
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from d9d_ckpt.errors import CkptError, StorageError
from d9d_ckpt.formats.base import Arrangement, Sink
from d9d_ckpt.plan.assign import Span, Unit
from d9d_ckpt.plan.plan import Plan
from d9d_ckpt.plan.schedule import Limits, tasks
from d9d_ckpt.run.stream import Streamer, Writer
from d9d_ckpt.run.workers import Outcome, Progress
from d9d_ckpt.storage.opening import store_for
from d9d_ckpt.storage.store import ObjectStore, Options, Upload, join
from d9d_ckpt.tensors import BLOCK

_LOG = logging.getLogger(__name__)

PART = 8 << 20
"""Bytes of a part at least, but for the last: above the 5 MiB that S3 asks for."""

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
    what will be written, once to send it.
    """

    def __init__(self, uploads: Uploads, store: ObjectStore, progress: Progress) -> None:
        self._uploads, self._store, self._progress = uploads, store, progress
        self._own = _Thread()
        self._lock = threading.Lock()
        self._streamers: list[Streamer] = []
        self._digests: dict[int, list[tuple[int, list[int]]]] = {}
        self._open: dict[int, Upload] = {}
        self._failed = threading.Event()

    def run(self) -> Outcome:
        """Everything; each object exists when this returns.

        Raises:
            CkptError: What stopped the first part that failed; no object is left open.
        """
        u = self._uploads
        parts = [part for file in u.files for part in parts_of(u.arrangement, u.plan, file)]
        try:
            with ThreadPoolExecutor(u.threads) as pool:
                if not u.sink.plain_headers:
                    self._finish([pool.submit(self._hash, part) for part in parts])
                for file in u.files:
                    url = join(u.destination, u.arrangement.files[file].name)
                    self._open[file] = self._store.upload(url)
                self._finish([pool.submit(self._send, part) for part in parts])
                u.check()
                self._finish([pool.submit(upload.complete) for upload in self._open.values()])
        except BaseException:
            self._drop()
            raise
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        read = sum(s.bytes_read for s in self._streamers)
        written = sum(part.nbytes for part in parts)
        return Outcome(self._digests, read, written, rss)

    def _drop(self) -> None:
        """Abort every upload; a server that refuses even that must not hide why it came to it."""
        for upload in self._open.values():
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
            nbytes, ended = own.streamer.run(task)
            with self._lock:
                self._progress(nbytes, ended)
        self._collect(own.streamer)
        if part.number == 1:
            targets = u.arrangement.files[part.file].targets
            header = u.sink.header(u.arrangement, part.file, _in_order(self._digests, targets))
            view[: len(header)] = header
        self._open[part.file].put(part.number, part.offset, view)

    def _check(self) -> None:
        if self._failed.is_set():
            raise StorageError("another part has failed")

    def _streamer(self, writer: Writer, *, digests: bool) -> Streamer:
        u = self._uploads
        made = Streamer(u.plan, u.limit, store_for(u.source, u.options), writer, digests=digests)
        with self._lock:
            self._streamers.append(made)
        return made

    def _collect(self, streamer: Streamer) -> None:
        with self._lock:
            for target, found in streamer.digests.items():
                self._digests.setdefault(target, []).extend(found)
        streamer.digests.clear()


def _in_order(
    found: Mapping[int, list[tuple[int, list[int]]]], targets: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Digests of targets in block order."""
    return {t: tuple(d for _, part in sorted(found.get(t, ())) for d in part) for t in targets}
