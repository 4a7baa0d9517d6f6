"""The mark in a directory that somebody is filling, or emptying."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from d9d_ckpt.errors import MissingError
from d9d_ckpt.storage.store import Store

OURS = ".d9d-"
"""Files with such names are ours, in every directory that we write."""

CLAIM = f"{OURS}claim"

SAVE = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}", re.ASCII)
"""Save ids."""

_TEMPORARY = ".tmp"


def is_temporary(name: str) -> bool:
    """Whether a file is one of ours on its way to another name, or a note for a run that goes on."""
    return name.startswith(OURS) and name.endswith(_TEMPORARY)


def note_name(save_id: str, file: int) -> str:
    """The object that tells what a finished weight file holds, for a run that goes on."""
    return f"{OURS}journal-{save_id}-{file:05d}{_TEMPORARY}"


@dataclass(frozen=True, slots=True)
class Claim:
    """Whose a directory is.

    Attributes:
        host: Where the process runs; empty when the claim cannot be read.
        pid: Its number there.
        time: When it came, in seconds of the epoch.
        prune: Of a process that deletes the checkpoint: the small files that go with it, which
            nothing else names once the manifest is gone. None of a writer.
        save_id: The save of a writer; empty of a process that deletes.
        work: What a writer was asked, so that only the same request goes on with it.
        old: Names of the checkpoint that a writer replaces, which nothing else knows any more once
            the new record is there.
    """

    host: str
    pid: int
    time: float
    prune: tuple[str, ...] | None = None
    save_id: str = ""
    work: Mapping[str, str] = field(default_factory=dict)
    old: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """The file."""
        value: dict[str, Any] = {"save_id": self.save_id, "host": self.host, "pid": self.pid}
        value |= {"time": self.time, "work": dict(self.work), "old": list(self.old)}
        return json.dumps(value | ({} if self.prune is None else {"prune": self.prune})).encode()

    def __str__(self) -> str:
        if not self.host:
            return "a process that the claim does not name"
        return f"process {self.pid} on {self.host}"


UNREADABLE = Claim("", 0, 0.0)


def read_claim(store: Store, url: str) -> Claim | None:
    """The claim at ``url``, None when there is none; a damaged or half-written one names no host."""
    try:
        value = json.loads(store.read(url, 0, store.size(url)))
        host, pid, since, prune = value["host"], value["pid"], value["time"], value.get("prune")
        save_id = str(value.get("save_id", ""))
        work = {str(k): str(v) for k, v in value.get("work", {}).items()}
        old = value.get("old", [])
    except MissingError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return UNREADABLE
    who = isinstance(host, str) and type(pid) is int and pid > 0 and type(since) in (int, float)
    if not who or not (prune is None or _is_names(prune)) or not _is_names(old):
        return UNREADABLE
    gone = None if prune is None else tuple(prune)
    return Claim(host, pid, since, gone, save_id, work, tuple(filter(_is_checkpoint, old)))


def _is_checkpoint(name: str) -> bool:
    """Whether a name can be that of a weight file or of a save: a claim is no licence to delete."""
    return name.endswith(".safetensors") or bool(SAVE.fullmatch(name))


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
