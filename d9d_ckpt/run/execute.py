"""A plan carried out: claimed, shared among ranks and workers, committed; or undone."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from d9d_ckpt.codecs.zstd import Zstd
from d9d_ckpt.errors import CkptError, StorageError
from d9d_ckpt.formats.base import Arrangement, Content, Sink
from d9d_ckpt.plan.assign import Lot, members, split_queue, weight, without
from d9d_ckpt.plan.plan import Plan
from d9d_ckpt.plan.schedule import Limits
from d9d_ckpt.run import claim
from d9d_ckpt.run.bucket import Bucket
from d9d_ckpt.run.commit import Destination
from d9d_ckpt.run.journal import Finished, whole_files
from d9d_ckpt.run.ranks import Ranks
from d9d_ckpt.run.stream import Place
from d9d_ckpt.run.upload import Uploader, Uploads
from d9d_ckpt.run.workers import Job, Outcome, Progress, run
from d9d_ckpt.storage.store import Options
from d9d_ckpt.tensors import BLOCK


@dataclass(frozen=True)
class Work:
    """Everything a run needs beside the ranks.

    Attributes:
        plan: What is copied.
        sink: What is written.
        arrangement: Where every target goes.
        destination: The directory.
        source: URL of the source.
        options: Storage options.
        limit: Buffers of a worker.
        workers: Local worker processes of each rank.
        save_id: Identity of the save, equal on every rank.
        small: Files that go along.
        done: What an interrupted run has finished.
        lots: The work, as it is shared among ranks and workers.
        codec: How targets are encoded; None leaves them as they are.
        committed: Whether the interrupted run had written its record, so that only its claim is left.
    """

    plan: Plan
    sink: Sink
    arrangement: Arrangement
    destination: Destination
    source: str
    options: Options
    limit: Limits
    workers: int
    save_id: str
    small: Mapping[str, bytes]
    done: Finished
    lots: Sequence[Lot]
    codec: Zstd | None = None
    committed: bool = False


@dataclass(frozen=True)
class Done:
    """What was done, over all ranks.

    Attributes:
        bytes_read: Bytes read of the source.
        bytes_written: Bytes written.
        peak_rss: Largest resident memory of any process, bytes.
        processes: Processes that moved data.
    """

    bytes_read: int
    bytes_written: int
    peak_rss: int
    processes: int


def execute(work: Work, ranks: Ranks, progress: Progress) -> Done:
    """Carry out ``work``; on any failure nothing of it is left and every rank raises the cause."""
    if work.committed:
        if ranks.rank == 0:
            _tidied(work)
        return Done(0, 0, 0, 0)
    _prepared(work, ranks)
    try:
        outcomes = _moved(work, ranks, progress)
        _committed(work, ranks, outcomes)
    except BaseException:
        if ranks.rank == 0:
            _aborted(work)
        raise
    if ranks.rank == 0:
        _tidied(work)
    return Done(
        bytes_read=sum(o.bytes_read for o in outcomes),
        bytes_written=sum(o.bytes_written for o in outcomes),
        peak_rss=max((o.peak_rss for o in outcomes), default=0),
        processes=len(outcomes),
    )


_LOG = logging.getLogger(__name__)

T = TypeVar("T")


def together(ranks: Ranks, compute: Callable[[], T], mark: Callable[[T], str]) -> T:
    """The same value, computed by every rank on its own; one that fails or differs stops them all."""
    try:
        value = compute()
    except CkptError as error:
        if ranks.world > 1:
            ranks.gather(error)
        raise
    if ranks.world > 1:
        own = mark(value)
        if any(other != own for other in ranks.gather(own)):
            raise StorageError(
                "ranks have made different plans; do all of them see the same source?"
            )
    return value


def _prepared(work: Work, ranks: Ranks) -> None:
    failure: CkptError | None = None
    if ranks.rank == 0:
        try:
            work.destination.prepare(work.arrangement, work.save_id)
        except CkptError as error:
            failure = error
    ranks.broadcast(failure)


def _moved(work: Work, ranks: Ranks, progress: Progress) -> list[Outcome]:
    """All outcomes on rank 0, its own elsewhere."""
    result: list[Outcome] | CkptError
    try:
        if isinstance(work.destination, Bucket):
            result = [_uploaded(work, work.destination, ranks, _with_beat(progress, ranks))]
        else:
            left = without(_share(work.lots, ranks), work.done.blocks)
            result = run(_job(work, left), _with_beat(progress, ranks))
    except CkptError as error:
        result = error
    gathered = ranks.gather(result)
    if ranks.rank == 0:
        return [outcome for part in gathered for outcome in part]
    return result if isinstance(result, list) else []


def _uploaded(work: Work, bucket: Bucket, ranks: Ranks, progress: Progress) -> Outcome:
    """Whole objects fall to one rank each: their parts and headers belong together."""
    arrangement = work.arrangement
    whole = whole_files(work.done, arrangement, work.plan)
    lots: list[Lot] = []
    if work.codec is None:
        left = [n for n in range(len(arrangement.files)) if n not in whole]
        sizes = [arrangement.files[n].nbytes for n in left]
        files = [left[k] for k in split_queue(sizes, ranks.world)[ranks.rank]]
    else:
        done = {t: work.done.blocks[t] for n in whole for t in arrangement.files[n].targets}
        lots = without(_share(work.lots, ranks), done)
        files = sorted({arrangement.places[t][0] for lot in lots for t in members(lot)})
    uploads = Uploads(
        plan=work.plan,
        sink=work.sink,
        arrangement=work.arrangement,
        files=files,
        limit=work.limit,
        threads=work.workers,
        source=work.source,
        destination=bucket.url,
        options=work.options,
        check=partial(claim.check, bucket.store, bucket.url, work.save_id),
        codec=work.codec,
        lots=lots,
    )
    return Uploader(uploads, bucket.store, progress).run()


def _with_beat(progress: Progress, ranks: Ranks) -> Progress:
    last = time.monotonic()

    def tell(nbytes: int, chunks: int) -> None:
        nonlocal last
        if time.monotonic() - last > 1.0:
            ranks.alive()
            last = time.monotonic()
        progress(nbytes, chunks)

    return tell


def _share(lots: Sequence[Lot], ranks: Ranks) -> list[Lot]:
    numbers = split_queue(list(map(weight, lots)), ranks.world)[ranks.rank]
    return [lots[n] for n in numbers]


def _job(work: Work, mine: Sequence[Lot]) -> Job:
    urls = list(map(work.destination.place, work.arrangement.files))
    ends: dict[str, int] = {}
    for target, extent in work.done.extents.items():
        url = urls[work.arrangement.places[target][0]]
        ends[url] = max(ends.get(url, 0), extent.offset + extent.nbytes)
    return Job(
        plan=work.plan,
        lots=mine,
        queues=split_queue(list(map(weight, mine)), max(1, min(work.workers, len(mine)))),
        limit=work.limit,
        source=work.source,
        destination=work.destination.url,
        options=work.options,
        save_id=work.save_id,
        places=[Place(urls[file], offset) for file, offset in work.arrangement.places],
        codec=work.codec,
        ends=ends,
    )


def _committed(work: Work, ranks: Ranks, outcomes: Sequence[Outcome]) -> None:
    failure: CkptError | None = None
    if ranks.rank == 0:
        try:
            work.destination.commit(work.sink, _content(work, outcomes))
        except CkptError as error:
            failure = error
    ranks.broadcast(failure)


def _aborted(work: Work) -> None:
    """What was written goes; a store that refuses even that must not hide why it came to it."""
    try:
        work.destination.abort(work.arrangement, work.save_id)
    except CkptError as error:
        _LOG.warning("unfinished files are left at %s: %s", work.destination.url, error)


def _tidied(work: Work) -> None:
    """What is left of the old checkpoint goes; the new one stands even if that fails."""
    content = Content(work.plan.targets, work.arrangement, {}, work.small)
    try:
        work.destination.tidy(work.sink, content)
    except CkptError as error:
        _LOG.warning("the checkpoint is complete; what it replaced is not all removed: %s", error)


def _content(work: Work, outcomes: Sequence[Outcome]) -> Content:
    """Digests of every target in block order and places; every block must have been written once."""
    extents = dict(work.done.extents)
    for outcome in outcomes:
        extents.update(outcome.extents)
    content = Content(work.plan.targets, work.arrangement, {}, work.small, extents)
    counts = [-(-content.extent(n).nbytes // BLOCK) for n in range(len(content.targets))]
    blank: list[list[int | None]] = [[None] * count for count in counts]
    for target, blocks in work.done.blocks.items():
        for block, value in blocks.items():
            blank[target][block] = value
    for outcome in outcomes:
        for target, parts in outcome.digests.items():
            for first, values in parts:
                blank[target][first : first + len(values)] = values
    digests = {}
    for number, (box, found) in enumerate(zip(content.targets, blank, strict=True)):
        filled = tuple(v for v in found if v is not None)
        if len(filled) != counts[number]:
            raise StorageError(
                f"tensor {box.name!r}: {len(filled)} of {counts[number]} blocks were written; "
                "nothing is committed"
            )
        digests[number] = filled
    return replace(content, digests=digests)


def new_save_id() -> str:
    """An identity that no other save has: time first, so that listings sort."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.urandom(4).hex()}"
