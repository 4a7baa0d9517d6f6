"""Everything that is not a local path, through fsspec; its only importer."""

from collections.abc import Sequence
from typing import Any

import fsspec

from d9d_ckpt.errors import CorruptError, MissingError, StorageError, UsageError
from d9d_ckpt.storage.store import Options


class FsspecStore:
    """Reads ranges of whatever fsspec opens.

    Listings and sizes are always asked afresh, never taken from a cache. Destinations on such
    stores are not written yet.
    """

    def __init__(self, url: str, options: Options) -> None:
        try:
            self._fs, _ = fsspec.core.url_to_fs(url, **{"use_listings_cache": False, **options})
        except (ValueError, ImportError) as error:
            raise UsageError(f"{url}: {error}") from error

    def size(self, url: str) -> int:
        return int(self._call("stat", url, self._fs.info, self._path(url), refresh=True)["size"])

    def names(self, url: str) -> list[str]:
        try:
            found = self._call(
                "list", url, self._fs.ls, self._path(url), detail=False, refresh=True
            )
        except MissingError:
            return []
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found)

    def files(self, url: str) -> dict[str, int]:
        found = self._call("list", url, self._fs.ls, self._path(url), detail=True, refresh=True)
        sizes = {
            entry["name"].rstrip("/").rsplit("/", 1)[-1]: int(entry["size"])
            for entry in found
            if entry["type"] == "file"
        }
        return dict(sorted(sizes.items()))

    def read(self, url: str, offset: int, nbytes: int) -> bytes:
        if not nbytes:
            return b""
        path = self._path(url)
        data: bytes = self._call(
            "read", url, self._fs.cat_file, path, start=offset, end=offset + nbytes
        )
        if len(data) != nbytes:
            raise self._short(url, offset + len(data), offset + nbytes)
        return data

    def read_into(self, url: str, offset: int, views: Sequence[memoryview]) -> None:
        data = memoryview(self.read(url, offset, sum(map(len, views))))
        for view in views:
            view[:] = data[: len(view)]
            data = data[len(view) :]

    def read_runs(self, url: str, offsets: Sequence[int], nbytes: int, view: memoryview) -> None:
        path = self._path(url)
        ends = [offset + nbytes for offset in offsets]
        found = self._call(
            "read", url, self._fs.cat_ranges, [path] * len(ends), list(offsets), ends
        )
        for number, (offset, data) in enumerate(zip(offsets, found, strict=True)):
            if len(data) != nbytes:
                raise self._short(url, offset + len(data), offset + nbytes)
            view[number * nbytes : (number + 1) * nbytes] = data

    def create(self, url: str, nbytes: int, mode: int | None = None) -> None:
        raise self._read_only(url)

    def write(self, url: str, offset: int, view: memoryview) -> None:
        raise self._read_only(url)

    def claim(self, url: str, content: bytes) -> bool:
        raise self._read_only(url)

    def remove_empty(self, url: str) -> None:
        raise self._read_only(url)

    def flush(self) -> None:
        """Nothing is open for writing."""

    def sync(self, url: str) -> None:
        raise self._read_only(url)

    def mode(self, url: str) -> int | None:
        """Nothing: such stores have no permissions of this kind."""

    def publish(self, url: str, new: str) -> None:
        raise self._read_only(url)

    def delete(self, url: str) -> None:
        raise self._read_only(url)

    def free(self, url: str) -> int | None:
        return None

    def close(self) -> None:
        """Nothing is kept open between calls."""

    @staticmethod
    def _short(url: str, end: int, wanted: int) -> CorruptError:
        return CorruptError(
            f"{url}: ends at byte {end}, expected at least {wanted}; it was cut short: fetch or write "
            "it again"
        )

    @staticmethod
    def _read_only(url: str) -> StorageError:
        return StorageError(
            f"{url}: destinations must be local paths so far; convert to a local directory and copy it"
        )

    def _path(self, url: str) -> str:
        return str(self._fs._strip_protocol(url))  # noqa: SLF001

    @staticmethod
    def _call(operation: str, url: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except FileNotFoundError as error:
            raise MissingError(f"{url}: no such file") from error
        except OSError as error:
            raise StorageError(f"{operation} {url}: {error}") from error
