"""A destination: claimed, filled under private names, and made to exist by its record, last."""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from d9d_ckpt.errors import DestinationError, MissingError, StorageError
from d9d_ckpt.formats.base import Arrangement, Digests, Record, Sink
from d9d_ckpt.storage.store import Store, join
from d9d_ckpt.tensors import Target, format_bytes

_CLAIM = ".d9d-claim"


@dataclass(frozen=True)
class Destination:
    """Where a checkpoint is written.

    Attributes:
        store: The store.
        url: The directory.
        superseded: Files of the checkpoint that is replaced, commit record first.
    """

    store: Store
    url: str
    superseded: Sequence[str] = ()

    def prepare(self, arrangement: Arrangement, save_id: str) -> None:
        """Check room, claim the directory and create the files.

        Raises:
            StorageError: Not enough free space.
            DestinationError: Another writer has claimed the directory.
        """
        needed = sum(f.nbytes for f in arrangement.files)
        free = self.store.free(self.url)
        if free is not None and free < needed:
            raise StorageError(
                f"{self.url}: {format_bytes(needed)} are to be written, {format_bytes(free)} are free"
            )
        owner = {"save_id": save_id, "host": socket.gethostname(), "pid": os.getpid()}
        claim = json.dumps(owner | {"time": time.time()}).encode()
        if not self.store.claim(join(self.url, _CLAIM), claim):
            raise DestinationError(
                f"{self.url}: claimed by another writer ({self._holder()}); if it is gone, delete "
                f"{join(self.url, _CLAIM)} and the unfinished files"
            )
        for file in arrangement.files:
            self.store.create(join(self.url, file.staged), file.nbytes)

    def _holder(self) -> str:
        path = join(self.url, _CLAIM)
        try:
            return self.store.read(path, 0, self.store.size(path)).decode(errors="replace")
        except MissingError:
            return "which has just finished"

    def commit(
        self,
        sink: Sink,
        targets: Sequence[Target],
        arrangement: Arrangement,
        digests: Digests,
        small: Mapping[str, bytes],
    ) -> None:
        """Headers, durable files, final names, then the record: only now the checkpoint exists."""
        store = self.store
        for number, file in enumerate(arrangement.files):
            header = sink.header(arrangement, number, digests)
            store.write(join(self.url, file.staged), 0, memoryview(header))
        store.flush()
        for file in arrangement.files:
            store.sync(join(self.url, file.staged))
        record = sink.record(targets, arrangement, digests, small)
        replaced = {file.name for file in arrangement.files} | set(small)
        renamed = [f for f in arrangement.files if f.staged != f.name]
        if renamed and self.superseded and self.superseded[0] not in replaced:
            # From here to the record the old set is gone: a mixed one must never look complete.
            self._delete(self.superseded[:1])
        for directory in sorted({f.staged.rpartition("/")[0] for f in arrangement.files}):
            store.sync(join(self.url, directory) if directory else self.url)
        for name, content in small.items():
            self._put(Record(name, content))
        for file in renamed:
            store.publish(join(self.url, file.staged), join(self.url, file.name))
        store.sync(self.url)
        if record is not None:
            self._put(record)
            store.sync(self.url)
            replaced.add(record.name)
        self._delete([name for name in self.superseded if name not in replaced])
        self._delete([_CLAIM])

    def abort(self, arrangement: Arrangement, save_id: str) -> None:
        """Remove what this save has written; what was there before stays."""
        self._delete([f.staged for f in arrangement.files])
        self._delete([save_id, _CLAIM])
        self.store.remove_empty(self.url)

    def _put(self, record: Record) -> None:
        staged = join(self.url, f".d9d-{record.name}.tmp")
        self.store.create(staged, len(record.content))
        self.store.write(staged, 0, memoryview(record.content))
        self.store.flush()
        self.store.sync(staged)
        self.store.publish(staged, join(self.url, record.name))

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.store.delete(join(self.url, name))
