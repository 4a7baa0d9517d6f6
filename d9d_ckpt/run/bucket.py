"""A destination without renames: objects exist when they are complete, a checkpoint by its record."""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from d9d_ckpt.formats.base import Arrangement, Content, OutFile, Sink
from d9d_ckpt.formats.claim import CLAIM, is_temporary, note_name, read_claim
from d9d_ckpt.formats.existing import NOTHING, Superseded, outranking
from d9d_ckpt.run import claim
from d9d_ckpt.run.commit import names_of, replace, settle_small, small_places
from d9d_ckpt.storage.store import ObjectStore, join

_AT_ONCE = 16
"""Deletions under way at once."""


@dataclass(frozen=True)
class Bucket:
    """Where a checkpoint is written as objects.

    Attributes:
        store: The store.
        url: The prefix.
        old: What is replaced.
        work: What was asked, for the claim.
        again: Whether an interrupted run of it is gone on with.
    """

    store: ObjectStore
    url: str
    old: Superseded = NOTHING
    work: Mapping[str, str] = field(default_factory=dict)
    again: bool = False

    def place(self, file: OutFile) -> str:
        """URL of an object, from the first; nothing is there before all of it is."""
        return join(self.url, file.name)

    @property
    def taken(self) -> Collection[str]:
        """All that the old checkpoint has: an object cannot be set aside, and is there when it is sent."""
        return self.old.names

    def prepare(self, arrangement: Arrangement, save_id: str) -> None:
        """Claim the prefix.

        Raises:
            DestinationError: Another writer has it.
        """
        before = read_claim(self.store, join(self.url, CLAIM))
        claim.take(self.store, self.url, save_id, self.work, again=self.again)
        if before is not None and before.save_id not in ("", save_id):
            self._each(self.store.delete, self._notes(arrangement, before.save_id))

    def commit(self, sink: Sink, content: Content) -> None:
        """Small files, then the record, once the claim is still ours.

        When a step fails, what was there before is put back.
        """
        record = sink.record(content)
        claim.check(self.store, self.url, sink.save_id)
        before, after = small_places(self.store, self.url, self.old, sink, content)
        with ExitStack() as undo:
            for name, text in before.items():
                replace(self.store, join(self.url, name), text, None, undo)
            if record is not None:
                replace(self.store, join(self.url, record.name), record.content, None, undo)
            for name in outranking(sink.record_name(content.arrangement), self.old):
                self.store.delete(join(self.url, name))
            undo.pop_all()
        for name, text in after.items():
            self.store.put(join(self.url, name), text)

    def tidy(self, sink: Sink, content: Content) -> None:
        """Remove what the checkpoint has replaced, and the claim."""
        if self.old.save_id is not None:
            settle_small(self.store, self.url, sink.save_id, content, None)
        new = names_of(sink, content)
        for name in [n for n in self.old.names if n not in new]:
            self.store.delete(join(self.url, name))
        # A request may have reached the server twice, and late.
        names = [file.name for file in content.arrangement.files]
        private = all(name.startswith(f"{sink.save_id}/") for name in names)
        self._each(self.store.drop_uploads, [sink.save_id] if private else names)
        left = set(filter(is_temporary, self.store.names(self.url)))
        self._each(self.store.delete, left | self._notes(content.arrangement, sink.save_id))
        self.store.delete(join(self.url, CLAIM))

    def abort(self, arrangement: Arrangement, save_id: str) -> None:
        """Remove what this save has written; what was there before stays."""
        mine = claim.held(self.store, self.url, save_id)
        # Names without the save id may be a successor's by now.
        names = [file.name for file in arrangement.files if mine or save_id in file.name]
        for name in [*names, save_id]:
            self.store.delete(join(self.url, name))
        self._each(self.store.delete, self._notes(arrangement, save_id))
        if mine:
            self.store.delete(join(self.url, CLAIM))

    def _notes(self, arrangement: Arrangement, save_id: str) -> set[str]:
        """The notes of a save; a listing may not show yet what has just been put."""
        notes = {note_name(save_id, number) for number in range(len(arrangement.files))}
        listed = self.store.names(self.url)
        return notes.union(name for name in listed if is_temporary(name) and save_id in name)

    def _each(self, act: Callable[[str], None], names: Collection[str]) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(act, [join(self.url, name) for name in sorted(names)]))
