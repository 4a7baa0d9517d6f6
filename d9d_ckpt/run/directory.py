"""A directory: claimed, filled under private names, and made to exist by its record, last."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from d9d_ckpt.errors import MissingError, StorageError
from d9d_ckpt.formats.base import Arrangement, Content, OutFile, Record, Sink
from d9d_ckpt.formats.claim import CLAIM, is_temporary
from d9d_ckpt.formats.existing import NOTHING, Superseded, outranking
from d9d_ckpt.formats.huggingface import SINGLE
from d9d_ckpt.run import claim
from d9d_ckpt.run.commit import names_of, replace, settle_small, small_places
from d9d_ckpt.storage.store import FileStore, join
from d9d_ckpt.tensors import format_bytes


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

    def place(self, file: OutFile) -> str:
        """URL that a file has until the commit."""
        return join(self.url, file.staged)

    @property
    def taken(self) -> Collection[str]:
        """All but a single file's, which is replaced at once."""
        return [name for name in self.old.names if name != SINGLE]

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
        try:
            claim.take(self.store, self.url, save_id, self.work, again=self.again)
        except BaseException:
            self.store.remove_empty(self.url)
            raise
        try:
            for file in arrangement.files:
                url = self.place(file)
                if not (self.again and self._is_there(url, file.nbytes)):
                    self.store.create(url, file.nbytes, self.old.mode)
        except BaseException:
            self.abort(arrangement, save_id)
            raise

    def _is_there(self, url: str, nbytes: int) -> bool:
        try:
            return self.store.size(url) >= nbytes
        except MissingError:
            return False

    def commit(self, sink: Sink, content: Content) -> None:
        """Headers, durable files, final names, then the record: only now the checkpoint exists.

        No file takes the name of one of the old checkpoint, which stays what a reader finds until the
        record is there, but for a single file that is the record itself. When a step fails, what was
        there before is put back.
        """
        self._finish(sink, content)
        record = sink.record(content)
        claim.check(self.store, self.url, sink.save_id)
        before, after = small_places(self.store, self.url, self.old, sink, content)
        with ExitStack() as undo:
            for name, text in before.items():
                self._replace(Record(name, text), undo)
            for file in content.arrangement.files:
                if file.staged != file.name:
                    self.store.publish(self.place(file), join(self.url, file.name))
                    if file.name not in self.old.names:
                        undo.callback(self.store.delete, join(self.url, file.name))
            self._sync_folders([*before, ""])
            if record is not None:
                self._replace(record, undo)
            self.store.sync(self.url)
            rivals = outranking(sink.record_name(content.arrangement), self.old)
            self._delete(rivals)
            undo.pop_all()
        for name, text in after.items():
            self.store.put(join(self.url, name), text, self.old.mode)
        if rivals or after:
            self.store.sync(self.url)

    def tidy(self, sink: Sink, content: Content) -> None:
        """Remove what the checkpoint has replaced, and the claim."""
        if self.old.save_id is not None:
            settle_small(self.store, self.url, sink.save_id, content, self.old.mode)
        new = names_of(sink, content)
        self._delete([name for name in self.old.names if name not in new])
        self._delete([*self._leftovers(), CLAIM])

    def abort(self, arrangement: Arrangement, save_id: str) -> None:
        """Remove what this save has written; what was there before stays."""
        self._delete([f.staged for f in arrangement.files])
        self._delete([save_id, *self._leftovers(), CLAIM])
        self.store.remove_empty(self.url)

    def _finish(self, sink: Sink, content: Content) -> None:
        """Headers, then everything durable."""
        files = content.arrangement.files
        for number, file in enumerate(files):
            url = self.place(file)
            self.store.write(url, 0, memoryview(sink.header(content, number)))
            # An interrupted run may have left more behind the last chunk.
            self.store.truncate(url, content.nbytes(number))
        self.store.flush()
        for file in files:
            self.store.sync(self.place(file))
        self._sync_folders([file.staged for file in files])

    def _sync_folders(self, names: Sequence[str]) -> None:
        """Make the entries of the directories of ``names`` durable."""
        for folder in sorted({name.rpartition("/")[0] for name in names}):
            self.store.sync(join(self.url, folder) if folder else self.url)

    def _replace(self, record: Record, undo: ExitStack) -> None:
        url = join(self.url, record.name)
        replace(self.store, url, record.content, self.old.mode, undo)

    def _leftovers(self) -> list[str]:
        """Journals and temporary files of small ones; the claim says they are ours."""
        return [name for name in self.store.names(self.url) if is_temporary(name)]

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.store.delete(join(self.url, name))
