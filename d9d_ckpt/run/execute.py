"""A plan carried out: claimed, shared among ranks and workers, committed; or undone."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from d9d_ckpt.errors import CkptError, StorageError
from d9d_ckpt.formats.base import Arrangement, Digests, Sink
from d9d_ckpt.plan.assign import Unit, split_queue, units, without
from d9d_ckpt.plan.plan import Plan
from d9d_ckpt.plan.schedule import Limits
from d9d_ckpt.run import claim
from d9d_ckpt.run.bucket import Bucket
from d9d_ckpt.run.commit import Destination
from d9d_ckpt.run.journal import Blocks
from d9d_ckpt.run.ranks import Ranks
from d9d_ckpt.run.stream import Place
from d9d_ckpt.run.upload import Uploader, Uploads
from d9d_ckpt.run.workers import Job, Outcome, Progress, run
from d9d_ckpt.storage.store import Options, is_local, join
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
        done: Blocks that an interrupted run has finished.
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
    done: Blocks


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
            every = units(work.plan, remote=not is_local(work.source))
            left = without(_share(every, ranks), work.done)
            result = run(_job(work, left), _with_beat(progress, ranks))
    except CkptError as error:
        result = error
    gathered = ranks.gather(result)
    if ranks.rank == 0:
        return [outcome for part in gathered for outcome in part]
    return result if isinstance(result, list) else []


def _uploaded(work: Work, bucket: Bucket, ranks: Ranks, progress: Progress) -> Outcome:
    """Whole objects fall to one rank each: their parts and headers belong together."""
    sizes = [file.nbytes for file in work.arrangement.files]
    uploads = Uploads(
        plan=work.plan,
        sink=work.sink,
        arrangement=work.arrangement,
        files=split_queue(sizes, ranks.world)[ranks.rank],
        limit=work.limit,
        threads=work.workers,
        source=work.source,
        destination=bucket.url,
        options=work.options,
        check=partial(claim.check, bucket.store, bucket.url, work.save_id),
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


def _share(all_units: Sequence[Unit], ranks: Ranks) -> list[Unit]:
    numbers = split_queue([u.nbytes for u in all_units], ranks.world)[ranks.rank]
    return [all_units[n] for n in numbers]


def _job(work: Work, mine: Sequence[Unit]) -> Job:
    files = work.arrangement.files
    urls = [join(work.destination.url, f.staged) for f in files]
    return Job(
        plan=work.plan,
        units=mine,
        queues=split_queue([u.nbytes for u in mine], max(1, min(work.workers, len(mine)))),
        limit=work.limit,
        source=work.source,
        destination=work.destination.url,
        options=work.options,
        save_id=work.save_id,
        places=[Place(urls[file], offset) for file, offset in work.arrangement.places],
    )


def _committed(work: Work, ranks: Ranks, outcomes: Sequence[Outcome]) -> None:
    failure: CkptError | None = None
    if ranks.rank == 0:
        try:
            digests = _joined(work.plan, outcomes, work.done)
            work.destination.commit(
                work.sink, work.plan.targets, work.arrangement, digests, work.small
            )
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
    record = work.sink.record_name(work.arrangement)
    new = {f.name for f in work.arrangement.files} | set(work.small) | {record}
    try:
        work.destination.tidy(new)
    except CkptError as error:
        _LOG.warning("the checkpoint is complete; what it replaced is not all removed: %s", error)


def _joined(plan: Plan, outcomes: Sequence[Outcome], done: Blocks) -> Digests:
    """The digests of every target in block order; every block must have been written once."""
    blank: list[list[int | None]] = [[None] * (-(-t.nbytes // BLOCK)) for t in plan.targets]
    for target, blocks in done.items():
        for block, value in blocks.items():
            blank[target][block] = value
    for outcome in outcomes:
        for target, parts in outcome.digests.items():
            for first, values in parts:
                blank[target][first : first + len(values)] = values
    out = {}
    for number, (box, found) in enumerate(zip(plan.targets, blank, strict=True)):
        filled = tuple(v for v in found if v is not None)
        if len(filled) != -(-box.nbytes // BLOCK):
            raise StorageError(
                f"tensor {box.name!r}: {len(filled)} of {-(-box.nbytes // BLOCK)} blocks were "
                "written; nothing is committed"
            )
        out[number] = filled
    return out


def new_save_id() -> str:
    """An identity that no other save has: time first, so that listings sort."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.urandom(4).hex()}"
