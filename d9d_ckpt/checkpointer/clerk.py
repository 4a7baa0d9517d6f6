"""Carries out what a trainer asks of its writer, in whichever process that is. Nothing here imports torch."""

import logging
import threading
import traceback
from dataclasses import dataclass, replace
from functools import partial

from d9d_ckpt.checkpointer.messages import (
    Abort,
    Commit,
    Committed,
    Describe,
    Message,
    Prepare,
    Prune,
    Trimmed,
    Write,
    Wrote,
)
from d9d_ckpt.checkpointer.sender import Sending, hashes, send
from d9d_ckpt.checkpointer.staging import Lent
from d9d_ckpt.errors import CkptError, DestinationError, SourceError, StorageError
from d9d_ckpt.formats.base import Arrangement, Content
from d9d_ckpt.formats.existing import NOTHING, Superseded, superseded
from d9d_ckpt.formats.sharded import MANIFEST, check_sizes, listed, read_manifest
from d9d_ckpt.formats.sharded_sink import ShardedSink
from d9d_ckpt.formats.steps import read_run
from d9d_ckpt.run.bucket import Bucket
from d9d_ckpt.run.destination import destination
from d9d_ckpt.run.directory import Directory
from d9d_ckpt.run.retention import prune
from d9d_ckpt.storage.local import LocalStore
from d9d_ckpt.storage.opening import store_for
from d9d_ckpt.storage.store import ObjectStore, Store
from d9d_ckpt.tensors import BLOCK

_LOG = logging.getLogger(__name__)


@dataclass
class _Saving:
    """A save that is not committed.

    Attributes:
        asked: What it was begun with.
        description: What it consists of.
        sink: The format.
        arrangement: Its files.
        destination: Where it goes.
        mine: Files that this process is writing and nobody else counts on yet.
    """

    asked: Prepare
    description: Describe
    sink: ShardedSink
    arrangement: Arrangement
    destination: Directory | Bucket
    mine: tuple[int, ...] = ()


class Clerk:
    """Carries out one message after the other; `leave` and `give_up` may come from other threads."""

    def __init__(self) -> None:
        self._slots: dict[int, Lent] = {}
        self._description: Describe | None = None
        self._saving: _Saving | None = None
        self._aborts = self._aborted = 0
        self._alone = threading.Event()
        self._settling = threading.Lock()

    def answer(self, message: Message[object]) -> object:
        """What comes of ``message``: a CkptError where it fails, whatever the cause."""
        try:
            return self._handled(message)
        except CkptError as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever it is, the trainer must hear of it
            traceback.print_exc()
            return StorageError(
                f"the writer failed at {type(message).__name__.lower()}: "
                f"{type(error).__name__}: {error}; its stderr has the traceback"
            )

    def give_up(self) -> None:
        """Break off what is going on: an `Abort` is on its way."""
        self._aborts += 1

    def leave(self) -> None:
        """Break off what is going on for good: nobody waits for it any more."""
        self._alone.set()

    def lend(self, slot: int, lent: Lent) -> None:
        """Have a slot under a number, in place of the one before."""
        old = self._slots.pop(slot, None)
        if old is not None:
            old.close()
        self._slots[slot] = lent

    def undo(self) -> None:
        """Remove what was written, as far as nobody else can be counting on it."""
        with self._settling:
            saving, self._saving = self._saving, None
            if saving is not None:
                _undone(saving)

    def _check(self) -> None:
        """Raise where what is going on is no longer wanted."""
        if self._alone.is_set():
            raise StorageError("the writer was told to end")
        if self._aborts > self._aborted:
            raise StorageError("the save was given up")

    def _handled(self, message: Message[object]) -> object:
        match message:
            case Describe():
                self._description = message
            case Prepare():
                self._prepare(message)
            case Write():
                return self._write(message)
            case Commit():
                return self._commit(message)
            case Abort():
                self._aborted += 1
                self.undo()
            case Prune():
                self._check()
                return _pruned(message)
        return None

    def _prepare(self, asked: Prepare) -> None:
        self._check()
        self.undo()
        described = self._description
        if described is None:
            raise StorageError(f"{asked.url}: nothing was said of what is saved")
        sink = ShardedSink(asked.manifest, described.specs, described.columns)
        arrangement = sink.arrange(described.targets)
        store = store_for(asked.url, asked.options)
        try:
            destination = _destination(asked, store)
            if asked.coordinator:
                destination.prepare(arrangement, sink.save_id)
        except BaseException:
            store.close()
            raise
        self._saving = _Saving(asked, described, sink, arrangement, destination)

    def _write(self, message: Write) -> Wrote:
        self._check()
        saving = self._current()
        slot = self._slots[message.slot] if isinstance(message.slot, int) else message.slot
        sending = Sending(
            sink=saving.sink,
            targets=saving.description.targets,
            arrangement=saving.arrangement,
            destination=saving.destination,
            options=saving.asked.options,
            codec=saving.asked.codec,
            slot=slot,
            sources=message.sources,
            threads=message.threads,
            check=self._check,
        )
        saving.mine = tuple(sending.files)
        sent = send(sending)
        found = hashes(slot, message.hashed, message.threads)
        # From here on the coordinator may commit them at any time.
        saving.mine = ()
        return Wrote(sent.digests, sent.extents, found, sent.nbytes)

    def _commit(self, message: Commit) -> Committed:
        saving = self._current()
        content = Content(
            saving.description.targets,
            saving.arrangement,
            message.digests,
            message.small,
            message.extents,
        )
        _check_whole(content)
        with self._settling:
            self._check()
            saving.destination.commit(saving.sink, content)
            self._saving = None
            try:
                saving.destination.tidy(saving.sink, content)
            except CkptError as error:
                return Committed(f"what the checkpoint replaced is not all removed: {error}")
            finally:
                saving.destination.store.close()
        return Committed(None)

    def _current(self) -> _Saving:
        if self._saving is None:
            raise StorageError("no save has been prepared")
        return self._saving


