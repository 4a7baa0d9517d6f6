"""Whatever else fsspec opens, by its plainest calls."""

import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import fsspec

from d9d_ckpt.errors import CorruptError, MissingError, StorageError, UsageError
from d9d_ckpt.storage.ranges import coalesced
from d9d_ckpt.storage.store import Options, Upload


class FsspecStore:
    """Reads ranges and writes whole objects of a protocol that has no store of its own here."""

    def __init__(self, url: str, options: Options) -> None:
        try:
            self._fs, _ = fsspec.core.url_to_fs(url, **{"use_listings_cache": False, **options})
        except (ValueError, ImportError) as error:
            raise UsageError(f"{url}: {error}") from error

    def size(self, url: str) -> int:
        return int(self._call("stat", url, self._fs.info, self._path(url), refresh=True)["size"])

    def names(self, url: str) -> list[str]:
        return sorted(_name(entry) for entry in self._entries(url))

    def files(self, url: str) -> dict[str, int]:
        found = [entry for entry in self._entries(url) if entry["type"] == "file"]
        return dict(sorted((_name(entry), int(entry["size"])) for entry in found))

    def read(self, url: str, offset: int, nbytes: int) -> bytes:
        data, end = b"", offset + nbytes
        # An answer may be shorter than what was asked; only an empty one is the end of the file.
        while (at := offset + len(data)) < end:
            piece: bytes = self._call(
                "read", url, self._fs.cat_file, self._path(url), start=at, end=end
            )
            if not piece:
                raise _short(url, at, end)
            data += piece
        return data

    def read_into(self, url: str, offset: int, views: Sequence[memoryview]) -> None:
        data = memoryview(self.read(url, offset, sum(map(len, views))))
        for view in views:
            view[:] = data[: len(view)]
            data = data[len(view) :]

    def read_runs(self, url: str, offsets: Sequence[int], nbytes: int, view: memoryview) -> None:
        for request in coalesced(offsets, nbytes):
            data = self.read(url, request.offset, request.nbytes)
            for run in request.runs:
                low = offsets[run] - request.offset
                view[run * nbytes : (run + 1) * nbytes] = data[low : low + nbytes]

    def claim(self, url: str, content: bytes) -> bool:
        path = self._path(url)
        try:
            self._call("claim", url, self._fs.pipe_file, path, content, mode="create")
        except StorageError as error:
            if isinstance(error.__cause__, FileExistsError):
                return False
            raise
        return self.read(url, 0, self.size(url)) == content

    def put(self, url: str, content: bytes, mode: int | None = None) -> None:
        del mode  # such stores have none
        self._call("put", url, self._fs.pipe_file, self._path(url), content)

    def delete(self, url: str) -> None:
        # By its name first: a recursive removal begins with a listing, which may not show it yet.
        with suppress(MissingError, StorageError):
            self._call("delete", url, self._fs.rm_file, self._path(url))
            return
        with suppress(MissingError):
            self._call("delete", url, self._fs.rm, self._path(url), recursive=True)

    def remove_empty(self, url: str) -> None:
        """Nothing: most such stores have no directories of their own."""

    def mode(self, url: str) -> int | None:
        """Nothing: such stores have no permissions of this kind."""

    def free(self, url: str) -> int | None:
        """Nobody knows."""

    def close(self) -> None:
        """Nothing is kept open between calls."""

    def upload(self, url: str) -> Upload:
        return Spool(self, url)

    def drop_uploads(self, url: str) -> None:
        """Nothing: what is not complete is in a file of this machine."""

    def send(self, url: str, path: str) -> None:
        """Write the local file ``path`` as an object."""
        self._call("write", url, self._fs.put_file, path, self._path(url))

    def _entries(self, url: str) -> list[dict[str, Any]]:
        try:
            found = self._call("list", url, self._fs.ls, self._path(url), detail=True, refresh=True)
        except MissingError:
            return []
        own = self._path(url).rstrip("/")
        return [entry for entry in found if entry["name"].rstrip("/") != own]

    def _path(self, url: str) -> str:
        return str(self._fs._strip_protocol(url))  # noqa: SLF001 - how fsspec names what it opens

    @staticmethod
    def _call(operation: str, url: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except FileNotFoundError as error:
            raise MissingError(f"{url}: no such file") from error
        except OSError as error:
            raise StorageError(f"{operation} {url}: {error}") from error


class Spool:
    """An object whose parts come in any order, kept in a local file until it is complete."""

    def __init__(self, store: FsspecStore, url: str) -> None:
        self._store, self._url = store, url
        self._lock = threading.Lock()
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - lives until complete or abort

    def put(self, number: int, offset: int, view: memoryview) -> None:
        del number
        with self._lock:
            self._file.seek(offset)
            self._file.write(view)

    def complete(self) -> None:
        self._file.flush()
        self._store.send(self._url, self._file.name)
        self._file.close()

    def abort(self) -> None:
        self._file.close()


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]


def _short(url: str, end: int, wanted: int) -> CorruptError:
    return CorruptError(
        f"{url}: ends at byte {end}, expected at least {wanted}; it was cut short: fetch or write it "
        "again"
    )
