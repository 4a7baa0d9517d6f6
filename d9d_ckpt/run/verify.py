"""Reading a checkpoint back against the checksums that it records."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat

from d9d_ckpt.codecs.checksum import digest, to_hex
from d9d_ckpt.formats.base import Opened
from d9d_ckpt.formats.sharded import damaged_files
from d9d_ckpt.run.workers import Progress
from d9d_ckpt.storage.opening import store_for
from d9d_ckpt.storage.store import Options
from d9d_ckpt.tensors import BLOCK, Chunk

_SPAN = 8 << 20
"""Bytes read at once."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A block, header or file that is not what was written.

    Attributes:
        file: Name relative to the checkpoint.
        tensor: The tensor, with the first byte of the block in the file, or None for a header.
        expected: The recorded checksum.
        found: The checksum now.
    """

    file: str
    tensor: str | None
    expected: str
    found: str


@dataclass(frozen=True)
class Verified:
    """The outcome.

    Attributes:
        bytes: Bytes checked.
        chunks: Chunks checked.
        damaged: Everything that is damaged.
        reason: Why nothing could be checked, or None.
    """

    bytes: int
    chunks: int
    damaged: tuple[Damage, ...]
    reason: str | None = None

    @property
    def ok(self) -> bool:
        """Whether all was checked and all is whole."""
        return not self.damaged and self.reason is None


def verify(opened: Opened, options: Options, workers: int, progress: Progress) -> Verified:
    """Check every block, header and small file; all damage is listed, not only the first."""
    pairs = [(name, c) for name, e in opened.catalogue.entries.items() for c in e.chunks]
    if any(c.xxh3 is None for _, c in pairs) or (opened.format == "huggingface" and not pairs):
        return Verified(0, 0, (), "no checksums recorded")
    damaged = _files(opened, options)
    shares = [pairs[k::workers] for k in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        for found in pool.map(
            _chunks, shares, repeat(opened.url), repeat(options), repeat(progress)
        ):
            damaged += found
    return Verified(sum(c.nbytes for _, c in pairs), len(pairs), tuple(damaged))


def _files(opened: Opened, options: Options) -> list[Damage]:
    store = store_for(opened.url, options)
    try:
        return [
            Damage(name, None, to_hex(expected), to_hex(found))
            for name, expected, found in damaged_files(store, opened, list(opened.files))
        ]
    finally:
        store.close()


def _chunks(
    pairs: list[tuple[str, Chunk]], url: str, options: Options, progress: Progress
) -> list[Damage]:
    store = store_for(url, options)
    buffer = memoryview(bytearray(_SPAN))
    out = []
    try:
        for name, chunk in pairs:
            expected = chunk.xxh3 or ()
            for low in range(0, chunk.nbytes, _SPAN):
                view = buffer[: min(_SPAN, chunk.nbytes - low)]
                store.read_into(chunk.file, chunk.offset + low, [view])
                for block, found in _digests(view, low // BLOCK):
                    if found != expected[block]:
                        where = f"{name} at byte {chunk.offset + block * BLOCK}"
                        file = chunk.file.removeprefix(url).lstrip("/")
                        out.append(Damage(file, where, to_hex(expected[block]), to_hex(found)))
                progress(len(view), low + len(view) == chunk.nbytes)
    finally:
        store.close()
    return out


def _digests(view: memoryview, first: int) -> Iterator[tuple[int, int]]:
    for number, low in enumerate(range(0, len(view), BLOCK)):
        yield first + number, digest(view[low : low + BLOCK])
