"""Where the drill's checkpoints lie, looked at without the engine."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from drill import syscalls
from drill.board import Board, Fault
from drill.power import Power

DST = "out"
"""The directory that commands write."""


class Place(Protocol):
    """A place with directories of the drill, by name.

    Attributes:
        name: For the table.
        options: Storage options of it.
        direct: Those of readers with nothing going wrong.
        disk: Whether it renames and sets aside, so that every operation has a meaning there.
    """

    name: str
    options: Mapping[str, Any]
    direct: Mapping[str, Any]
    disk: bool

    def url(self, name: str) -> str:
        """The URL of a directory."""
        ...

    def seen(self, name: str) -> str:
        """The URL of a directory for readers with nothing going wrong."""
        ...

    def send(self, tree: Path, name: str) -> None:
        """Copy a local tree to a directory, in place of what is there."""
        ...

    def fetch(self, name: str, tree: Path) -> None:
        """Copy a directory to a local tree that is not there yet."""
        ...

    def clear(self, name: str) -> None:
        """Remove a directory, and uploads that nobody has ended."""
        ...

    def files(self, name: str) -> dict[str, int]:
        """Every file below a directory with its size; of unfinished uploads too."""
        ...

    def mark(self, name: str) -> object:
        """What changes when anything below a directory does."""
        ...

    def arm(self, fault: Fault | None) -> None:
        """In a child: from now on operations are counted, and one goes wrong."""
        ...

    def end(self) -> None:
        """In the child: the command has succeeded."""
        ...

    def disarm(self) -> None:
        """In the parent, once the child is gone: nothing goes wrong any more."""
        ...

    def settles(self) -> bool:
        """Wait until listings show what is there; whether they were behind."""
        ...

    def faults(self, counts: Mapping[str, int]) -> list[Fault]:
        """Every fault of a run that did so many operations."""
        ...


class Local:
    """A directory of this machine, at the kernel's calls."""

    name = "local"
    disk = True

    def __init__(self, root: Path, board: Board) -> None:
        self.root, self._board = root, board
        self.options: Mapping[str, Any] = {}
        self.direct: Mapping[str, Any] = {}

    def url(self, name: str) -> str:
        return str(self.root / name)

    def seen(self, name: str) -> str:
        return str(self.root / name)

    def send(self, tree: Path, name: str) -> None:
        self.clear(name)
        shutil.copytree(tree, self.root / name)

    def fetch(self, name: str, tree: Path) -> None:
        shutil.copytree(self.root / name, tree)

    def clear(self, name: str) -> None:
        shutil.rmtree(self.root / name, ignore_errors=True)

    def files(self, name: str) -> dict[str, int]:
        base = self.root / name
        return {str(p.relative_to(base)): p.stat().st_size for p in _below(base) if p.is_file()}

    def mark(self, name: str) -> object:
        base = self.root / name
        return [(str(p), (s := p.stat()).st_size, s.st_mtime_ns, s.st_mode) for p in _below(base)]

    def arm(self, fault: Fault | None) -> None:
        self._board.fault = fault
        self._disk = syscalls.Disk(str(self.root), self._board, fault, self._power())
        self._disk.install()

    def end(self) -> None:
        self._disk.end()

    def disarm(self) -> None:
        self._power().come_back()

    def _power(self) -> Power:
        return Power(self.root, DST, self.root.parent / "durable")

    def settles(self) -> bool:
        return False

    def faults(self, counts: Mapping[str, int]) -> list[Fault]:
        return syscalls.faults(counts)


def _below(base: Path) -> list[Path]:
    return sorted(Path(at) / name for at, _, names in os.walk(base) for name in names)
