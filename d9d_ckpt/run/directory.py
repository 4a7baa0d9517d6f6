"""A directory: claimed, filled under private names, and made to exist by its record, last."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from d9d_ckpt.errors import MissingError, StorageError
from d9d_ckpt.formats.base import Arrangement, Digests, Record, Sink
from d9d_ckpt.formats.claim import CLAIM, OURS
from d9d_ckpt.formats.existing import NOTHING, Superseded
from d9d_ckpt.run import claim
from d9d_ckpt.run.commit import replace
from d9d_ckpt.storage.store import FileStore, join
from d9d_ckpt.tensors import Target, format_bytes

_TMP = ".tmp"


@dataclass(frozen=True)
class Directory:
    """Where a checkpoint is written as files.

    Attributes:
        store: The store.
        url: The directory.
        old: What is replaced.
        work: What was asked, for the claim.
        again: Whether an interrupted run of it is gone on with.
    """

    store: FileStore
    url: str
    old: Superseded = NOTHING
    work: Mapping[str, str] = field(default_factory=dict)
    again: bool = False

    def prepare(self, arrangement: Arrangement, save_id: str) -> None:
        """Check room, claim the directory and create the files.

        Raises:
            StorageError: Not enough free space, or the store refused; nothing is left of this.
            DestinationError: Another writer has claimed the directory.
        """
        needed = sum(f.nbytes for f in arrangement.files)
        free = self.store.free(self.url)
        if free is not None and free < needed and not self.again:
            raise StorageError(
                f"{self.url}: {format_bytes(needed)} are to be written, {format_bytes(free)} are free"
            )
        claim.take(self.store, self.url, save_id, self.work, again=self.again)
        try:
            for file in arrangement.files:
                url = join(self.url, file.staged)
                if not (self.again and self._is_there(url, file.nbytes)):
                    self.store.create(url, file.nbytes, self.old.mode)
        except BaseException:
            self.abort(arrangement, save_id)
            raise

    def _is_there(self, url: str, nbytes: int) -> bool:
        try:
            return self.store.size(url) == nbytes
        except MissingError:
            return False

    def commit(
        self,
        sink: Sink,
        targets: Sequence[Target],
        arrangement: Arrangement,
        digests: Digests,
        small: Mapping[str, bytes],
    ) -> None:
        """Headers, durable files, final names, then the record: only now the checkpoint exists.

        When a step fails, what was there before is put back.
        """
        self._finish(sink, arrangement, digests)
        record = sink.record(targets, arrangement, digests, small)
        claim.check(self.store, self.url, sink.save_id)
        renamed = [f for f in arrangement.files if f.staged != f.name]
        with ExitStack() as undo:
            # A single file takes the place of a single file at once; any other set of files to be
            # renamed could be mixed with the old one, which must not look complete meanwhile.
            if renamed and self.old.names != tuple(f.name for f in renamed):
                for name in self.old.names:
                    self._set_aside(name, undo)
            for name, content in small.items():
                self._replace(Record(name, content), undo)
            for file in renamed:
                self.store.publish(join(self.url, file.staged), join(self.url, file.name))
                if self.old.names != (file.name,):
                    undo.callback(self.store.delete, join(self.url, file.name))
            self.store.sync(self.url)
            if record is not None:
                self._replace(record, undo)
            self.store.sync(self.url)
            undo.pop_all()

    def tidy(self, new: Collection[str]) -> None:
        """Remove what the checkpoint has replaced, what was set aside, and the claim."""
        self._delete([name for name in self.old.names if name not in new])
        self._delete([*self._leftovers(), CLAIM])

    def abort(self, arrangement: Arrangement, save_id: str) -> None:
        """Remove what this save has written; what was there before stays."""
        self._delete([f.staged for f in arrangement.files])
        self._delete([save_id, *self._leftovers(), CLAIM])
        self.store.remove_empty(self.url)

    def _finish(self, sink: Sink, arrangement: Arrangement, digests: Digests) -> None:
        """Headers, then everything durable."""
        for number, file in enumerate(arrangement.files):
            header = sink.header(arrangement, number, digests)
            self.store.write(join(self.url, file.staged), 0, memoryview(header))
        self.store.flush()
        for file in arrangement.files:
            self.store.sync(join(self.url, file.staged))
        for directory in sorted({f.staged.rpartition("/")[0] for f in arrangement.files}):
            self.store.sync(join(self.url, directory) if directory else self.url)

    def _set_aside(self, name: str, undo: ExitStack) -> None:
        url, aside = join(self.url, name), join(self.url, f"{OURS}old.{name}{_TMP}")
        self.store.publish(url, aside)
        undo.callback(self.store.publish, aside, url)

    def _replace(self, record: Record, undo: ExitStack) -> None:
        url = join(self.url, record.name)
        replace(self.store, url, record.content, self.old.mode, undo)

    def _leftovers(self) -> list[str]:
        """Temporary files of small ones and of what was set aside; the claim says they are ours."""
        names = self.store.names(self.url)
        return [name for name in names if name.startswith(OURS) and name.endswith(_TMP)]

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.store.delete(join(self.url, name))
