"""File systems that lack something, reached as whatever fsspec opens: a local tree behind them."""

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from drill.board import Board, Fault
from drill.places import Local
from drill.syscalls import die

_UNSEEN = 0.2
"""Seconds that a new entry is not in listings, where they are late."""

EFFECTS: Mapping[str, tuple[str, ...]] = {
    "HEAD": ("EIO", "kill"),
    "GET": ("EIO", "short", "kill"),
    "LIST": ("EIO", "kill"),
    "PUT": ("EIO", "ENOSPC", "torn", "lost answer", "kill", "kill after"),
    "DELETE": ("EIO", "lost answer", "kill", "kill after"),
}
"""What happens to a call: ``torn`` kills in the middle of what is being written."""


class Armed:
    """Counts the calls of this process; one of them goes wrong.

    Attributes:
        aside: Where files are that nobody sees yet.
    """

    def __init__(self, board: Board, fault: Fault | None, aside: Path) -> None:
        self._board, self._fault, self.aside = board, fault, aside

    def call(self, kind: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``real``, unless it is the one."""
        number = self._board.count(kind)
        if self._fault is None or (self._fault.kind, self._fault.number) != (kind, number):
            return real(*args, **kwargs)
        self._board.hit()
        match self._fault.effect:
            case "kill" | "torn":
                die()
            case "kill after":
                real(*args, **kwargs)
                die()
            case "lost answer":
                real(*args, **kwargs)
                raise OSError(errno.EIO, "the answer was lost")
            case "short":
                return real(*args, **kwargs)[:-1]
        number = getattr(errno, self._fault.effect)
        raise OSError(number, os.strerror(number))


class _Tree(LocalFileSystem):  # type: ignore[misc]
    """Files come to be as wholes, once all of them is written."""

    protocol: Any = ""
    cachable = False
    armed: Armed

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix(f"{cls.protocol}://")))

    def info(self, path: str, **more: Any) -> Any:
        return self.armed.call("HEAD", super().info, path, **more)

    def cat_file(self, path: str, **more: Any) -> Any:
        return self.armed.call("GET", super().cat_file, path, **more)

    def ls(self, path: str, detail: bool = False, **more: Any) -> Any:
        return self.armed.call("LIST", super().ls, path, detail=detail, **more)

    def rm(self, path: str, **more: Any) -> None:
        self.armed.call("DELETE", super().rm, path, **more)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        if mode == "create" and Path(self._strip_protocol(path)).exists():
            raise FileExistsError(path)
        self.armed.call("PUT", self._write, path, lambda staged: staged.write_bytes(value))

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self.armed.call("PUT", self._write, rpath, lambda staged: shutil.copyfile(lpath, staged))

    def _write(self, path: str, fill: Callable[[Path], object]) -> None:
        target = Path(self._strip_protocol(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.armed.aside) as directory:
            staged = Path(directory) / "whole"
            fill(staged)
            staged.replace(target)


class _NoRename(_Tree):
    """Nothing can be renamed."""

    protocol: Any = "norename"

    def mv(self, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOTSUP, "no renames here")

    mv_file = rename = move = mv


class _NoRandomWrite(_Tree):
    """Files are written from the first byte to the last."""

    protocol: Any = "norandomwrite"

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        if mode not in ("rb", "wb"):
            raise OSError(errno.ENOTSUP, "only from the first byte to the last")
        return super().open(path, mode, **more)


class _Late(_Tree):
    """New entries are not in listings for a while, though they can be read."""

    protocol: Any = "late"

    def ls(self, path: str, detail: bool = False, **more: Any) -> Any:
        found = super().ls(path, detail=True, **more)
        seen = [e for e in found if time.time() - Path(e["name"]).stat().st_mtime > _UNSEEN]
        return seen if detail else [e["name"] for e in seen]


class Shim(Local):
    """A local tree behind a protocol of its own."""

    disk = False

    def __init__(self, kind: type[_Tree], root: Path, board: Board) -> None:
        super().__init__(root, board)
        self._kind = kind
        self.name = kind.protocol
        fsspec.register_implementation(self.name, kind, clobber=True)

    def url(self, name: str) -> str:
        return f"{self.name}://{self.root / name}"

    def arm(self, fault: Fault | None) -> None:
        self._kind.armed = Armed(self._board, fault, self.root.parent)

    def end(self) -> None:
        """Nothing more can go wrong."""

    def settles(self) -> bool:
        if self._kind is not _Late:
            return False
        time.sleep(_UNSEEN)
        return True

    def faults(self, counts: Mapping[str, int]) -> list[Fault]:
        return [
            Fault(kind, number, effect)
            for kind, count in counts.items()
            for number in range(1, count + 1)
            for effect in EFFECTS[kind]
        ]


SHIMS: tuple[type[_Tree], ...] = (_NoRename, _NoRandomWrite, _Late)
