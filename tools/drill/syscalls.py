"""Faults of a local disk, where Python asks the kernel: every `os` call on a path of the drill."""

import errno
import io
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from drill.board import Board, Fault
from drill.power import Power

_CALLS = {
    "stat": "stat", "lstat": "stat", "fstat": "stat", "statvfs": "statvfs",
    "listdir": "list", "scandir": "list", "open": "open", "close": "close",
    "preadv": "read", "pread": "read", "read": "read", "pwrite": "write", "write": "write",
    "ftruncate": "truncate", "truncate": "truncate", "chmod": "chmod", "fchmod": "chmod", "fsync": "fsync",
    "rename": "rename", "replace": "rename", "link": "link", "unlink": "unlink",
    "remove": "unlink", "mkdir": "mkdir", "rmdir": "rmdir",
}  # fmt: skip

ALLOCATING = ("create", "write", "truncate", "link", "mkdir", "rename")
"""What a full disk refuses."""

_ANY = ("kill", "kill one", "EIO", "EINTR")
EFFECTS: Mapping[str, tuple[str, ...]] = {
    "stat": ("EIO",),
    "statvfs": ("EIO",),
    "list": ("kill", "EIO"),
    "open": _ANY,
    "create": (*_ANY, "ENOSPC", "dead disk"),
    "close": ("EIO",),
    "read": (*_ANY, "short", "clock"),
    "write": (*_ANY, "short", "ENOSPC", "torn", "dead disk", "power"),
    "truncate": ("kill", "ENOSPC"),
    "chmod": ("kill", "EIO"),
    "fsync": (*_ANY, "clock", "dead disk", "power"),
    "rename": (*_ANY, "dead disk", "clock", "power"),
    "link": (*_ANY, "ENOSPC", "clock"),
    "unlink": (*_ANY, "dead disk", "power"),
    "mkdir": (*_ANY, "ENOSPC"),
    "rmdir": ("kill", "EIO", "power"),
    "end": ("power",),
}
"""What happens to an operation.

``kill`` ends every process at once, ``kill one`` the process that asked; ``torn`` writes half and
kills; ``power`` kills and takes back what was not made durable; ``ENOSPC`` and ``dead disk`` (EIO
from everything) last until the process ends; ``clock`` sets it back by a day, or forward.

Of one rank of several: ``kill writer`` and ``stop writer`` the process that asked, ``kill trainer``
and ``stop trainer`` its parent; ``full`` is ENOSPC for that rank alone.
"""

_FLAGS = {
    "r": os.O_RDONLY,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
}
_DAY = 86_400.0
_CODES = {"EIO": errno.EIO, "EINTR": errno.EINTR, "ENOSPC": errno.ENOSPC, "dead disk": errno.EIO}


def faults(counts: Mapping[str, int]) -> list[Fault]:
    """Every fault of every operation of a clean run."""
    return [
        Fault(kind, number, effect)
        for kind, count in counts.items()
        for number in range(1, count + 1)
        for effect in EFFECTS[kind]
    ]


