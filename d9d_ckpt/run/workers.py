"""Local workers: processes that drain a queue of lots, or threads where forking is no option."""

import importlib
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from d9d_ckpt.codecs.zstd import Zstd
from d9d_ckpt.errors import CkptError, StorageError
from d9d_ckpt.formats.base import Extents
from d9d_ckpt.plan.assign import Lot
from d9d_ckpt.plan.plan import Plan
from d9d_ckpt.plan.schedule import Limits, tasks
from d9d_ckpt.run.frames import pack, unpack
from d9d_ckpt.run.journal import Journal
from d9d_ckpt.run.stream import Appender, FileWriter, Place, Streamer
from d9d_ckpt.storage.local import LocalStore
from d9d_ckpt.storage.opening import store_for
from d9d_ckpt.storage.store import Options, is_local

Progress = Callable[[int, int], None]
"""Called with the bytes and chunks done since the last call."""

_REPORT = 0.2
"""Seconds between progress messages of a worker."""


@dataclass(frozen=True)
class Job:
    """What every worker is given.

    Attributes:
        plan: The plan.
        lots: All work of this process.
        queues: Numbers of the lots, by worker.
        limit: Buffer sizes of a worker.
        source: URL of the source, for its store.
        destination: URL of the destination, for its store.
        options: Storage options.
        places: Where each target lies; the end of the header of its file where it is encoded.
        save_id: Identity of the save, for the journals.
        codec: How targets are encoded; None leaves them as they are.
        ends: Ends of what files hold already, by URL, where targets are encoded.
    """

    plan: Plan
    lots: Sequence[Lot]
    queues: Sequence[Sequence[int]]
    limit: Limits
    source: str
    destination: str
    options: Options
    places: Sequence[Place]
    save_id: str
    codec: Zstd | None = None
    ends: Mapping[str, int] = field(default_factory=dict)


class Outcome(NamedTuple):
    """What a worker did.

    Attributes:
        digests: Per target, (first block, digests) of each output.
        bytes_read: Bytes read.
        bytes_written: Bytes written.
        peak_rss: Its peak resident memory, bytes.
        extents: Where the encoded targets lie.
    """

    digests: dict[int, list[tuple[int, list[int]]]]
    bytes_read: int
    bytes_written: int
    peak_rss: int
    extents: Extents


def run(job: Job, progress: Progress) -> list[Outcome]:
    """Do all of a job.

    Raises:
        CkptError: What stopped the first worker that failed; the others are stopped as well.
    """
    if len(job.queues) == 1:
        queue = iter(job.queues[0])
        return [_work(job, queue, progress)]
    if forking(job.source, job.destination):
        return _Processes(job, progress).run()
    return _run_threads(job, progress)


def forking(source: str, destination: str) -> bool:
    """Whether local workers are processes: not for other stores, whose clients do not survive a fork.

    Daemon threads, such as the event loop of a store that was used before, may be left behind by a
    fork, since a worker uses nothing of theirs; a thread that somebody waits for may not.
    """
    alone = all(t.daemon or t is threading.main_thread() for t in threading.enumerate())
    main = threading.current_thread() is threading.main_thread()
    return is_local(source) and is_local(destination) and alone and main


def _work(job: Job, numbers: Iterator[int], progress: Progress) -> Outcome:
    source = store_for(job.source, job.options)
    destination = LocalStore()
    files = FileWriter(destination, job.places)
    writer = files if job.codec is None else Appender(files, job.places, job.ends)
    journal = Journal(destination, job.destination, job.save_id)
    streamer = Streamer(job.plan, job.limit, source, writer, codec=job.codec, note=journal.note)
    try:
        for number in numbers:
            for unit in job.lots[number]:
                for task in tasks(job.plan, unit, job.limit):
                    progress(*streamer.run(task))
        files.flush()
    finally:
        source.close()
        destination.close()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return Outcome(
        streamer.digests, streamer.bytes_read, streamer.bytes_written, rss, streamer.extents
    )


