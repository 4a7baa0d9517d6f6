"""What is done under faults, and what must hold after each of them."""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import d9d_ckpt
import make_checkpoint
from d9d_ckpt import api
from d9d_ckpt.codecs.checksum import digest
from d9d_ckpt.errors import CheckError
from drill import children
from drill.board import Board, Fault
from drill.places import DST, Place

SIZE, SHARD, LAYOUT, OTHER = "8MiB", 3_000_000, "tp=2", "pp=2"
NEXT_DOOR = "next door"
NOTES = "notes.txt"
COMMON: Mapping[str, Any] = {"workers": 2, "memory": "256MiB"}
_SAVE = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}")
_ATTEMPTS = 4

Prints = Mapping[str, str]
"""Dtype, shape and digest of every tensor of a checkpoint."""


def read(url: str, options: Mapping[str, Any]) -> Prints:
    """What the tensors at ``url`` are, bit for bit, once all that has a checksum was verified.

    Raises:
        CheckError: Something differs from its checksum.
    """
    checked = d9d_ckpt.verify(url, workers=1, storage_options=options)
    if not checked.ok:
        raise CheckError(f"damaged: {[d.tensor or d.file for d in checked.damaged]}")
    found = d9d_ckpt.open(url, storage_options=options)
    return prints({name: found[name].read() for name in found.tensors})


def prints(tensors: Mapping[str, torch.Tensor]) -> Prints:
    """What tensors are, bit for bit."""
    return {name: _print(tensor) for name, tensor in tensors.items()}


def _print(tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest(raw.data):016x}"


