"""Taking a destination, keeping it until the record is written, and giving it back."""

import os
import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from d9d_ckpt.errors import DestinationError
from d9d_ckpt.formats.claim import CLAIM, SAVE, Claim, is_temporary, read_claim
from d9d_ckpt.formats.existing import superseded
from d9d_ckpt.storage.store import Store, join


def take(
    store: Store, url: str, save_id: str, work: Mapping[str, str], *, again: bool = False
) -> None:
    """Claim the directory ``url`` for this save; ``again`` takes over the claim of the run before.

    The claim of a writer that is certainly gone is no obstacle: what it left is removed.

    Raises:
        DestinationError: Another writer holds it; the message says who.
    """
    place = join(url, CLAIM)
    old = superseded(store, url).names
    host, pid = socket.gethostname(), os.getpid()
    mine = Claim(host, pid, time.time(), save_id=save_id, work=work, old=old).encode()
    # Looked at first: not every store refuses the second of two claims.
    found = read_claim(store, place)
    gone = found is not None and bool(SAVE.fullmatch(found.save_id)) and not alive(found)
    if found is not None and (again or gone):
        # Before the claim that names it is replaced: whoever comes next would not know of it.
        _sweep(store, url, found, old, unfinished=not again)
    if again or gone:
        store.put(place, mine)
    elif found is not None or not store.claim(place, mine):
        raise DestinationError(
            f"{url}: claimed by another writer ({_holder(store, url)}); if it is gone, delete "
            f"{place} and the unfinished files"
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


def occupied(store: Store, url: str) -> list[str]:
    """What lies in a destination, but for what nothing has come of: temporary files, empty saves."""
    return [
        name
        for name in store.names(url)
        if not is_temporary(name) and (not SAVE.fullmatch(name) or store.names(join(url, name)))
    ]


def alive(found: Claim) -> bool:
    """Whether a claim may be of a process that still works; of other hosts nothing is known."""
    if found.host != socket.gethostname():
        return True
    if found.pid == os.getpid():
        return True
    try:
        os.kill(found.pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return not _ended(found.pid)


def _ended(pid: int) -> bool:
    """Whether a process is over and nobody has asked how: a container's first process may never ask."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # gone by now, or there is no such file system
        return False
    return text.rpartition(")")[2].split()[0] in ("Z", "X")


def interrupted(
    store: Store, url: str, work: Mapping[str, str], *, take_over: bool
) -> Claim | None:
    """The claim of an interrupted run of the same work; None where nothing was begun.

    Raises:
        DestinationError: A run of other work was begun there (the message says what differs), or
            its process may still be at work.
    """
    found = read_claim(store, join(url, CLAIM))
    if found is None:
        names = occupied(store, url)
        if names:
            raise DestinationError(
                f"{url}: not empty ({', '.join(names[:4])}), and no interrupted run to resume; choose "
                "another place"
            )
        return None
    if alive(found) and not take_over:
        raise DestinationError(
            f"{url}: {found} may still be writing; if it is gone, give --take-over"
        )
    for key in dict.fromkeys((*work, *found.work)):
        then, now = found.work.get(key, "nothing"), work.get(key, "nothing")
        if then != now:
            raise DestinationError(
                f"{url}: cannot resume: {key} was {then}, is {now} now; ask for the same again, or "
                "delete the directory"
            )
    return found


def _sweep(
    store: Store, url: str, found: Claim, kept: Collection[str], *, unfinished: bool
) -> None:
    """Remove what a save has replaced and, if it is over ``unfinished``, has written; not ``kept``."""
    names = store.names(url)
    left = [name for name in names if name in found.old]
    if unfinished:
        # Staged, published for an index that never came, and notes of them.
        left += [
            name
            for name in names
            if found.save_id in name and (name.endswith(".safetensors") or is_temporary(name))
        ]
        # Even where there is none to be seen: unfinished uploads go with it.
        left.append(found.save_id)
    for name in left:
        if name not in kept:
            store.delete(join(url, name))


def _holder(store: Store, url: str) -> str:
    found = read_claim(store, join(url, CLAIM))
    return "which has just finished" if found is None else str(found)
