"""From a slot to the destination: the targets of one rank, hashed and encoded on the way."""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

import numpy as np

from d9d_ckpt.checkpointer.staging import Lent, Live
from d9d_ckpt.codecs.checksum import block_digests, digest
from d9d_ckpt.codecs.zstd import Zstd
from d9d_ckpt.errors import MissingError, StorageError
from d9d_ckpt.formats.base import Arrangement, Digests, Extent, Extents, Sink
from d9d_ckpt.graph.pieces import Digit
from d9d_ckpt.plan.assign import Lot, Span, Unit
from d9d_ckpt.plan.plan import SCALE, Movement, Plan
from d9d_ckpt.plan.schedule import limits
from d9d_ckpt.run import claim
from d9d_ckpt.run.bucket import Bucket
from d9d_ckpt.run.directory import Directory
from d9d_ckpt.run.stream import Appender, FileWriter, Place
from d9d_ckpt.run.upload import PART, Uploader, Uploads
from d9d_ckpt.storage.local import LocalStore
from d9d_ckpt.storage.store import Options
from d9d_ckpt.tensors import BLOCK, Chunk, Target

IN_FLIGHT = 8
"""Parts sent to an object store at once."""

_COLUMN = 256 << 20
"""Bytes of a file of encoded targets, before encoding: one thread makes one."""


@dataclass(frozen=True)
class Sending:
    """What one rank writes in one save.

    Attributes:
        sink: The format.
        targets: What the arrangement arranges.
        arrangement: Files and places.
        destination: Where to.
        options: Storage options.
        codec: How targets are encoded.
        slot: Where from.
        sources: The first byte in the slot of each target that is written; all those of a file, or none.
        threads: Files written at once.
        check: Raises when all this is no longer wanted.
    """

    sink: Sink
    targets: Sequence[Target]
    arrangement: Arrangement
    destination: Directory | Bucket
    options: Options
    codec: Zstd | None
    slot: Lent | Live
    sources: Mapping[int, int]
    threads: int
    check: Callable[[], None]

    @property
    def files(self) -> list[int]:
        """Numbers of the files that are written."""
        return sorted({self.arrangement.places[target][0] for target in self.sources})

    @property
    def path(self) -> str:
        """The slot as a file, which uploads read.

        Raises:
            StorageError: There is no slot.
        """
        if isinstance(self.slot, Live):
            raise StorageError(f"{self.destination.url}: objects are written from slots alone")
        return self.slot.path

    def source(self, target: int) -> memoryview:
        """The bytes of a target."""
        return self.slot.read(self.sources[target], self.targets[target].nbytes)


@dataclass(frozen=True)
class Sent:
    """Targets as they were written: digests and, if they are encoded, where they lie."""

    digests: Digests
    extents: Extents
    nbytes: int


def columns_of(targets: Sequence[Target]) -> list[list[int]]:
    """Numbers of ``targets`` as they go to files where they are encoded: of one rank, of bounded bytes."""
    out: list[list[int]] = []
    last: dict[int, list[int]] = {}
    filled: dict[int, int] = {}
    for number, target in enumerate(targets):
        if target.rank not in last or filled[target.rank] + target.nbytes > _COLUMN:
            last[target.rank], filled[target.rank] = [], 0
            out.append(last[target.rank])
        last[target.rank].append(number)
        filled[target.rank] += target.nbytes
    return out


def send(s: Sending) -> Sent:
    """Write everything; files are durable and objects exist when this returns.

    Raises:
        CkptError: What stopped the first file that failed.
    """
    if isinstance(s.destination, Bucket):
        return _upload(s, s.destination)
    failed = threading.Event()

    def check() -> None:
        s.check()
        if failed.is_set():
            raise StorageError("another file of this rank has failed")

    with ThreadPoolExecutor(max(1, s.threads)) as pool:
        futures = [pool.submit(_fill, s, s.destination, file, check) for file in s.files]
        try:
            parts = [future.result() for future in as_completed(futures)]
        except BaseException:
            failed.set()
            raise
    return Sent(
        {target: found for part in parts for target, found in part.digests.items()},
        {target: extent for part in parts for target, extent in part.extents.items()},
        sum(part.nbytes for part in parts),
    )


