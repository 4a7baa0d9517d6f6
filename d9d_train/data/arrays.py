"""One-dimensional integer arrays in files, of which only what is asked for is read."""

import fnmatch
import glob
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from d9d_ckpt.errors import CorruptError, MissingError, UsageError
from d9d_ckpt.storage.opening import normalise, store_for
from d9d_ckpt.storage.store import Options, is_local, join

_HEADER = 4096
"""Bytes of a .npy file that hold its header; 128 do for one dimension."""


class Array(Protocol):
    """Integers by position."""

    def __len__(self) -> int: ...

    def read(self, low: int, high: int) -> np.ndarray[Any, Any]:
        """Those from ``low`` to below ``high``, in memory of their own."""
        ...


@dataclass(frozen=True)
class Held:
    """An array in memory, or one that the kernel maps into it."""

    values: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.values)

    def read(self, low: int, high: int) -> np.ndarray[Any, Any]:
        return np.array(self.values[low:high])


@dataclass(frozen=True)
class Remote:
    """An array in a file of some store, read by ranges."""

    url: str
    options: Options
    dtype: np.dtype[Any]
    offset: int
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, low: int, high: int) -> np.ndarray[Any, Any]:
        size = self.dtype.itemsize
        store = store_for(self.url, self.options)
        data = store.read(self.url, self.offset + low * size, (high - low) * size)
        return np.frombuffer(data, self.dtype)


def open_array(url: str, dtype: str, options: Options) -> Array:
    """An array file: local ones are mapped, others read by ranges.

    Args:
        url: A ``.npy`` file, which says its dtype itself, or the bare little-endian values.
        dtype: What bare values are, by numpy's name.
        options: For fsspec.

    Raises:
        UsageError: Not one dimension of integers.
        CorruptError: No whole number of values, or a damaged header.
    """
    url = normalise(url)
    store = store_for(url, options)
    size = store.size(url)
    if url.endswith(".npy"):
        kind, offset, count = _header(url, store.read(url, 0, min(size, _HEADER)))
        if size != offset + count * kind.itemsize:
            raise CorruptError(
                f"{url}: {size} bytes, but its header says {count} values of {kind} from {offset}"
            )
    else:
        kind, offset = np.dtype(dtype).newbyteorder("<"), 0
        count, left = divmod(size, kind.itemsize)
        if left:
            raise CorruptError(f"{url}: {size} bytes are no whole number of {dtype}")
    if not is_local(url):
        return Remote(url, options, kind, offset, count)
    if not count:
        return Held(np.empty(0, kind))
    return Held(np.memmap(url, kind, "r", offset, (count,)))


def find(patterns: Sequence[str], options: Options) -> list[str]:
    """The files that ``patterns`` name, in their order and by name under each.

    Args:
        patterns: Paths or URLs. ``*``, ``?`` and ``[...]`` may stand in the last part of a URL, and
            anywhere in a local path, where ``**`` reaches all directories below.
        options: For fsspec.

    Raises:
        MissingError: A pattern that nothing matches.
        UsageError: No pattern, or a URL with one in its directory.
    """
    if not patterns:
        raise UsageError("data: files is empty; name at least one file")
    return [url for pattern in patterns for url in _matches(normalise(pattern), options)]


def _matches(pattern: str, options: Options) -> list[str]:
    if not glob.has_magic(pattern):
        return [pattern]
    if is_local(pattern):
        found = [path for path in glob.glob(pattern, recursive=True) if Path(path).is_file()]
    else:
        folder, _, name = pattern.rpartition("/")
        if glob.has_magic(folder):
            raise UsageError(f"{pattern}: a URL may have a pattern in its last part only")
        names = store_for(folder, options).names(folder)
        found = [join(folder, match) for match in fnmatch.filter(names, name)]
    if not found:
        raise MissingError(f"{pattern}: no file matches")
    return sorted(found)


def _header(url: str, head: bytes) -> tuple[np.dtype[Any], int, int]:
    """Dtype, offset and count of the values of a .npy file."""
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    except ValueError as error:
        raise CorruptError(f"{url}: no .npy file: {error}") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise UsageError(f"{url}: expected one dimension of integers, found {shape} of {dtype}")
    return dtype, file.tell(), shape[0]
