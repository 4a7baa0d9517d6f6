"""What a run has written so far, so that another one can go on from there."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from d9d_ckpt.codecs.checksum import digest, to_hex
from d9d_ckpt.errors import CkptError
from d9d_ckpt.formats.base import Arrangement
from d9d_ckpt.formats.claim import OURS
from d9d_ckpt.plan.plan import Plan
from d9d_ckpt.storage.store import FileStore, join
from d9d_ckpt.tensors import BLOCK

Blocks = Mapping[int, Mapping[int, int]]
"""Digest of each finished block, by target and number."""


class Written(NamedTuple):
    """Blocks of one target in a row, from ``first`` on."""

    target: int
    first: int
    digests: Sequence[int]


class Journal:
    """Notes the outputs of one worker; a run that is killed leaves it behind.

    The lines of a task are one append, so that a killed worker leaves one cut line at most.
    """

    def __init__(self, directory: str, save_id: str) -> None:
        name = f"{OURS}journal-{save_id}-{os.getpid()}-{os.urandom(4).hex()}.tmp"
        self._fd = os.open(Path(directory) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def note(self, outputs: Sequence[Written]) -> None:
        """Append the outputs of one task."""
        lines = (f"{w.target} {w.first} {','.join(map(to_hex, w.digests))}\n" for w in outputs)
        os.write(self._fd, "".join(lines).encode())

    def close(self) -> None:
        """Let go of the file; the commit removes it."""
        os.close(self._fd)


def finished(
    store: FileStore, url: str, save_id: str, arrangement: Arrangement, plan: Plan
) -> dict[int, dict[int, int]]:
    """Blocks that an earlier run of this save has noted and that are at the destination as noted."""
    noted: dict[int, dict[int, int]] = {}
    for name in store.names(url):
        if name.startswith(f"{OURS}journal-{save_id}-"):
            path = join(url, name)
            for w in _lines(store.read(path, 0, store.size(path))):
                noted.setdefault(w.target, {}).update(enumerate(w.digests, w.first))
    out: dict[int, dict[int, int]] = {}
    for target, blocks in sorted(noted.items()):
        if target < len(plan.targets):
            good = dict(_good(store, url, arrangement, plan, target, blocks))
            if good:
                out[target] = good
    return out


def _lines(content: bytes) -> Iterable[Written]:
    """Whole lines; the last one may have been cut."""
    for line in content.decode(errors="replace").split("\n")[:-1]:
        target, first, digests = line.split(" ")
        yield Written(int(target), int(first), [int(d, 16) for d in digests.split(",")])


def _good(
    store: FileStore,
    url: str,
    arrangement: Arrangement,
    plan: Plan,
    target: int,
    blocks: Mapping[int, int],
) -> Iterable[tuple[int, int]]:
    file, offset = arrangement.places[target]
    path = join(url, arrangement.files[file].staged)
    total = plan.targets[target].nbytes
    buffer = np.empty(BLOCK, np.uint8)
    for block, expected in sorted(blocks.items()):
        low = block * BLOCK
        view = buffer[: min(BLOCK, total - low)].data
        try:
            store.read_into(path, offset + low, [view])
        except CkptError:
            return
        if digest(view) == expected:
            yield block, expected
