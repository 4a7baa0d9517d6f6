"""Run directories: a sharded checkpoint per step, whole or not, and what in each of them is ours."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from d9d_ckpt.errors import MissingError, RequestError, SourceError
from d9d_ckpt.formats.base import Opened
from d9d_ckpt.formats.claim import CLAIM, OURS, SAVE, Claim, read_claim
from d9d_ckpt.formats.sharded import (
    MANIFEST,
    FilesIn,
    check_sizes,
    listed,
    open_sharded,
    read_manifest,
)
from d9d_ckpt.storage.store import Store, is_local, join

_STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,})", re.ASCII)
"""At least eight digits and one spelling per number."""

_RANK = re.compile(r"rank-\d{5,}(-\d{5,})?\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True)
class Contents:
    """What lies in a step directory; names are relative to it.

    Attributes:
        ours: Bytes of each file that belongs to a checkpoint of ours, or to a writer of one.
        unknown: Everything else; of a directory that is not ours its own name alone.
        saves: Directories of a save.
        linked: Those of the unknown that look like one and are symbolic links.
        claim: The mark of a process that works on it, or None.
    """

    ours: Mapping[str, int]
    unknown: tuple[str, ...]
    saves: tuple[str, ...]
    linked: tuple[str, ...]
    claim: Claim | None

    @property
    def nbytes(self) -> int:
        """Bytes of ours."""
        return sum(self.ours.values())

    @property
    def small(self) -> tuple[str, ...]:
        """Files beside the manifest that only it names."""
        return tuple(
            n for n in self.ours if "/" not in n and n != MANIFEST and not n.startswith(OURS)
        )


@dataclass(frozen=True, slots=True)
class StepState:
    """One step of a run.

    Attributes:
        step: Its number.
        name: Its directory.
        reason: Why it is no whole checkpoint; None when it is one.
        layout: Topology of its files as its manifest has it; None without a readable one.
        contents: What lies in it.
        place: Where it really is; another place than its own for a symbolic link.
        link: Whether it is a symbolic link.
    """

    step: int
    name: str
    reason: str | None
    layout: Mapping[str, Any] | None
    contents: Contents
    place: str
    link: bool = False

    @property
    def complete(self) -> bool:
        """Whether the manifest is whole and every file that it names is there at its size."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory.

    Attributes:
        url: Where it is.
        steps: Its steps, ascending.
        others: What else lies in it.
    """

    url: str
    steps: tuple[StepState, ...]
    others: tuple[str, ...]

    @property
    def latest(self) -> int | None:
        """The highest whole step; None when there is none."""
        return max((s.step for s in self.steps if s.complete), default=None)


def step_directories(names: Iterable[str]) -> dict[int, str]:
    """Those of ``names`` that are steps, by number."""
    return {int(m.group(1)): name for name in names if (m := _STEP.fullmatch(name))}


def open_step(store: Store, path: str, step: int) -> Opened:
    """The checkpoint of one step.

    Raises:
        SourceError: It is incomplete or damaged.
    """
    if MANIFEST not in store.names(path):
        raise MissingError(f"{path}: no manifest, so step {step} is incomplete")
    return open_sharded(store, path)


def read_run(store: Store, url: str) -> Run:
    """Every step of a run directory and its state.

    Raises:
        MissingError: There is no such directory.
        RequestError: It is a checkpoint, not a directory of checkpoints.
    """
    names = store.names(url)
    if MANIFEST in names:
        raise RequestError(f"{url}: is a checkpoint; a run directory holds one per step-NNNNNNNN/")
    if not names and not (is_local(url) and Path(url).is_dir()):
        raise MissingError(f"{url}: no such run directory")
    files = listed(store, url)
    found = step_directories(name for name in names if name not in files)
    steps = tuple(_state(store, url, step, found[step]) for step in sorted(found))
    taken = set(found.values())
    return Run(url, steps, tuple(name for name in names if name not in taken))


def why_not(error: SourceError, path: str) -> str:
    """What ``error`` says of the step at ``path``, in words that follow its name."""
    return str(error).removeprefix(path).lstrip(":/ ")


def _state(store: Store, url: str, step: int, name: str) -> StepState:
    path = join(url, name)
    names = store.names(path)
    # What is whole and what is ours are told from one look at each directory. A file that vanishes
    # meanwhile is in neither.
    files_in = cache(partial(listed, store))
    opened: Opened | None = None
    reason: str | None = "no manifest"
    if MANIFEST in names:
        try:
            opened = read_manifest(store, path)
            check_sizes(files_in, opened)
            reason = None
        except SourceError as error:
            reason = why_not(error, path)
    layout = opened.layout.to_json() if opened is not None and opened.layout is not None else None
    contents = _contents(store, files_in, path, names, opened)
    place = str(Path(path).resolve()) if is_local(path) else path
    return StepState(step, name, reason, layout, contents, place, _is_link(path))


def _contents(
    store: Store, files_in: FilesIn, path: str, names: Collection[str], opened: Opened | None
) -> Contents:
    files = files_in(path) if names else {}
    claim = read_claim(store, join(path, CLAIM)) if CLAIM in files else None
    known = set(opened.files) | {MANIFEST} if opened is not None else set()
    if claim is not None and claim.prune is not None:
        known |= set(claim.prune)
    ours: dict[str, int] = {}
    unknown: list[str] = []
    likely = [n for n in names if n not in files and _is_save(n, known)]
    linked = [n for n in likely if _is_link(join(path, n))]
    saves = [n for n in likely if n not in linked]
    for name in names:
        if name in files and (name in known or name.startswith(OURS)):
            ours[name] = files[name]
        elif name in saves:
            inside, strange = _saved(store, files_in, path, name, known)
            ours |= inside
            unknown += strange
        else:
            unknown.append(name)
    return Contents(ours, tuple(unknown), tuple(saves), tuple(linked), claim)


def _is_save(name: str, known: Collection[str]) -> bool:
    """Whether a directory has the name of a save's, or a manifest names files in it."""
    return bool(SAVE.fullmatch(name)) or any(n.startswith(f"{name}/") for n in known)


def _saved(
    store: Store, files_in: FilesIn, path: str, save: str, known: Collection[str]
) -> tuple[dict[str, int], list[str]]:
    """Bytes of the weight files in a directory of one save, and whatever else is there."""
    directory = join(path, save)
    files = files_in(directory)
    ours, unknown = {}, []
    for name in store.names(directory):
        whole = f"{save}/{name}"
        mine = whole in known or name in known or _RANK.fullmatch(name) or name.startswith(OURS)
        if name in files and mine:
            ours[whole] = files[name]
        else:
            unknown.append(whole)
    return ours, unknown


def _is_link(url: str) -> bool:
    return is_local(url) and Path(url).is_symlink()
