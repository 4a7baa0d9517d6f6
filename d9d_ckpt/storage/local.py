"""Local paths: positional reads and writes, no mapping, no shared offsets."""

import errno
import os
import shutil
import stat
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from d9d_ckpt.codecs.checksum import digest, to_hex
from d9d_ckpt.errors import CkptError, CorruptError, MissingError, StorageError
from d9d_ckpt.tensors import format_bytes

_OPEN_FILES = 128
"""Descriptors kept per store: far below the usual limit of 1,024, far above the files in flight."""

_VECTORS = 1024
"""Buffers per system call (IOV_MAX)."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class LocalStore:
    """Files of this machine. Keeps descriptors open, so each thread has a store of its own."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[str, int], int] = OrderedDict()

    def size(self, url: str) -> int:
        with _translated("stat", url):
            return Path(url).stat().st_size

    def names(self, url: str) -> list[str]:
        with _translated("list", url):
            try:
                return sorted(os.listdir(url))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def files(self, url: str) -> dict[str, int]:
        with _translated("list", url), os.scandir(url) as found:
            return {e.name: e.stat().st_size for e in sorted(found, key=_name) if e.is_file()}

    def read(self, url: str, offset: int, nbytes: int) -> bytes:
        out = bytearray(nbytes)
        self.read_into(url, offset, [memoryview(out)])
        return bytes(out)

    def read_into(self, url: str, offset: int, views: Sequence[memoryview]) -> None:
        try:
            fd = self._descriptor(url, os.O_RDONLY)
            for first in range(0, len(views), _VECTORS):
                offset = _fill(fd, views[first : first + _VECTORS], offset, url)
        except OSError as error:
            raise _translate(error, "read", url) from error

    def read_runs(self, url: str, offsets: Sequence[int], nbytes: int, view: memoryview) -> None:
        try:
            fd = self._descriptor(url, os.O_RDONLY)
            for number, offset in enumerate(offsets):
                run = view[number * nbytes : (number + 1) * nbytes]
                if os.preadv(fd, [run], offset) != nbytes:
                    _fill(fd, [run], offset, url)
        except OSError as error:
            raise _translate(error, "read", url) from error

    def create(self, url: str, nbytes: int, mode: int | None = None) -> None:
        with _translated("create", url):
            self._make(Path(url).parent)
            # What bears the name already may be a link to a file of somebody else.
            Path(url).unlink(missing_ok=True)
            # What is open under the name is not this file: writes would go to the one just removed.
            self._forget(url)
            fd = os.open(url, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                os.ftruncate(fd, nbytes)
                if mode is not None:
                    os.fchmod(fd, mode)
            finally:
                os.close(fd)

    def write(self, url: str, offset: int, view: memoryview) -> None:
        try:
            fd = self._descriptor(url, os.O_WRONLY)
            done = 0
            while done < len(view):
                done += os.pwrite(fd, view[done:], offset + done)
        except OSError as error:
            raise _translate(error, "write", url) from error

    def append(self, url: str, content: bytes) -> None:
        """Put ``content`` at the end of a file, which is made if there is none."""
        with _translated("write", url):
            fd = self._descriptor(url, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            left = memoryview(content)
            while left:
                left = left[os.write(fd, left) :]

    def truncate(self, url: str, nbytes: int) -> None:
        with _translated("truncate", url):
            os.truncate(url, nbytes)

    def claim(self, url: str, content: bytes) -> bool:
        # Linked whole, so that nobody ever reads half a claim.
        staged = f"{url}.{os.getpid()}.tmp"
        with _translated("create", url):
            try:
                self.create(staged, len(content))
                self.write(staged, 0, memoryview(content))
                self.flush()
                # Or a power loss leaves an empty one, of which nobody knows whose it was.
                self.sync(staged)
                os.link(staged, url)
            except FileExistsError:
                return False
            finally:
                Path(staged).unlink(missing_ok=True)
            return True

    def remove_empty(self, url: str) -> None:
        with _translated("delete", url):
            path = Path(url)
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def flush(self) -> None:
        self.close()

    def put(self, url: str, content: bytes, mode: int | None = None) -> None:
        folder, _, name = url.rpartition("/")
        # A name of 255 bytes has no room for more of them.
        staged = f"{folder}/.d9d-{to_hex(digest(os.fsencode(name)))}.tmp"
        self.create(staged, len(content), mode)
        self.write(staged, 0, memoryview(content))
        self.flush()
        self.sync(staged)
        self.publish(staged, url)

    def sync(self, url: str) -> None:
        with _translated("fsync", url):
            fd = os.open(url, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def mode(self, url: str) -> int | None:
        with _translated("stat", url):
            try:
                return Path(url).stat().st_mode & 0o777
            except FileNotFoundError:
                return None

    def publish(self, url: str, new: str) -> None:
        with _translated("rename", url):
            _keep_mode(url, new)
            Path(url).replace(new)
        self._forget(url, new)

    def delete(self, url: str) -> None:
        with _translated("delete", url):
            path = Path(url)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self._forget(url)

    def free(self, url: str) -> int | None:
        with _translated("statvfs", url):
            return _free_at(url)

    def close(self) -> None:
        self._shut(list(self._open))

    def _shut(self, keys: Sequence[tuple[str, int]]) -> None:
        """Close descriptors, all of them whatever happens to some."""
        failed: list[Exception] = []
        for url, flags in keys:
            try:
                os.close(self._open.pop((url, flags)))
            except OSError as error:
                # Network file systems may say only now that what was written is lost.
                if flags & os.O_WRONLY:
                    failed.append(_translate(error, "close", url))
        if failed:
            raise failed[0]

    def _make(self, path: Path) -> None:
        """A directory and its parents, each of them durable in the one above."""
        missing = [p for p in (path, *path.parents) if not p.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for made in missing:
            self.sync(str(made.parent))

    def _forget(self, *urls: str) -> None:
        """Close what is open of files whose names now mean something else, or nothing."""
        self._shut([key for key in self._open if key[0].startswith(urls)])

    def _descriptor(self, url: str, flags: int) -> int:
        key = (url, flags)
        fd = self._open.get(key)
        if fd is None:
            # A pipe would wait for its other end.
            fd = os.open(url, flags | os.O_NONBLOCK, 0o666)
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                os.close(fd)
                number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
                raise OSError(number, "not an ordinary file")
            self._open[key] = fd
            if len(self._open) > _OPEN_FILES:
                self._shut([next(iter(self._open))])
        else:
            self._open.move_to_end(key)
        return fd


def _name(entry: "os.DirEntry[str]") -> str:
    return entry.name


def _keep_mode(url: str, new: str) -> None:
    """A file that replaces another keeps the mode that its readers were given."""
    try:
        mode = Path(new).stat().st_mode & 0o7777
    except FileNotFoundError:
        return
    Path(url).chmod(mode)


def _fill(fd: int, views: Sequence[memoryview], offset: int, url: str) -> int:
    """Read until every view is full; the offset after the last byte."""
    left = list(views)
    wanted = offset + sum(map(len, left))
    while offset < wanted:
        got = os.preadv(fd, left, offset)
        if not got:
            raise CorruptError(
                f"{url}: ends at byte {offset}, expected at least {wanted}; it was cut short: fetch or "
                "write it again"
            )
        offset += got
        if offset < wanted:
            while got >= len(left[0]):
                got -= len(left.pop(0))
            left[0] = left[0][got:]
    return offset


@contextmanager
def _translated(operation: str, url: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _translate(error, operation, url) from error


def _translate(error: OSError, operation: str, url: str) -> Exception:
    if isinstance(error, CkptError):
        return error
    if isinstance(error, FileNotFoundError):
        return MissingError(f"{url}: no such file")
    return StorageError(f"{operation} {url}: {_reason(error, url)}")


def _reason(error: OSError, url: str) -> str:
    text = f"{error.strerror or error} (errno {error.errno})"
    if error.errno in _FULL:
        with suppress(OSError):
            text += f"; {format_bytes(_free_at(url))} free"
    return text


def _free_at(url: str) -> int:
    """Bytes free where ``url`` is or would be."""
    path = Path(url).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