def _run_threads(job: Job, progress: Progress) -> list[Outcome]:
    """Threads of this process, for stores whose clients do not survive a fork."""
    queues = [deque(q) for q in job.queues]
    outcomes: list[Outcome] = []
    failures: list[BaseException] = []
    lock = threading.Lock()

    def drain(own: int) -> Iterator[int]:
        for k in range(len(queues)):
            queue = queues[(own + k) % len(queues)]
            while queue and not failures:
                try:
                    yield queue.popleft()
                except IndexError:
                    break

    def tell(nbytes: int, chunks: int) -> None:
        with lock:
            progress(nbytes, chunks)

    def go(own: int) -> None:
        try:
            outcomes.append(_work(job, drain(own), tell))
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            failures.append(error)

    threads = [threading.Thread(target=go, args=(own,)) for own in range(len(queues))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [_joined(outcomes)]


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    """What the threads of one process did."""
    digests: dict[int, list[tuple[int, list[int]]]] = {}
    for outcome in outcomes:
        for target, parts in outcome.digests.items():
            digests.setdefault(target, []).extend(parts)
    read = sum(o.bytes_read for o in outcomes)
    written = sum(o.bytes_written for o in outcomes)
    extents = {target: extent for o in outcomes for target, extent in o.extents.items()}
    return Outcome(digests, read, written, max(o.peak_rss for o in outcomes), extents)


@dataclass
class _Child:
    """A worker process and the pipe on which it reports."""

    pid: int
    pipe: int
    received: bytearray = field(default_factory=bytearray)
    outcome: Outcome | None = None


class _Processes:
    """Forked workers. Each takes lots from its own queue, then from the others'.

    A queue is a pipe filled with lot numbers beforehand: taking one is one atomic read.
    """

    def __init__(self, job: Job, progress: Progress) -> None:
        self._job, self._progress = job, progress

    def run(self) -> list[Outcome]:
        if any(move.computed for move in self._job.plan.movements):
            # Once here, instead of seconds in every child.
            importlib.import_module("torch")
        sys.stdout.flush()
        sys.stderr.flush()
        queues = [_filled_pipe(q) for q in self._job.queues]
        children: list[_Child] = []
        try:
            for own in range(len(queues)):
                children.append(self._fork(own, queues, children))
            return self._listen(children)
        finally:
            for child in children:
                if child.outcome is None:
                    os.kill(child.pid, signal.SIGKILL)
                os.close(child.pipe)
                os.waitpid(child.pid, 0)
            for queue in queues:
                os.close(queue)

    def _fork(self, own: int, queues: Sequence[int], others: Sequence[_Child]) -> _Child:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid:
            os.close(theirs)
            return _Child(pid, ours)
        # Only the parent answers the keyboard; it ends its children itself.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        code = 1
        if "torch" in sys.modules:
            # The parent's thread pool is not there any more; asking it for work would wait for ever.
            sys.modules["torch"].set_num_threads(1)
        try:
            os.close(ours)
            for other in others:
                os.close(other.pipe)
            report = _Report(theirs)
            report.send("done", self._outcome(own, queues, report))
            code = 0
        except BrokenPipeError:
            code = 1  # the parent is gone, and with it whoever could be told
        except BaseException:  # noqa: BLE001 - a child must never return into the parent's frames
            traceback.print_exc()
        finally:
            os._exit(code)

    def _outcome(self, own: int, queues: Sequence[int], report: "_Report") -> Outcome | CkptError:
        try:
            order = [queues[(own + k) % len(queues)] for k in range(len(queues))]
            return _work(self._job, _taken(order), report.progress)
        except CkptError as error:
            return error

    def _listen(self, children: Sequence[_Child]) -> list[Outcome]:
        waiting = {child.pipe: child for child in children}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], 1.0)
            self._progress(0, 0)
            for pipe in ready:
                child = waiting[pipe]
                data = os.read(pipe, 1 << 20)
                child.received += data
                for kind, value in unpack(child.received):
                    if kind == "progress":
                        self._progress(*value)
                    elif isinstance(value, CkptError):
                        raise value
                    else:
                        child.outcome = value
                if not data:
                    if child.outcome is None:
                        raise StorageError(
                            f"worker process {child.pid} died without a word; was it killed, or out of memory?"
                        )
                    del waiting[pipe]
        return [child.outcome for child in children if child.outcome is not None]


class _Report:
    """A worker's end of its pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._last = pipe, time.monotonic()
        self._bytes = self._chunks = 0

    def send(self, kind: str, value: Any) -> None:
        view = memoryview(pack((kind, value)))
        while view:
            view = view[os.write(self._pipe, view) :]

    def progress(self, nbytes: int, chunks: int) -> None:
        self._bytes += nbytes
        self._chunks += chunks
        now = time.monotonic()
        if now - self._last > _REPORT:
            self.send("progress", (self._bytes, self._chunks))
            self._bytes, self._chunks, self._last = 0, 0, now


def _filled_pipe(numbers: Sequence[int]) -> int:
    """The reading end of a pipe that holds ``numbers``, 4 bytes each, and then ends."""
    reader, writer = os.pipe()
    data = b"".join(n.to_bytes(4, "little") for n in numbers)
    os.set_blocking(writer, False)
    done = os.write(writer, data) if data else 0
    os.close(writer)
    if done < len(data):
        raise StorageError(f"{len(numbers)} lots of work do not fit a pipe")
    return reader


def _taken(queues: Sequence[int]) -> Iterator[int]:
    for queue in queues:
        while data := os.read(queue, 4):
            yield int.from_bytes(data, "little")
