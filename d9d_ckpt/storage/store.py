"""The Store protocols and what URLs have in common."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Store(Protocol):
    """What the engine needs of a place that holds files. URLs are whole, never relative.

    Every method raises `MissingError` for a file that is not there, `CorruptError` for one that
    ends early, and `StorageError` for anything else that the place refuses. No answer comes from a
    cache.
    """

    def size(self, url: str) -> int:
        """Bytes of a file."""
        ...

    def names(self, url: str) -> list[str]:
        """Names directly under a directory, sorted; empty when there is none."""
        ...

    def files(self, url: str) -> dict[str, int]:
        """Name and size of the files directly under a directory, sorted by name."""
        ...

    def read(self, url: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset``."""
        ...

    def read_into(self, url: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fill ``views``, one after the other, from ``offset``."""
        ...

    def read_runs(self, url: str, offsets: Sequence[int], nbytes: int, view: memoryview) -> None:
        """Fill ``view`` with runs of ``nbytes`` from ``offsets``, side by side."""
        ...

    def claim(self, url: str, content: bytes) -> bool:
        """Create a small file unless it exists; whether this caller created it."""
        ...

    def put(self, url: str, content: bytes, mode: int | None = None) -> None:
        """A small file, durable and whole at once, in place of what bore its name.

        ``mode`` are its permissions; None leaves them to the umask, or as they were.
        """
        ...

    def delete(self, url: str) -> None:
        """Remove a file, or a directory with all that is in it; absent is fine."""
        ...

    def remove_empty(self, url: str) -> None:
        """Remove a directory that has nothing in it."""
        ...

    def mode(self, url: str) -> int | None:
        """Permissions of a file; None where the place has none, or there is no such file."""
        ...

    def free(self, url: str) -> int | None:
        """Bytes that can still be written under ``url``; None where nobody knows."""
        ...

    def close(self) -> None:
        """Let go of what is open."""
        ...


class FileStore(Store, Protocol):
    """A place where files are written in any order and renamed."""

    def create(self, url: str, nbytes: int, mode: int | None = None) -> None:
        """A new file of ``nbytes`` to be written in any order; its directories as well."""
        ...

    def write(self, url: str, offset: int, view: memoryview) -> None:
        """Put ``view`` at ``offset`` of a created file."""
        ...

    def truncate(self, url: str, nbytes: int) -> None:
        """Cut a created file after ``nbytes``."""
        ...

    def flush(self) -> None:
        """Let go of files open for writing."""
        ...

    def sync(self, url: str) -> None:
        """Make a file, or the entries of a directory, durable."""
        ...

    def publish(self, url: str, new: str) -> None:
        """Give a finished file its final name, replacing what bore it."""
        ...


class Upload(Protocol):
    """An object that comes to exist as a whole when it is completed."""

    def put(self, number: int, offset: int, view: memoryview) -> None:
        """Part ``number``, from 1, which starts at ``offset`` of the object; in any order."""
        ...

    def complete(self) -> None:
        """Make the object exist, in place of what bore its name."""
        ...

    def abort(self) -> None:
        """Drop every part."""
        ...


class ObjectStore(Store, Protocol):
    """A place without renames and random writes: objects come in parts."""

    def upload(self, url: str) -> Upload:
        """Begin an object."""
        ...

    def drop_uploads(self, url: str) -> None:
        """Abort whatever uploads of ``url``, or of what lies under it, nobody has completed."""
        ...


Options = Mapping[str, Any]


def join(url: str, name: str) -> str:
    """The URL of ``name`` under ``url``."""
    return f"{url.rstrip('/')}/{name}" if url != "/" else f"/{name}"


def is_local(url: str) -> bool:
    """Whether ``url`` is a path of this machine."""
    return "://" not in url and "::" not in url
