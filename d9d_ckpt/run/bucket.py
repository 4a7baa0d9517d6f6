"""A destination without renames: objects exist when they are complete, a checkpoint by its record."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from d9d_ckpt.errors import DestinationError
from d9d_ckpt.formats.base import Arrangement, Digests, Sink
from d9d_ckpt.formats.claim import CLAIM
from d9d_ckpt.formats.existing import NOTHING, Superseded
from d9d_ckpt.run import claim
from d9d_ckpt.run.commit import replace
from d9d_ckpt.storage.store import ObjectStore, join
from d9d_ckpt.tensors import Target


@dataclass(frozen=True)
class Bucket:
    """Where a checkpoint is written as objects.

    Attributes:
        store: The store.
        url: The prefix.
        old: What is replaced.
    """

    store: ObjectStore
    url: str
    old: Superseded = NOTHING

    def prepare(self, arrangement: Arrangement, save_id: str) -> None:
        """Claim the prefix.

        Raises:
            DestinationError: Another writer has it, or objects would replace those of a checkpoint
                one by one, which nothing could undo.
        """
        taken = sorted({f.name for f in arrangement.files} & set(self.old.names))
        if taken:
            raise DestinationError(
                f"{self.url}: {', '.join(taken[:4])} would be replaced before the new checkpoint is "
                "complete, and objects cannot be set aside; write to another place"
            )
        claim.take(self.store, self.url, save_id, {})

    def commit(
        self,
        sink: Sink,
        targets: Sequence[Target],
        arrangement: Arrangement,
        digests: Digests,
        small: Mapping[str, bytes],
    ) -> None:
        """Small files, then the record, once the claim is still ours."""
        record = sink.record(targets, arrangement, digests, small)
        claim.check(self.store, self.url, sink.save_id)
        with ExitStack() as undo:
            for name, content in small.items():
                replace(self.store, join(self.url, name), content, None, undo)
            if record is not None:
                replace(self.store, join(self.url, record.name), record.content, None, undo)
            undo.pop_all()

    def tidy(self, new: Collection[str]) -> None:
        """Remove what the checkpoint has replaced, and the claim."""
        for name in [n for n in self.old.names if n not in new]:
            self.store.delete(join(self.url, name))
        self.store.delete(join(self.url, CLAIM))

    def abort(self, arrangement: Arrangement, save_id: str) -> None:
        """Remove what this save has written; what was there before stays."""
        mine = claim.held(self.store, self.url, save_id)
        for file in arrangement.files:
            # Names without the save id may be a successor's by now.
            if mine or file.name.startswith(f"{save_id}/"):
                self.store.delete(join(self.url, file.name))
        if mine:
            self.store.delete(join(self.url, CLAIM))
