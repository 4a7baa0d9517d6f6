"""What a trainer asks of its writer process, and what that answers."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Generic, TypeVar

from d9d_ckpt.checkpointer.staging import Live
from d9d_ckpt.codecs.zstd import Zstd
from d9d_ckpt.errors import CkptError
from d9d_ckpt.formats.base import Digests, Extents
from d9d_ckpt.formats.sharded import Manifest
from d9d_ckpt.run.retention import Policy
from d9d_ckpt.storage.store import Options
from d9d_ckpt.tensors import Region, Target, TensorSpec

A = TypeVar("A")


class Message(Generic[A]):
    """Something asked; it is answered by an ``A``."""


@dataclass(frozen=True)
class Describe(Message[None]):
    """What the saves that follow consist of; sent again when that changes.

    It travels as numbers: pickling half a million named tuples keeps every other thread of a trainer
    from running for two seconds.

    Attributes:
        targets: The boxes that are stored. The coordinator has all of them; the other ranks need only
            their own, but numbers of targets are positions in this sequence.
        specs: Every tensor; those of the targets.
        columns: With a codec, the targets of each file; see `sender.columns_of`.
    """

    targets: Sequence[Target]
    specs: Mapping[str, TensorSpec]
    columns: Sequence[Sequence[int]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        names = {name: number for number, name in enumerate(self.specs)}
        rows = (
            (names[t.name], t.rank, t.part, t.parts, *t.box.start, *t.box.shape)
            for t in self.targets
        )
        return _described, (array("q", chain.from_iterable(rows)), self.specs, self.columns)


def _described(
    numbers: "array[int]",
    specs: Mapping[str, TensorSpec],
    columns: Sequence[Sequence[int]] | None,
) -> Describe:
    """A description from the numbers of its targets, one after the other."""
    tensors, left = list(specs.items()), iter(numbers.tolist())
    targets = []
    for tensor in left:
        rank, part, parts = islice(left, 3)
        name, spec = tensors[tensor]
        dims = len(spec.shape)
        box = Region(tuple(islice(left, dims)), tuple(islice(left, dims)))
        targets.append(Target(name, spec, box, rank, part, parts))
    return Describe(targets, specs, columns)


@dataclass(frozen=True)
class Lend(Message[None]):
    """A slot, new or grown; its descriptor comes with the message."""

    slot: int
    nbytes: int


@dataclass(frozen=True)
class Prepare(Message[None]):
    """Get ready for a save; what was begun before it and not committed is undone.

    Attributes:
        url: The directory of the step, normalised.
        manifest: All of the manifest but tensors and files; its save id is the save's.
        coordinator: Whether this rank claims the destination, creates the files and commits. The
            others write once the coordinator is prepared.
        options: Storage options.
        codec: How targets are encoded; needs columns in the description.
        overwrite: Whether a whole checkpoint there is replaced, at the commit.
        work: What was asked, for the claim.
    """

    url: str
    manifest: Manifest
    coordinator: bool
    options: Options = field(default_factory=dict)
    codec: Zstd | None = None
    overwrite: bool = False
    work: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wrote:
    """What a rank has written.

    Attributes:
        digests: Of each target.
        extents: Where each target lies, with a codec.
        hashes: One per stretch that was to be hashed.
        nbytes: Stored bytes of the targets.
    """

    digests: Digests
    extents: Extents
    hashes: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Write(Message[Wrote]):
    """Write targets from a slot; they are durable when this is answered.

    Attributes:
        slot: Number of the slot; the live tensors themselves for a writer in this process.
        sources: The first byte in the slot of every target of this rank, by number.
        hashed: (first byte, bytes) of stretches of the slot whose hash is wanted.
        threads: Files written at once; on object stores `sender.IN_FLIGHT` parts are sent at once.
    """

    slot: int | Live
    sources: Mapping[int, int]
    hashed: Sequence[tuple[int, int]] = ()
    threads: int = 2


@dataclass(frozen=True)
class Committed:
    """The checkpoint exists.

    Attributes:
        warning: What could not be tidied up, or None.
    """

    warning: str | None


@dataclass(frozen=True)
class Commit(Message[Committed]):
    """Make the checkpoint exist: of the coordinator, once every rank has written.

    Attributes:
        digests: Of every target, by its number here.
        extents: Of every target, with a codec.
        small: Files beside the weights.
    """

    digests: Digests
    extents: Extents = field(default_factory=dict)
    small: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Abort(Message[None]):
    """Break off what is going on and undo the save; nothing where none was begun, or it is committed."""


@dataclass(frozen=True)
class Trimmed:
    """What retention did.

    Attributes:
        deleted: Steps that are gone.
        warning: Why it could not be carried out, or None.
    """

    deleted: tuple[int, ...]
    warning: str | None


@dataclass(frozen=True)
class Prune(Message[Trimmed]):
    """Delete old steps of a run.

    Attributes:
        url: The run directory.
        policy: What stays.
        step: The step just committed: newer ones neither count nor go.
        options: Storage options.
    """

    url: str
    policy: Policy
    step: int
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class Working:
    """In place of an answer, which is still to come: a sign of life."""


@dataclass(frozen=True)
class Answer:
    """What came of the message of that number."""

    number: int
    value: Any | CkptError
