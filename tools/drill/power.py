"""Power that fails: of a directory stays what was made durable, by the letter of POSIX."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Power:
    """What would be found after the power comes back.

    A file has the content that it had when it was last synced, a directory the names that it had
    then. What was there before counts as synced.

    Attributes:
        root: A directory that is never lost itself.
        name: What is watched in it.
        aside: Where contents are kept, and where the directory that is left is made.
    """

    root: Path
    name: str
    aside: Path
    _names: dict[int, dict[str, int]] = field(default_factory=dict)

    def begin(self) -> None:
        """Everything is durable."""
        shutil.rmtree(self.aside, ignore_errors=True)
        (self.aside / "content").mkdir(parents=True)
        for at, _, files in os.walk(self.root / self.name):
            for file in files:
                self.synced(Path(at, file))
            self.synced(Path(at))
        self.synced(self.root)

    def created(self, path: Path) -> None:
        """A new file, whose number an old one may have had."""
        self._content(path.stat().st_ino).unlink(missing_ok=True)

    def synced(self, path: Path) -> None:
        """A file or a directory was made durable."""
        number = path.stat().st_ino
        if path.is_dir():
            inside = [p for p in path.iterdir() if path != self.root or p.name == self.name]
            self._names[number] = {p.name: p.stat().st_ino for p in inside}
            # A directory that was never synced is there with nothing in it.
            for directory in filter(Path.is_dir, inside):
                self._names.setdefault(directory.stat().st_ino, {})
        else:
            shutil.copyfile(path, self._content(number))

    def fail(self) -> None:
        """Make what is left."""
        left = self.aside / "left"
        left.mkdir()
        self._restore(self.root.stat().st_ino, left)

    def come_back(self) -> None:
        """Put what is left in place, if the power had failed."""
        left = self.aside / "left"
        if left.is_dir():
            shutil.rmtree(self.root / self.name, ignore_errors=True)
            if (left / self.name).is_dir():
                shutil.move(left / self.name, self.root / self.name)
            shutil.rmtree(self.aside)

    def _restore(self, directory: int, to: Path) -> None:
        for name, number in self._names.get(directory, {}).items():
            if number in self._names:
                (to / name).mkdir()
                self._restore(number, to / name)
            elif self._content(number).exists():
                shutil.copyfile(self._content(number), to / name)
            else:
                (to / name).touch()

    def _content(self, number: int) -> Path:
        return self.aside / "content" / str(number)
