"""The mark of a writer at its destination: who holds it, and since when."""

import json
import os
import socket
import time

from d9d_ckpt.errors import DestinationError, MissingError
from d9d_ckpt.formats import claim as marks
from d9d_ckpt.storage.store import Store, join

CLAIM = marks.CLAIM


def claim(store: Store, url: str, save_id: str) -> None:
    """Take the directory ``url`` for this save.

    Raises:
        DestinationError: Another writer holds it; the message says who.
    """
    owner = {"save_id": save_id, "host": socket.gethostname(), "pid": os.getpid()}
    mark = json.dumps(owner | {"time": time.time()}).encode()
    if not store.claim(join(url, CLAIM), mark):
        raise DestinationError(
            f"{url}: claimed by another writer ({holder(store, url)}); if it is gone, delete "
            f"{join(url, CLAIM)} and the unfinished files"
        )


def check(store: Store, url: str, save_id: str) -> None:
    """Make sure, before anything is published, that the claim is still this save's.

    Raises:
        DestinationError: Another writer has taken it over.
    """
    found = holder(store, url)
    if f'"save_id": "{save_id}"' not in found:
        raise DestinationError(f"{url}: another writer has taken it over ({found})")


def holder(store: Store, url: str) -> str:
    """What the claim says."""
    path = join(url, CLAIM)
    try:
        return store.read(path, 0, store.size(path)).decode(errors="replace")
    except MissingError:
        return "which has just finished"
