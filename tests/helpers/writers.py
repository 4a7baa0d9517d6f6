"""Saves through writer processes, several ranks of them in one process."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from d9d_ckpt.checkpointer.link import Link
from d9d_ckpt.checkpointer.messages import Commit, Committed, Describe, Prepare, Write, Wrote
from d9d_ckpt.checkpointer.sender import columns_of
from d9d_ckpt.checkpointer.staging import Staging
from d9d_ckpt.codecs.zstd import Zstd
from d9d_ckpt.formats.sharded import Manifest
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.run.execute import new_save_id
from d9d_ckpt.tensors import BLOCK, DTYPES, Region, Target, TensorSpec

State = Mapping[str, np.ndarray]

_DTYPES = {"float32": "F32", "uint16": "U16", "int64": "I64"}


def state(seed: int = 0, *, rows: int = 600) -> State:
    """Some megabytes: tensors of many blocks, of few bytes, and a scalar."""
    rng = np.random.default_rng(seed)
    return {
        "w": rng.standard_normal((rows, 1024), np.float32),
        "b": rng.integers(0, 1 << 16, (7, 3), np.uint16),
        "norm": rng.standard_normal(33, np.float32),
        "step": np.array(seed, np.int64),
    }


def targets_of(tensors: State, world: int) -> list[Target]:
    """Rows over the ranks, in boxes of a block at most; a scalar is the first rank's."""
    out = []
    for name, array in tensors.items():
        spec = TensorSpec(DTYPES[_DTYPES[array.dtype.name]], array.shape)
        whole = Region.whole(array.shape)
        size = -(-array.shape[0] // world) if array.shape else 0
        shares = [
            (rank, whole.narrow(0, rank * size, min(size, array.shape[0] - rank * size)))
            for rank in range(world)
            if array.shape and rank * size < array.shape[0]
        ] or [(0, whole)]
        boxes = [(rank, b) for rank, s in shares for b in s.slabs(BLOCK // array.itemsize)]
        parts = len(boxes)
        out += [
            Target(name, spec, box, rank, part, parts) for part, (rank, box) in enumerate(boxes)
        ]
    return out


@dataclass
class Rank:
    """One rank: its link, its slot, and where its targets are in it."""

    link: Link
    slot: Staging
    sources: dict[int, int]

    def write(self, **more: Any) -> Wrote:
        """Let its writer write."""
        ask = {k: more.pop(k) for k in ("beat", "timeout") if k in more}
        return self.link.ask(Write(0, self.sources, **more), **ask)


class Ranks:
    """A world whose ranks all live here; the first one coordinates."""

    def __init__(self, world: int = 1, codec: Zstd | None = None) -> None:
        self.codec = codec
        self.targets: list[Target] = []
        self.ranks = [Rank(Link.start(), Staging(), {}) for _ in range(world)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.link.close()
            rank.slot.close()

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def stage(self, tensors: State) -> None:
        """Put every rank's part in its slot, and say what there is."""
        self.targets = targets_of(tensors, len(self.ranks))
        specs = {target.name: target.spec for target in self.targets}
        columns = columns_of(self.targets) if self.codec else None
        for number, rank in enumerate(self.ranks):
            mine = [n for n, target in enumerate(self.targets) if target.rank == number]
            ends = np.cumsum([0, *(self.targets[n].nbytes for n in mine)]).tolist()
            rank.sources = dict(zip(mine, ends, strict=False))
            if rank.slot.reserve(ends[-1]):
                rank.link.lend(0, rank.slot)
            for n, at in rank.sources.items():
                box = self.targets[n].box
                cut = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
                data = np.ascontiguousarray(tensors[self.targets[n].name][cut]).tobytes()
                rank.slot.view[at : at + len(data)] = np.frombuffer(data, np.uint8)
            rank.link.ask(Describe(self.targets, specs, columns))

    def prepare(self, url: object, step: int = 0, **more: Any) -> str:
        """Begin a save of what is staged; its id."""
        world = len(self.ranks)
        manifest = Manifest(
            save_id=new_save_id(),
            step=step,
            layout=Topology(dp_shard=world),
            family=None,
            config=None,
            experts="",
            entries={},
            files={},
            values={"cursor": step},
        )
        for number, rank in enumerate(self.ranks):
            rank.link.ask(
                Prepare(str(url), manifest, coordinator=not number, codec=self.codec, **more)
            )
        return manifest.save_id

    def write(self) -> list[Wrote]:
        """Let every rank write."""
        return [rank.write() for rank in self.ranks]

    def commit(self, wrote: Sequence[Wrote], **more: Any) -> Committed:
        """Make the checkpoint of what was written."""
        digests = {target: found for w in wrote for target, found in w.digests.items()}
        extents = {target: extent for w in wrote for target, extent in w.extents.items()}
        return self[0].link.ask(Commit(digests, extents, **more))

    def save(self, url: object, tensors: State, step: int = 0, **more: Any) -> Committed:
        """All of a save."""
        self.stage(tensors)
        self.prepare(url, step, **more)
        return self.commit(self.write())


def until(true: Callable[[], object], seconds: float = 5.0) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def children() -> set[int]:
    """Children of this process, zombies included."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            found.update(map(int, thread.read_text().split()))
    return found