def _fill(s: Sending, destination: Directory, file: int, check: Callable[[], None]) -> Sent:
    """One file, by one thread: two that write to one file of a tmpfs wait for each other."""
    out = s.arrangement.files[file]
    url, store = destination.place(out), LocalStore()
    places = {target: Place(url, s.arrangement.places[target][1]) for target in out.targets}
    writer = FileWriter(store, places)
    try:
        if s.codec is None:
            sent = _copied(s, out.targets, writer, check)
        else:
            sent = _encoded(s, s.codec, out.targets, Appender(writer, places, {}), check)
        writer.flush()
        store.flush()
        # Only this host can make durable what it has written.
        store.sync(url)
    except MissingError as error:
        raise StorageError(
            f"{url}: not there on {socket.gethostname()}, though the coordinator has created it; is it "
            "on storage that all hosts share?"
        ) from error
    finally:
        store.close()
    return sent


def _copied(
    s: Sending, targets: Sequence[int], writer: FileWriter, check: Callable[[], None]
) -> Sent:
    """Targets as they are, block by block: a write finds in the cache what has just been hashed."""
    digests: dict[int, tuple[int, ...]] = {}
    for target in targets:
        view = s.source(target)
        found: list[int] = []
        for low in range(0, len(view), BLOCK):
            check()
            block = view[low : low + BLOCK]
            found.append(digest(block))
            writer.write(target, low, block)
        digests[target] = tuple(found)
    return Sent(digests, {}, sum(s.targets[target].nbytes for target in targets))


def _encoded(
    s: Sending,
    codec: Zstd,
    targets: Sequence[int],
    appender: Appender,
    check: Callable[[], None],
) -> Sent:
    """Encoded targets, one behind the other."""
    digests: dict[int, tuple[int, ...]] = {}
    extents: dict[int, Extent] = {}
    for target in targets:
        check()
        itemsize = s.targets[target].spec.dtype.itemsize
        stored = memoryview(codec.encode(s.source(target), itemsize))
        digests[target] = tuple(block_digests(stored))
        extent = appender.write(target, 0, stored)
        if extent is not None:
            extents[target] = extent
    return Sent(digests, extents, sum(extent.nbytes for extent in extents.values()))


def _upload(s: Sending, bucket: Bucket) -> Sent:
    """Objects, by the uploader that conversions use: the slot is the file that it reads."""
    plan = _plan(s)
    lots: list[Lot] = []
    if s.codec is not None:
        for file in s.files:
            members = s.arrangement.files[file].targets
            lots.append((Unit(tuple(Span(t, 0, s.targets[t].nbytes) for t in members)),))
    uploads = Uploads(
        plan=plan,
        sink=s.sink,
        arrangement=s.arrangement,
        files=s.files,
        limit=limits(IN_FLIGHT * 4 * PART, IN_FLIGHT, part=PART),
        threads=IN_FLIGHT,
        source=s.path,
        destination=bucket.url,
        options=s.options,
        check=partial(claim.check, bucket.store, bucket.url, s.sink.save_id),
        codec=s.codec,
        lots=lots,
    )
    done = Uploader(uploads, bucket.store, lambda _nbytes, _targets: s.check()).run()
    digests = {
        target: tuple(value for _, values in sorted(parts) for value in values)
        for target, parts in done.digests.items()
    }
    return Sent(digests, done.extents, done.bytes_written)


def _plan(s: Sending) -> Plan:
    """Every target as one copy of bytes that lie together in the slot."""
    sources: list[Chunk] = []
    movements: dict[Movement, int] = {}
    rows: list[tuple[int, ...]] = []
    for target, offset in sorted(s.sources.items()):
        t = s.targets[target]
        item = t.spec.dtype.itemsize
        move = Movement((Digit(t.box.numel, item, item),), t.spec.dtype, ())
        number = movements.setdefault(move, len(movements))
        rows.append((target, len(sources), 0, 0, number, -1))
        sources.append(Chunk(t.box, s.path, offset, t.nbytes))
    return Plan(
        s.targets, sources, list(movements), np.array(rows, np.int64).reshape(-1, SCALE + 1)
    )


def hashes(
    slot: Lent | Live, stretches: Sequence[tuple[int, int]], threads: int
) -> tuple[int, ...]:
    """xxh3 of each (first byte, bytes) of a slot."""
    with ThreadPoolExecutor(max(1, threads)) as pool:
        return tuple(pool.map(lambda s: digest(slot.read(*s)), stretches))