def _undone(saving: _Saving) -> None:
    """Remove the files of a save; a store that refuses even that must not hide why it came to it."""
    place, files = saving.destination, saving.arrangement.files
    try:
        if saving.asked.coordinator:
            place.abort(saving.arrangement, saving.sink.save_id)
        for number in saving.mine:
            place.store.delete(place.place(files[number]))
        place.store.close()
    except CkptError as error:
        _LOG.warning("unfinished files are left at %s: %s", place.url, error)


def _destination(asked: Prepare, store: LocalStore | ObjectStore) -> Directory | Bucket:
    old = superseded(store, asked.url) if asked.coordinator else NOTHING
    if old.names and not asked.overwrite:
        _check_broken(store, asked.url, old)
    return destination(store, asked.url, old, asked.work)


def _check_broken(store: Store, url: str, old: Superseded) -> None:
    """A checkpoint with missing or shortened files is nobody's loss; any other one stays.

    Raises:
        DestinationError: It is whole, or nobody here can tell.
    """
    if MANIFEST in old.names:
        try:
            opened = read_manifest(store, url)
        except SourceError as error:
            raise DestinationError(f"{url}: not empty, and not to be judged: {error}") from error
        try:
            check_sizes(partial(listed, store), opened)
        except SourceError:
            return
    raise DestinationError(
        f"{url}: holds a checkpoint already ({old.names[0]}); save another step, or ask for it to be "
        "replaced"
    )


def _check_whole(content: Content) -> None:
    """Every target must have been written.

    Raises:
        StorageError: One was not.
    """
    for number, target in enumerate(content.targets):
        blocks = -(-content.extent(number).nbytes // BLOCK)
        found = len(content.digests.get(number, ()))
        if found != blocks:
            raise StorageError(
                f"tensor {target.name!r}, rank {target.rank}: {found} of {blocks} blocks were "
                "written; nothing is committed"
            )


def _pruned(message: Prune) -> Trimmed:
    store = store_for(message.url, message.options)
    try:
        run = read_run(store, message.url)
        # A link is no step, but what it leads to stays.
        steps = tuple(s for s in run.steps if s.step <= message.step or s.link)
        done = prune(store, replace(run, steps=steps), message.policy, dry_run=False)
    except CkptError as error:
        return Trimmed((), f"{message.url}: old steps are not all removed: {error}")
    finally:
        store.close()
    return Trimmed(done.deleted, None)
