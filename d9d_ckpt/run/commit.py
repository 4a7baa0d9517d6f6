"""What every destination does: it is claimed, and the record that makes a checkpoint comes last."""

from collections.abc import Collection
from contextlib import ExitStack
from typing import Protocol

from d9d_ckpt.errors import MissingError
from d9d_ckpt.formats.base import Arrangement, Content, OutFile, Sink
from d9d_ckpt.formats.existing import Superseded
from d9d_ckpt.formats.sharded import MANIFEST
from d9d_ckpt.storage.store import Store, join


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


def small_places(
    store: Store, url: str, old: Superseded, sink: Sink, content: Content
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Which small files go in place before the record, and which only after it, by their names.

    An old manifest has the digests of the files beside it, so they must stay as they are for as long
    as it counts. A manifest finds the new ones among its weights until `settle_small` moves them; an
    index knows of none.
    """
    if old.save_id is None:
        return dict(content.small), {}
    changed = {
        name: text for name, text in content.small.items() if _differs(store, url, name, text)
    }
    if sink.record_name(content.arrangement) != MANIFEST:
        return {}, changed
    return {f"{sink.save_id}/{name}": text for name, text in changed.items()}, {}


def settle_small(store: Store, url: str, save_id: str, content: Content, mode: int | None) -> None:
    """Put small files that a commit has left among the weights where people look for them."""
    inside = join(url, save_id)
    for name in store.names(inside):
        if name in content.small:
            store.put(join(url, name), content.small[name], mode)
            store.delete(join(inside, name))


def _differs(store: Store, url: str, name: str, text: bytes) -> bool:
    try:
        return store.read(join(url, name), 0, store.size(join(url, name))) != text
    except MissingError:
        return True


def names_of(sink: Sink, content: Content) -> set[str]:
    """Everything directly in the directory that belongs to a checkpoint."""
    files = {file.name for file in content.arrangement.files}
    return {*files, *content.small, sink.save_id, sink.record_name(content.arrangement)}


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

    @property
    def old(self) -> Superseded:
        """What is replaced."""
        ...

    def place(self, file: OutFile) -> str:
        """URL that a file has until the commit."""
        ...

    @property
    def taken(self) -> Collection[str]:
        """Names that new files cannot have, since the checkpoint that is replaced needs them."""
        ...

    def prepare(self, arrangement: Arrangement, save_id: str) -> None:
        """Check what can be checked, claim the place, and get ready to be written.

        Raises:
            StorageError: Not enough free space, or the store refused; nothing is left of this.
            DestinationError: Another writer has claimed it.
        """
        ...

    def commit(self, sink: Sink, content: Content) -> None:
        """Make the checkpoint exist; when a step fails, what was there before is put back."""
        ...

    def tidy(self, sink: Sink, content: Content) -> None:
        """Remove what a committed checkpoint has replaced, and the claim.

        The checkpoint exists whether or not this succeeds.
        """
        ...

    def abort(self, arrangement: Arrangement, save_id: str) -> None:
        """Remove what this save has written; what was there before stays."""
        ...
