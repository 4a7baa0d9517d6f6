"""Taking a destination, keeping it until the record is written, and giving it back."""

import os
import socket
import time

from d9d_ckpt.errors import DestinationError
from d9d_ckpt.formats.claim import CLAIM, Claim, read_claim
from d9d_ckpt.storage.store import Store, join


def take(store: Store, url: str, save_id: str) -> None:
    """Claim the directory ``url`` for this save.

    Raises:
        DestinationError: Another writer holds it; the message says who.
    """
    mine = Claim(socket.gethostname(), os.getpid(), time.time(), save_id=save_id)
    if not store.claim(join(url, CLAIM), mine.encode()):
        raise DestinationError(
            f"{url}: claimed by another writer ({_holder(store, url)}); if it is gone, delete "
            f"{join(url, CLAIM)} and the unfinished files"
        )


def check(store: Store, url: str, save_id: str) -> None:
    """Make sure, before anything is published, that the claim is still this save's.

    Raises:
        DestinationError: Another writer has taken it over, or removed it.
    """
    if not held(store, url, save_id):
        raise DestinationError(f"{url}: taken over by another writer ({_holder(store, url)})")


def held(store: Store, url: str, save_id: str) -> bool:
    """Whether the claim is this save's."""
    found = read_claim(store, join(url, CLAIM))
    return found is not None and found.save_id == save_id


def _holder(store: Store, url: str) -> str:
    found = read_claim(store, join(url, CLAIM))
    return "which has just finished" if found is None else str(found)
