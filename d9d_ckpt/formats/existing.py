"""What is at a destination already, and which of its files make it a checkpoint."""

import json
from dataclasses import dataclass
from typing import Any

from d9d_ckpt.errors import DestinationError
from d9d_ckpt.formats.huggingface import INDEX, SINGLE
from d9d_ckpt.formats.sharded import MANIFEST
from d9d_ckpt.formats.steps import step_directories
from d9d_ckpt.storage.store import Store, join


@dataclass(frozen=True)
class Superseded:
    """The checkpoint that is replaced.

    Attributes:
        names: Its files, those that make it exist first.
        mode: Permissions of the first, which its successors take over; None for the usual ones.
        save_id: Which save of ours it is, if it says so.
    """

    names: tuple[str, ...] = ()
    mode: int | None = None
    save_id: str | None = None


NOTHING = Superseded()

_RECORDS = (MANIFEST, INDEX, SINGLE)
"""What makes a directory a checkpoint; where there are several, the first one counts."""


def outranking(record: str, old: Superseded) -> list[str]:
    """What of the old checkpoint would still be taken for the checkpoint beside the new ``record``."""
    return [name for name in _RECORDS[: _RECORDS.index(record)] if name in old.names]


def superseded(store: Store, url: str) -> Superseded:
    """What makes the checkpoint at ``url``, in every format; unknown files are not part of it.

    Raises:
        DestinationError: It is a run directory, which its steps make, and not what lies beside them.
    """
    names = store.names(url)
    records = [name for name in _RECORDS if name in names]
    if MANIFEST not in records and step_directories(names):
        raise DestinationError(
            f"{url}: is a run directory; name one of its steps, or another place"
        )
    if not records:
        return NOTHING
    parts: list[str] = []
    save_id = None
    if MANIFEST in records:
        save_id = _parsed(store, join(url, MANIFEST)).get("save_id")
        if save_id in names and any(n.startswith("rank-") for n in store.names(join(url, save_id))):
            parts.append(save_id)
    if INDEX in records:
        weight_map = _parsed(store, join(url, INDEX)).get("weight_map")
        listed = list(weight_map.values()) if isinstance(weight_map, dict) else []
        parts += [n for n in names if n in listed and n.endswith(".safetensors")]
    names = list(dict.fromkeys((*records, *parts)))
    return Superseded(tuple(names), store.mode(join(url, records[0])), save_id)


def _parsed(store: Store, url: str) -> dict[str, Any]:
    """A JSON object; nothing where the file is damaged, which is no reason not to replace it."""
    text = store.read(url, 0, store.size(url))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
