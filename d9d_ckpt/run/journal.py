"""What a run has written so far, so that another one can go on from there."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from d9d_ckpt.codecs.checksum import block_digests, digest, to_hex
from d9d_ckpt.errors import CkptError
from d9d_ckpt.formats.base import Arrangement, Content, Extent, Extents
from d9d_ckpt.formats.claim import OURS, note_name
from d9d_ckpt.plan.plan import Plan
from d9d_ckpt.run.commit import Destination
from d9d_ckpt.storage.local import LocalStore
from d9d_ckpt.storage.store import Store, join
from d9d_ckpt.tensors import BLOCK

_LINE = re.compile(r"^(\d+) (\d+) ([\da-f]{16}(?:,[\da-f]{16})*)(?: (\d+) (\d+))?$\n", re.MULTILINE)

_AT_ONCE = 8
"""Blocks read in one call."""

Blocks = Mapping[int, Mapping[int, int]]
"""Digest of each finished block, by target and number."""


@dataclass(frozen=True)
class Finished:
    """What an interrupted run has left behind whole.

    Attributes:
        blocks: The blocks.
        extents: Where encoded targets lie.
    """

    blocks: Blocks = field(default_factory=dict)
    extents: Extents = field(default_factory=dict)


class Written(NamedTuple):
    """Blocks of one target in a row, from ``first`` on; with their place if the target is encoded."""

    target: int
    first: int
    digests: Sequence[int]
    extent: Extent | None = None


class _Chunk(NamedTuple):
    """An encoded target as it was noted."""

    target: int
    digests: Sequence[int]
    extent: Extent


class Journal:
    """Notes the outputs of one worker; a run that is killed leaves it behind.

    The lines of a task are one append, so that a killed worker leaves one cut line at most.
    """

    def __init__(self, store: LocalStore, directory: str, save_id: str) -> None:
        name = f"{OURS}journal-{save_id}-{os.getpid()}-{os.urandom(4).hex()}.tmp"
        self._store, self._url = store, join(directory, name)

    def note(self, outputs: Sequence[Written]) -> None:
        """Append the outputs of one task."""
        self._store.append(self._url, "".join(map(_line, outputs)).encode())


def note(store: Store, url: str, save_id: str, file: int, written: Sequence[Written]) -> None:
    """Note what is in a finished object, where nothing can be appended to."""
    store.put(join(url, note_name(save_id, file)), "".join(map(_line, written)).encode())


def whole_files(done: Finished, arrangement: Arrangement, plan: Plan) -> set[int]:
    """Files of which nothing is missing."""
    counts = {t: len(blocks) for t, blocks in done.blocks.items()}
    content = Content(plan.targets, arrangement, {}, extents=done.extents)
    return {
        number
        for number, file in enumerate(arrangement.files)
        if all(counts.get(t) == -(-content.extent(t).nbytes // BLOCK) for t in file.targets)
    }


def finished(
    place: Destination, save_id: str, arrangement: Arrangement, plan: Plan, threads: int
) -> Finished:
    """What an earlier run of this save has noted and that is at the destination as noted.

    Args:
        place: The destination.
        save_id: The save.
        arrangement: Its files.
        plan: The work.
        threads: How many targets are read at once; a store of local files allows one.
    """
    noted: dict[int, dict[int, int]] = {}
    placed: dict[int, dict[int, list[_Chunk]]] = {}
    for w in _noted(place.store, place.url, save_id, len(plan.targets)):
        if w.extent is None:
            noted.setdefault(w.target, {}).update(enumerate(w.digests, w.first))
        else:
            file = placed.setdefault(arrangement.places[w.target][0], {})
            chunk = _Chunk(w.target, w.digests, w.extent)
            file.setdefault(w.extent.offset, []).append(chunk)
    with ThreadPoolExecutor(threads) as pool:
        good = pool.map(partial(_good, place, arrangement, plan), noted, noted.values())
        blocks = {target: found for target, found in zip(noted, good, strict=True) if found}
        runs = pool.map(partial(_appended, place, arrangement), placed, placed.values())
        chunks = [chunk for run in runs for chunk in run]
    blocks |= {c.target: dict(enumerate(c.digests)) for c in chunks}
    return Finished(blocks, {c.target: c.extent for c in chunks})


def _noted(store: Store, url: str, save_id: str, targets: int) -> Iterator[Written]:
    """What the journals of a save say."""
    for name in store.names(url):
        if name.startswith(f"{OURS}journal-{save_id}-"):
            path = join(url, name)
            for w in _lines(store.read(path, 0, store.size(path))):
                if w.target < targets:
                    yield w


def _line(w: Written) -> str:
    place = "" if w.extent is None else f" {w.extent.offset} {w.extent.nbytes}"
    return f"{w.target} {w.first} {','.join(map(to_hex, w.digests))}{place}\n"


def _lines(content: bytes) -> Iterator[Written]:
    """Whole lines; one that a killed or full store has cut is passed over."""
    for found in _LINE.finditer(content.decode(errors="replace")):
        target, first, digests, offset, nbytes = found.groups()
        extent = Extent(int(offset), int(nbytes)) if offset else None
        yield Written(int(target), int(first), [int(d, 16) for d in digests.split(",")], extent)


def _appended(
    place: Destination, arrangement: Arrangement, file: int, chunks: Mapping[int, Sequence[_Chunk]]
) -> list[_Chunk]:
    """Chunks one behind the other from the header on: a file has no room for what comes after a gap."""
    out = arrangement.files[file]
    path, at = place.place(out), len(out.header)
    taken: dict[int, _Chunk] = {}
    while found := [c for c in chunks.get(at, ()) if _is_there(place.store, path, c)]:
        chunk = found[0]
        if chunk.target in taken:
            break
        taken[chunk.target] = chunk
        at += chunk.extent.nbytes
    return list(taken.values())


def _is_there(store: Store, url: str, chunk: _Chunk) -> bool:
    try:
        stored = store.read(url, *chunk.extent)
    except CkptError:
        return False
    return block_digests(memoryview(stored)) == list(chunk.digests)


def _good(
    place: Destination,
    arrangement: Arrangement,
    plan: Plan,
    target: int,
    blocks: Mapping[int, int],
) -> dict[int, int]:
    """The blocks of a target that are there as noted."""
    file, offset = arrangement.places[target]
    path = place.place(arrangement.files[file])
    total = plan.targets[target].nbytes
    buffer = memoryview(bytearray(min(total, _AT_ONCE * BLOCK)))
    out: dict[int, int] = {}
    for first in range(0, -(-total // BLOCK), _AT_ONCE):
        wanted = [n for n in range(first, first + _AT_ONCE) if n in blocks]
        if wanted:
            low, high = wanted[0] * BLOCK, min((wanted[-1] + 1) * BLOCK, total)
            view = buffer[: high - low]
            try:
                place.store.read_into(path, offset + low, [view])
            except CkptError:
                break
            for n in wanted:
                if digest(view[n * BLOCK - low : (n + 1) * BLOCK - low]) == blocks[n]:
                    out[n] = blocks[n]
    return out