@dataclass(frozen=True, slots=True)
class Spot:
    """A directory at the destination that holds a checkpoint before or after.

    Attributes:
        at: Relative to the destination; empty for itself.
        may: Names of the checkpoints that may be there, whole.
        must: Whether one of them has to be there, whatever happens.
        end: The one that is there in the end, or None.
        late: Whether what is not there in the end may outlive a success that met a fault: a save
            stands though old steps are left, and the next one removes them.
    """

    at: str
    may: tuple[str, ...]
    must: bool
    end: str | None
    late: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """One command.

    Attributes:
        name: For the table.
        call: Carries it out, given source, destination and settings.
        source: The tree it reads.
        before: The tree that is at the destination before, or None.
        spots: What is at the destination.
        settings: What is asked.
        disk: Whether only a place with renames has it.
        faults: Everything that can go wrong in a run that did so many operations; None for what the
            place says.
        share: How often it has its turn where time is short, beside the others.
        records: Files of which one makes a checkpoint exist.
        read: What the tensors at a URL are; raises when there is no whole checkpoint.
    """

    name: str
    call: Callable[..., object]
    source: str
    before: str | None
    spots: tuple[Spot, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    disk: bool = False
    faults: Callable[[Mapping[str, int]], list[Fault]] | None = None
    share: float = 1.0
    records: tuple[str, ...] = (
        "manifest.json",
        "model.safetensors.index.json",
        "model.safetensors",
    )
    read: Callable[[str, Mapping[str, Any]], Prints] = read


def _convert(source: str, destination: str, **settings: Any) -> None:
    d9d_ckpt.convert(source, destination, **COMMON, **settings)


def _reshard(source: str, destination: str, **settings: Any) -> None:
    d9d_ckpt.reshard(source, destination, **COMMON, **settings)


def _prune(source: str, destination: str, **settings: Any) -> None:
    del source
    api.prune(destination, keep_last=1, **settings)


_TO_SHARDED: Mapping[str, Any] = {"to": "sharded", "layout": LAYOUT}
_TO_HF: Mapping[str, Any] = {"to": "huggingface", "max_shard_size": SHARD}
_NEW = (Spot("", ("sharded",), must=False, end="sharded"),)
_NEW_HF = (Spot("", ("hf",), must=False, end="hf"),)
_STEPS = (
    Spot("step-00000001", ("sharded",), must=False, end=None),
    Spot("step-00000002", ("old sharded",), must=False, end=None),
    Spot("step-00000003", ("sharded",), must=True, end="sharded"),
)

STEP_FOUR = (
    Spot("step-00000001", ("sharded",), must=False, end=None, late=True),
    Spot("step-00000002", ("old sharded",), must=False, end=None, late=True),
    Spot("step-00000003", ("sharded",), must=True, end="sharded"),
    Spot("step-00000004", ("sharded",), must=False, end="sharded"),
)
"""A fourth step, saved into a run that keeps two."""

OPERATIONS = (
    Operation("convert to sharded", _convert, "raw", None, _NEW, _TO_SHARDED),
    Operation("convert to HF", _convert, "sharded", None, _NEW_HF, _TO_HF),
    Operation("reshard", _reshard, "sharded", None, _NEW, {"layout": OTHER}),
    Operation(
        "resume", _convert, "raw", "begun", _NEW, {**_TO_SHARDED, "resume": True}, disk=True
    ),
    Operation(
        "overwrite sharded", _convert, "raw", "old sharded",
        (Spot("", ("sharded", "old sharded"), must=True, end="sharded"),),
        {**_TO_SHARDED, "overwrite": True},
    ),
    Operation(
        "overwrite HF", _convert, "sharded", "old hf",
        (Spot("", ("hf", "old hf"), must=True, end="hf"),),
        {**_TO_HF, "overwrite": True}, disk=True,
    ),
    Operation("prune", _prune, "sharded", "run", _STEPS),
)  # fmt: skip


# -- trees --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trees:
    """Checkpoints of the drill, made once on the local disk.

    Attributes:
        root: Where they lie, by name.
        prints: What their tensors are.
    """

    root: Path
    prints: Mapping[str, Prints]

    def path(self, name: str) -> Path:
        return self.root / name


def make_trees(root: Path) -> Trees:
    """Two models of equal shapes, each in both formats, and a run of three steps."""
    for seed, old in enumerate(("", "old ")):
        raw, sharded, hf = (str(root / f"{old}{name}") for name in ("raw", "sharded", "hf"))
        config = make_checkpoint.sized("llama", SIZE)
        make_checkpoint.write(config, Path(raw), seed=seed, max_shard_size=SHARD)
        small = Path(raw) / "config.json"
        small.write_text(small.read_text().replace("{", f'{{"of": "{old}",', 1))
        d9d_ckpt.convert(raw, sharded, **COMMON, **_TO_SHARDED)
        d9d_ckpt.convert(sharded, hf, **COMMON, **_TO_HF)
        for made in (sharded, hf):
            if not d9d_ckpt.diff(raw, made).equal:
                raise AssertionError(f"{made} is not what it was made of")
    for spot in _STEPS:
        shutil.copytree(root / spot.may[0], root / "run" / spot.at)
    for name in ("old hf", "old sharded", "run"):
        (root / name / NOTES).write_text("mine")
    names = ("hf", "old hf", "sharded", "old sharded")
    return Trees(root, {name: read(str(root / name), {}) for name in names})


# -- one fault ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be.

    Attributes:
        kind: ``unloadable``, ``harmed``, ``hang``, ``leftover`` or ``crash``.
        place: Of the drill.
        operation: That the fault met.
        fault: The fault.
        detail: What was found.
    """

    kind: str
    place: str
    operation: str
    fault: Fault
    detail: str


@dataclass(frozen=True, slots=True)
class Result:
    """One fault and what came of it.

    Attributes:
        place: Where.
        operation: What was done.
        fault: What went wrong.
        how: ``done``, ``refused`` or ``killed`` where nothing is wrong with that.
        seconds: What the faulty run took.
        violations: What must not be.
    """

    place: str
    operation: str
    fault: Fault
    how: str
    seconds: float
    violations: tuple[Violation, ...]


@dataclass(frozen=True)
class Scene:
    """One operation at one place.

    Attributes:
        place: Where.
        board: Counts its operations.
        trees: The checkpoints.
        operation: The command.
        clean: Files at the destination after a run without faults.
        counts: Operations of that run.
    """

    place: Place
    board: Board
    trees: Trees
    operation: Operation
    clean: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)

    def faults(self) -> list[Fault]:
        """Everything that can go wrong."""
        return (self.operation.faults or self.place.faults)(self.counts)

    def reset(self) -> None:
        """The destination as it is before."""
        before = self.operation.before
        if before is None:
            self.place.clear(DST)
        else:
            self.place.send(self.trees.path(before), DST)
        self.board.clear()

    def carry_out(self, fault: Fault | None, **more: Any) -> None:
        """In a child: the command, with or without a fault."""
        o, place = self.operation, self.place
        place.arm(fault)
        settings = {**o.settings, "storage_options": place.options, **more}
        o.call(place.url(o.source), place.url(DST), **settings)
        place.end()

    def recorded(self) -> "Scene":
        """This scene with what a run without faults does and leaves.

        Raises:
            AssertionError: Even without faults something is wrong.
        """
        self.reset()
        ended = children.run(partial(self.carry_out, None))
        self.place.disarm()
        if ended.how != "done":
            raise AssertionError(f"{self.operation.name} at {self.place.name}: {ended}")
        counts, names = self.board.counts, self._names()
        made = Scene(self.place, self.board, self.trees, self.operation, names, counts)
        if wrong := list(made._wrong(over=True)):
            raise AssertionError(f"{self.operation.name} at {self.place.name}: {wrong}")
        return made

    def drill(self, fault: Fault) -> Result | None:
        """One fault, and everything after it; None when it did not come to it."""
        self.reset()
        around = self._around()
        ended = children.run(partial(self.carry_out, fault))
        self.place.disarm()
        if not self.board.hits:
            return None
        found = list(self._outcome(ended, fault))
        over = ended.how == "done" or self._must_last(fault)
        found += self._wrong(over=over, faulty=True)
        found += self._rerun()
        if self._around() != around:
            found.append(("harmed", "what lies beside the destination has changed"))
        wrong = [Violation(k, self.place.name, self.operation.name, fault, d) for k, d in found]
        name = self.operation.name
        return Result(self.place.name, name, fault, ended.how, ended.seconds, tuple(wrong))

    def _must_last(self, fault: Fault) -> bool:
        """Whether a power loss after success may undo nothing; what was deleted may come back."""
        return fault.kind == "end" and all(spot.end for spot in self.operation.spots)

    def _around(self) -> object:
        return [self.place.mark(name) for name in (self.operation.source, NEXT_DOOR)]

    def _outcome(self, ended: children.Ended, fault: Fault) -> Sequence[tuple[str, str]]:
        if ended.how == "hung":
            return [("hang", ended.text)]
        if ended.how == "crashed":
            return [("crash", ended.text)]
        if ended.how == "littered":
            return [("leftover", ended.text)]
        if ended.how == "killed" and not fault.effect.startswith(("kill", "torn", "power")):
            return [("crash", "died without a word")]
        return []

    def _wrong(self, *, over: bool, faulty: bool = False) -> Sequence[tuple[str, str]]:
        """What the destination must not be once the command has succeeded, or met a fault."""
        ended = children.run(partial(self._look, over=over, faulty=faulty))
        if ended.how == "hung":
            return [("hang", f"looking at the destination: {ended.text}")]
        return ended.value if ended.how == "done" else [("crash", ended.text)]

    def _look(self, *, over: bool, faulty: bool) -> list[tuple[str, str]]:
        """In a child without faults: the destination as a reader finds it."""
        out: list[tuple[str, str]] = []
        files = self.place.files(DST)
        for spot in self.operation.spots:
            claims = any(_below(spot.at, record) in files for record in self.operation.records)
            state = self._state(spot) if claims else "nothing there"
            if claims and state not in spot.may:
                out.append(("unloadable", f"{spot.at or DST}: {state}; {sorted(files)}"))
            if spot.must and state not in spot.may:
                out.append(("harmed", f"{spot.at or DST}: {state}; {sorted(files)}"))
            may_stay = faulty and spot.late and state in spot.may
            if over and not may_stay and state != (spot.end or "nothing there"):
                out.append(("unloadable", f"said to be done, but {spot.at or DST}: {state}"))
        if self.operation.before not in (None, "begun") and NOTES not in files:
            out.append(("harmed", f"{NOTES} is gone"))
        return out

    def _state(self, spot: Spot) -> str:
        """The name of the checkpoint at a spot, or what is wrong with it."""
        url = self.place.seen(f"{DST}/{spot.at}" if spot.at else DST)
        try:
            tensors = self.operation.read(url, self.place.direct)
        except Exception as error:  # noqa: BLE001 - whatever it is, this is no checkpoint
            return f"{type(error).__name__}: {error}"
        names = [name for name in spot.may if self.trees.prints[name] == tensors]
        return names[0] if names else "tensors of no checkpoint of this drill"

    def _rerun(self) -> Sequence[tuple[str, str]]:
        """The command again, as its refusals tell; afterwards nothing is left but what it makes."""
        said: list[str] = []
        more: dict[str, Any] = {}
        while not self._is_over():
            if len(said) == _ATTEMPTS:
                return [("leftover", f"{self._left()} after {'; '.join(said)}")]
            ended = children.run(partial(self.carry_out, None, **more))
            self.place.disarm()
            said.append(f"{more}: {ended.how} {ended.text}")
            if ended.how in ("hung", "crashed", "killed", "littered"):
                kind = "hang" if ended.how == "hung" else "crash"
                return [(kind, f"rerun: {'; '.join(said)}")]
            if told := _told(ended.text, {**self.operation.settings, **more}):
                more |= {told: True}
            elif not self.place.settles() and not self._is_over():
                return [("leftover", f"{self._left()} after {'; '.join(said)}")]
        return []

    def _is_over(self) -> bool:
        """Whether there is nothing left to do."""
        return not self._left() and not self._wrong(over=True)

    def _names(self) -> tuple[str, ...]:
        """Files at the destination, saves by one name.

        Files bear it, and small ones lie with it, where others of the same name were in the way.
        """
        found = (_SAVE.sub("SAVE", name) for name in self.place.files(DST))
        names = (name.replace("model-SAVE-", "model-") for name in found)
        return tuple(
            sorted(n for n in names if not (n.startswith("SAVE/") and n.endswith(".json")))
        )

    def _left(self) -> str:
        """How the names of the files differ from those of a clean run; empty where they do not."""
        # Counted, since two saves would have the same names.
        names, clean = Counter(self._names()), Counter(self.clean)
        if names == clean:
            return ""
        return f"too many {sorted(names - clean)}, missing {sorted(clean - names)}"


def _below(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name


def _told(message: str, settings: Mapping[str, Any]) -> str | None:
    """The option that a refusal tells to give, which was not given yet."""
    for option in ("resume", "overwrite"):
        if f"--{option}" in message and not settings.get(option):
            return option
    return None


def begun(scene: Scene, name: str, writes: int) -> None:
    """Make the tree of a run of ``scene`` that was killed at one of its writes."""
    scene.reset()
    children.run(partial(scene.carry_out, Fault("write", writes, "kill")))
    scene.place.disarm()
    scene.place.fetch(DST, scene.trees.path(name))
