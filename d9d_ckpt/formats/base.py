"""What every format opens as."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.storage.store import join
from d9d_ckpt.tensors import Catalogue, Target


@dataclass(frozen=True)
class Opened:
    """A checkpoint's metadata; no tensor byte has been read.

    Attributes:
        url: Where it is.
        format: ``huggingface`` or ``sharded``.
        catalogue: Its tensors.
        config: The parsed config.json, or None.
        family: The family that a manifest names, or None.
        experts: How the Hugging Face side stores experts, where known.
        layout: Topology of a sharded checkpoint.
        step: Its step, where it has one.
        save_id: Identity of the save.
        small: Files beside the weights that go along byte for byte.
        values: JSON state.
        metadata: String metadata of the Hugging Face files, but for what we add.
        files: Header and small-file digests of a sharded checkpoint.
        inside: Small files that lie among the weights, since a commit was cut short.
        notes: What the reader should be told: ignored files and the like.
    """

    url: str
    format: str
    catalogue: Catalogue
    config: Mapping[str, Any] | None = None
    family: str | None = None
    experts: str = ""
    layout: Topology | None = None
    step: int | None = None
    save_id: str | None = None
    small: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def place(self, name: str) -> str:
        """URL of one of its files."""
        return join(self.url, f"{self.save_id}/{name}" if name in self.inside else name)


class OutFile(NamedTuple):
    """A weight file to be written.

    Attributes:
        name: Its final name, relative to the checkpoint.
        staged: The name that it has until the commit; the same where the final one is private.
        header: Its first bytes; of the final length, though checksums and places may be missing.
        nbytes: Its size, or what is known of it before its targets are encoded: its header's.
        targets: Numbers of the targets in it, in the order of their bytes.
    """

    name: str
    staged: str
    header: bytes
    nbytes: int
    targets: tuple[int, ...]


class Arrangement(NamedTuple):
    """Every file of a checkpoint to be written.

    Attributes:
        files: The files.
        places: Of each target its file and first byte; targets that are encoded are appended to
            their file as they come, and have the end of its header here until they are settled.
    """

    files: tuple[OutFile, ...]
    places: tuple[tuple[int, int], ...]


class Extent(NamedTuple):
    """Where the stored bytes of an encoded target have come to lie in its file."""

    offset: int
    nbytes: int


Extents = Mapping[int, Extent]
"""By number of a target; empty where nothing is encoded."""


Digests = Mapping[int, tuple[int, ...]]
"""By number of a target, one digest per block of its stored bytes."""


@dataclass(frozen=True)
class Content:
    """All that a checkpoint consists of, once every target is written.

    Attributes:
        targets: The boxes.
        arrangement: The files that they are in.
        digests: Of every target.
        small: Files beside the weights.
        extents: Of every target that is encoded.
    """

    targets: Sequence[Target]
    arrangement: Arrangement
    digests: Digests
    small: Mapping[str, bytes] = field(default_factory=dict)
    extents: Extents = field(default_factory=dict)

    def extent(self, target: int) -> Extent:
        """Where a target's stored bytes lie in its file."""
        at = self.arrangement.places[target][1]
        return self.extents.get(target) or Extent(at, self.targets[target].nbytes)

    def nbytes(self, file: int) -> int:
        """Size of a file."""
        out = self.arrangement.files[file]
        return len(out.header) + sum(self.extent(target).nbytes for target in out.targets)


class Record(NamedTuple):
    """A small file of the commit; ``name`` is relative to the checkpoint."""

    name: str
    content: bytes


class Sink(Protocol):
    """How a format lays out and describes a checkpoint that is being written."""

    @property
    def save_id(self) -> str:
        """Identity of the save."""
        ...

    @property
    def plain_headers(self) -> bool:
        """Whether headers are final before a byte has been written: no checksums in them."""
        ...

    def arrange(self, targets: Sequence[Target]) -> Arrangement:
        """Which file each target goes to, and where."""
        ...

    def header(self, content: Content, file: int) -> bytes:
        """The final header of a file, as long as the arranged one."""
        ...

    def record_name(self, arrangement: Arrangement) -> str:
        """Name of the file that makes it a checkpoint."""
        ...

    def record(self, content: Content) -> Record | None:
        """What makes the written files a checkpoint; None where a single file is one by itself."""
        ...
