"""A destination without renames: objects exist when they are complete, a checkpoint by its record."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from d9d_ckpt.errors import DestinationError
from d9d_ckpt.formats.base import Arrangement, Digests, Sink
from d9d_ckpt.formats.claim import CLAIM
from d9d_ckpt.formats.existing import NOTHING, Superseded
from d9d_ckpt.run import claim
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
        if taken and len(arrangement.files) > 1:
            raise DestinationError(
                f"{self.url}: {', '.join(taken[:4])} would be replaced one by one, and a failure in "
                "between would leave a mixture; write to another place"
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
        for name, content in small.items():
            self.store.put(join(self.url, name), content)
        if record is not None:
            self.store.put(join(self.url, record.name), record.content)

    def tidy(self, new: Collection[str]) -> None:
        """Remove what the checkpoint has replaced, and the claim."""
        for name in [n for n in self.old.names if n not in new]:
            self.store.delete(join(self.url, name))
        self.store.delete(join(self.url, CLAIM))

    def abort(self, arrangement: Arrangement, save_id: str) -> None:
        """Remove what this save has written; what was there before stays."""
        for file in arrangement.files:
            if file.name not in self.old.names:
                self.store.delete(join(self.url, file.name))
        self.store.delete(join(self.url, save_id))
        if claim.held(self.store, self.url, save_id):
            self.store.delete(join(self.url, CLAIM))
