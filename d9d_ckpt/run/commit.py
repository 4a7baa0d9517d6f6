"""What every destination does: it is claimed, and the record that makes a checkpoint comes last."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from d9d_ckpt.errors import MissingError
from d9d_ckpt.formats.base import Arrangement, Digests, Sink
from d9d_ckpt.storage.store import Store
from d9d_ckpt.tensors import Target


def replace(store: Store, url: str, content: bytes, mode: int | None, undo: ExitStack) -> None:
    """Put a small file in place; ``undo`` puts back what was there, or nothing."""
    try:
        before = store.read(url, 0, store.size(url))
    except MissingError:
        undo.callback(store.delete, url)
    else:
        if before == content:
            return
        undo.callback(store.put, url, before, mode)
    store.put(url, content, mode)


class Destination(Protocol):
    """Where a checkpoint is written."""

    @property
    def store(self) -> Store:
        """The store."""
        ...

    @property
    def url(self) -> str:
        """The directory or prefix."""
        ...

    def prepare(self, arrangement: Arrangement, save_id: str) -> None:
        """Check what can be checked, claim the place, and get ready to be written.

        Raises:
            StorageError: Not enough free space, or the store refused; nothing is left of this.
            DestinationError: Another writer has claimed it.
        """
        ...

    def commit(
        self,
        sink: Sink,
        targets: Sequence[Target],
        arrangement: Arrangement,
        digests: Digests,
        small: Mapping[str, bytes],
    ) -> None:
        """Make the checkpoint exist; when a step fails, what was there before is put back."""
        ...

    def tidy(self, new: Collection[str]) -> None:
        """Remove what a committed checkpoint of the files ``new`` has replaced, and the claim.

        The checkpoint exists whether or not this succeeds.
        """
        ...

    def abort(self, arrangement: Arrangement, save_id: str) -> None:
        """Remove what this save has written; what was there before stays."""
        ...