class Disk:
    """The `os` calls of this process and its children, counted; one of them goes wrong."""

    def __init__(
        self, root: str, board: Board, fault: Fault | None, power: Power | None = None
    ) -> None:
        self._root, self._board, self._fault = root, board, fault
        self._power = power if fault is not None and fault.effect == "power" else None
        self._watching = self._full = False
        self._open: set[int] = set()
        self._real = {name: getattr(os, name) for name in _CALLS}

    def install(self) -> None:
        """From now on, until the process ends."""
        for name in _CALLS:
            setattr(os, name, self._wrapped(name))
        vars(io)["open"] = self._file
        if self._power is not None:
            with self._unseen():
                self._power.begin()

    def end(self) -> None:
        """The command has succeeded: the power may fail now as well."""
        number = self._board.count("end")
        if self._fault == Fault("end", number, "power"):
            self._board.hit()
            self._fail_power()

    def _file(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Python's own files, by the calls above: pathlib opens them here."""
        if isinstance(path, int) or "b" not in mode or not os.fspath(path).startswith(self._root):
            return open(path, mode, *args, **kwargs)
        raw = _Raw(os.open(path, _FLAGS[mode.replace("b", "")], 0o666))
        return io.BufferedReader(raw) if mode == "rb" else io.BufferedWriter(raw)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_ours(args, kwargs):
                return real(*args, **kwargs)
            kind = _kind(name, args)
            number = self._board.count(kind)
            if self._is_due(kind, number):
                self._board.hit()
                return self._wrong(name, kind, args, kwargs)
            return self._done(name, args, kwargs)

        return call

    def _done(self, name: str, args: Any, kwargs: Any) -> Any:
        out = self._real[name](*args, **kwargs)
        if self._power is not None:
            with self._unseen():
                self._follow(self._power, name, args, out)
        if name == "open":
            self._open.add(out)
        elif name == "close":
            self._open.discard(args[0])
        return out

    def _follow(self, power: Power, name: str, args: Any, out: Any) -> None:
        if name == "fsync":
            power.synced(_path(args[0]))
        elif name == "open" and args[1] & os.O_EXCL:
            power.created(_path(out))

    def _fail_power(self) -> NoReturn:
        if self._power is not None:
            with self._unseen():
                self._power.fail()
        die()

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """What the drill itself does is neither counted nor harmed."""
        before, self._watching = self._watching, True
        try:
            yield
        finally:
            self._watching = before

    def _is_ours(self, args: Any, kwargs: Any) -> bool:
        if self._watching:
            return False
        first = args[0] if args else ""
        if isinstance(first, int):
            return first in self._open
        if kwargs.get("dir_fd") in self._open:
            return True
        return os.fspath(first).startswith(self._root)

    def _is_due(self, kind: str, number: int) -> bool:
        fault = self._fault
        if fault is None:
            return False
        if kind == fault.kind and number == fault.number:
            return True
        if self._full:
            return kind in ALLOCATING
        if not self._board.hits:
            return False
        return fault.effect == "dead disk" or (fault.effect == "ENOSPC" and kind in ALLOCATING)

    def _wrong(self, name: str, kind: str, args: Any, kwargs: Any) -> Any:
        assert self._fault is not None  # noqa: S101 - `_is_due` has said so
        match self._fault.effect:
            case "kill":
                die()
            case "kill one":
                os.kill(os.getpid(), signal.SIGKILL)
            case "power":
                self._fail_power()
            case "clock":
                _turn_clock(_DAY if self._fault.number % 2 else -_DAY)
            case "kill writer" | "stop writer" | "kill trainer" | "stop trainer":
                strike(self._fault.effect, os.getppid())
            case "full":
                self._full = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "short":
                args = _halved(name, args)
            case "torn":
                self._done(name, _halved(name, args), kwargs)
                die()
            case effect:
                if kind == "close":
                    self._done(name, args, kwargs)
                raise OSError(_CODES[effect], os.strerror(_CODES[effect]))
        return self._done(name, args, kwargs)


class _Raw(io.RawIOBase):
    """A descriptor as a file, by `os` calls that can go wrong."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = os.read(self._fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        return os.write(self._fd, data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return os.lseek(self._fd, offset, whence)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


def die() -> NoReturn:
    """Every process of the group is gone, this one among them."""
    os.killpg(0, signal.SIGKILL)
    signal.pause()
    raise AssertionError


def strike(effect: str, trainer: int) -> None:
    """Kill or stop this process, which is a writer, or its trainer."""
    how, _, whom = effect.partition(" ")
    number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
    os.kill(trainer if whom == "trainer" else os.getpid(), number)


def _path(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}").readlink()


def _kind(name: str, args: Any) -> str:
    return "create" if name == "open" and args[1] & os.O_CREAT else _CALLS[name]


def _halved(name: str, args: Any) -> Any:
    """Arguments for half of the bytes, and at least one."""
    if name == "preadv":
        fd, buffers, *rest = args
        first = memoryview(buffers[0])
        return fd, [first[: max(1, len(first) // 2)]], *rest
    fd, data, *rest = args
    if isinstance(data, int):
        return fd, max(1, data // 2), *rest
    return fd, data[: max(1, len(data) // 2)], *rest


def _turn_clock(by: float) -> None:
    now, calendar = time.time, time.gmtime
    time.time = lambda: now() + by
    time.gmtime = lambda seconds=None: calendar(now() + by if seconds is None else seconds)
