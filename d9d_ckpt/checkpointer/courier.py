"""A thread of each rank that hands snapshots to the writer process and agrees with the other ranks."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from d9d_ckpt.checkpointer.base import Held
from d9d_ckpt.checkpointer.inside import Inside
from d9d_ckpt.checkpointer.link import Link
from d9d_ckpt.checkpointer.load import TIED
from d9d_ckpt.checkpointer.messages import Abort, Commit, Describe, Prepare, Prune, Write, Wrote
from d9d_ckpt.checkpointer.sender import columns_of
from d9d_ckpt.checkpointer.share import Holding, SavePlan, plan_save
from d9d_ckpt.checkpointer.snapshot import Snapshot
from d9d_ckpt.checkpointer.staging import Live, Staging
from d9d_ckpt.checkpointer.unpadded import check_matched
from d9d_ckpt.checkpointer.values import merge
from d9d_ckpt.codecs.checksum import to_hex
from d9d_ckpt.codecs.zstd import Zstd
from d9d_ckpt.errors import CkptError, CorruptError, RequestError, StorageError
from d9d_ckpt.formats.base import Extent
from d9d_ckpt.formats.sharded import Manifest
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.run.execute import new_save_id
from d9d_ckpt.run.ranks import OneRank, Ranks
from d9d_ckpt.run.retention import Policy
from d9d_ckpt.storage.store import Options, join
from d9d_ckpt.tensors import BLOCK, Target

if TYPE_CHECKING:
    from concurrent.futures import Future

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE = 1.0
"""Seconds between signs of life while there is nothing to do."""

_LONGEST_ABORT = 180.0
"""Seconds that a store gets to be rid of an unfinished save: more than it is asked again for."""


@dataclass(frozen=True)
class Terms:
    """What all saves of a checkpointer have in common.

    Attributes:
        url: The run directory, normalised.
        options: Storage options.
        codec: How tensors are encoded.
        policy: Which steps stay after a commit; None for all.
        compare_replicas: Whether what several ranks hold must be equal on all of them.
        check_finite: Whether NaN and infinity are refused.
        layout: Topology for the manifest.
        family: Model family for the manifest, so that offline tools can reshard by it.
        config: The model's config.json, parsed.
        small: Files that go along.
    """

    url: str
    options: Options
    codec: Zstd | None
    policy: Policy | None
    compare_replicas: bool
    check_finite: bool
    layout: Topology
    family: str | None = None
    config: Mapping[str, Any] | None = None
    small: Mapping[str, bytes] = field(default_factory=dict)


class Slot(NamedTuple):
    """A slot and the number by which it is lent."""

    number: int
    staging: Staging


@dataclass(frozen=True)
class Job:
    """One save.

    Attributes:
        step: Its step.
        overwrite: Whether a whole checkpoint of that step is replaced.
        tensors: What this rank holds.
        holding: The same without the bytes.
        values: JSON of the state.
        tied: Names that stand for another tensor.
        unmatched: Globs of ``unpadded`` that match nothing here.
        snapshot: Where the bytes are in the slot.
        slot: Where the snapshot is, or the live tensors in place of one.
        future: What waits for the outcome.
    """

    step: int
    overwrite: bool
    tensors: Mapping[str, Held]
    holding: Holding
    values: Mapping[str, Any]
    tied: Mapping[str, str]
    unmatched: frozenset[str]
    snapshot: Snapshot
    slot: Slot | Live
    future: "Future[None]"


class Refused(NamedTuple):
    """A save that this rank cannot take part in, which the others must hear of."""

    step: int
    error: BaseException


class _Ready(NamedTuple):
    """What a rank says when it has a snapshot."""

    step: int
    mark: str
    values: Mapping[str, Any]
    tied: Mapping[str, str]
    unmatched: frozenset[str]


class _Verdict(NamedTuple):
    """What rank 0 says of it."""

    save_id: str
    replan: bool


class _Agreed(NamedTuple):
    """What all ranks go by; the values are rank 0's to write, joined over the ranks."""

    save_id: str
    plan: SavePlan
    values: Mapping[str, Any]


@dataclass
class _Line:
    """A writer, what it was told to save last, and the bytes of the slots that it knows."""

    link: Link | Inside
    described: SavePlan | None = None
    lent: dict[int, int] = field(default_factory=dict)


class Courier(threading.Thread):
    """Carries jobs one after the other; every rank has one and all carry the same steps."""

    def __init__(
        self,
        terms: Terms,
        ranks: Callable[[int], Ranks],
        released: Callable[[int], None],
        silence: float,
    ) -> None:
        super().__init__(name="d9d-ckpt courier", daemon=True)
        self._silence = silence
        self._terms, self._open_ranks, self._released = terms, ranks, released
        self._jobs: queue.SimpleQueue[Job | Refused | None] = queue.SimpleQueue()
        self._saves = 0
        self._ranks: Ranks = ranks(0)
        self._before: Ranks = OneRank()
        self._marks: list[str] = []
        self._plan: SavePlan | None = None
        self._lines: dict[bool, _Line] = {}
        self._link: Link | Inside | None = None
        self._mine: list[int] = []

    def send(self, job: Job | Refused) -> None:
        """Carry ``job`` after those before it."""
        self._jobs.put(job)

    def end(self) -> None:
        """Stop after the jobs that were sent."""
        self._jobs.put(None)

    def run(self) -> None:
        try:
            while self._carries_on():
                self._saves += 1
                self._before, self._ranks = self._ranks, self._open_ranks(self._saves)
        finally:
            for line in self._lines.values():
                line.link.close()

    def _carries_on(self) -> bool:
        """Carry one job, of which nothing is kept; whether there was one."""
        job = self._next()
        if job is None:
            return False
        if isinstance(job, Refused):
            self._refuse(job)
        else:
            self._settle(job)
        return True

    def _next(self) -> Job | Refused | None:
        while True:
            try:
                return self._jobs.get(timeout=_IDLE)
            except queue.Empty:
                self._beat()

    def _beat(self) -> None:
        try:
            self._ranks.alive()
        except Exception as error:  # noqa: BLE001 - the next save meets it again, and tells
            _LOG.debug("the store of the ranks does not answer: %s", error)

    def _refuse(self, job: Refused) -> None:
        """Let the others know; here it has been raised already."""
        told = _ours(job.error, f"rank {self._ranks.rank} takes no part in step {job.step}")
        try:
            self._ranks.gather(told)
        except Exception as error:  # noqa: BLE001 - the answer is what was told
            _LOG.debug("step %d: %s", job.step, error)

    def _settle(self, job: Job) -> None:
        try:
            job.snapshot.wait()
            self._carry(job)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._release(job)
            job.future.set_exception(_ours(error, self._place(job.step)))
        else:
            self._release(job)
            job.future.set_result(None)

    def _release(self, job: Job) -> None:
        if isinstance(job.slot, Slot):
            self._released(job.slot.number)

    def _place(self, step: int) -> str:
        return join(self._terms.url, f"step-{step:08d}")

    def _carry(self, job: Job) -> None:
        ranks = self._ranks
        save_id, plan, values = self._agreed(job)
        asked = self._asked(job, save_id, values)
        try:
            failure = None
            if ranks.rank == 0:
                failure = _failure(lambda: self._named(lambda: self._prepare(job, plan, asked)))
            ranks.broadcast(failure)
            wrote = ranks.gather(self._wrote(job, plan, asked))
            if ranks.rank == 0:
                failure = _failure(lambda: self._commit(plan, wrote))
            ranks.broadcast(failure)
        except BaseException:
            self._abort()
            raise
        if ranks.rank == 0:
            self._prune(job)

    def _agreed(self, job: Job) -> _Agreed:
        """The plan, which is made anew only when the structure of some rank has changed."""
        ranks = self._ranks
        heard = ranks.gather(
            _Ready(job.step, job.holding.mark, job.values, job.tied, job.unmatched)
        )
        # All have come here, so that all have read what was said of the save before.
        self._before.clear()
        said: _Verdict | CkptError | None = None
        values: Mapping[str, Any] = {}
        if ranks.rank == 0:
            try:
                said, values = self._verdict(heard), _joined(heard)
            except CkptError as error:
                said = error
        verdict: _Verdict = ranks.broadcast(said)
        if verdict.replan or self._plan is None:
            every: list[Holding] = ranks.broadcast(ranks.gather(job.holding))
            largest = BLOCK if self._terms.codec is not None else None
            self._plan = plan_save(every, largest=largest)
            self._marks = [rank.mark for rank in heard]
        return _Agreed(verdict.save_id, self._plan, values)

    def _verdict(self, heard: Sequence[_Ready]) -> _Verdict:
        steps = {said.step for said in heard}
        if len(steps) > 1:
            each = ", ".join(f"rank {r}: {said.step}" for r, said in enumerate(heard[:8]))
            raise RequestError(f"ranks save different steps ({each}); all must save the same")
        check_matched(said.unmatched for said in heard)
        marks = [said.mark for said in heard]
        return _Verdict(new_save_id(), replan=marks != self._marks or self._plan is None)

    def _ready(self, job: Job, plan: SavePlan) -> Link | Inside:
        """A writer that knows the plan and the slot; in this process where live tensors are written."""
        line = self._line(inside=isinstance(job.slot, Live))
        link = self._link = line.link
        if line.described is not plan:
            # Only rank 0 commits: the others need not know what 511 more of them write.
            mine = plan.of(self._ranks.rank)
            targets = (
                [plan.targets[number] for number in mine] if self._ranks.rank else plan.targets
            )
            columns = columns_of(targets) if self._terms.codec is not None else None
            link.ask(Describe(targets, plan.specs, columns), beat=self._ranks.alive)
            line.described, self._mine = plan, mine
        if isinstance(link, Link) and isinstance(job.slot, Slot):
            number, staging = job.slot
            if staging.nbytes and line.lent.get(number) != staging.nbytes:
                link.lend(number, staging, beat=self._ranks.alive)
                line.lent[number] = staging.nbytes
        return link

    def _line(self, *, inside: bool) -> _Line:
        line = self._lines.get(inside)
        if line is None or not line.link.alive:
            if line is not None:
                line.link.close()
            line = self._lines[inside] = _Line(Inside() if inside else Link.start(self._silence))
        return line

    def _asked(self, job: Job, save_id: str, values: Mapping[str, Any]) -> Prepare:
        """What the writer processes get ready for; that of rank 0 claims the place."""
        terms, ranks = self._terms, self._ranks
        manifest = Manifest(
            save_id=save_id,
            step=job.step,
            layout=terms.layout,
            family=terms.family,
            config=terms.config,
            experts="",
            entries={},
            files={},
            values=values,
            provenance={"saved_by": "trainer", "world": ranks.world},
        )
        return Prepare(
            url=self._place(job.step),
            manifest=manifest,
            coordinator=ranks.rank == 0,
            options=terms.options,
            codec=terms.codec,
            overwrite=job.overwrite,
        )

    def _wrote(self, job: Job, plan: SavePlan, asked: Prepare) -> Wrote | CkptError:
        """What this rank has written, or why it could not."""
        ranks, offsets = self._ranks, job.snapshot.offsets
        try:
            if self._terms.check_finite:
                _check_finite(job)
            link = self._link
            if ranks.rank or link is None:
                link = self._ready(job, plan)
                link.ask(asked, beat=ranks.heed)
            sources = {
                (number if ranks.rank == 0 else place): _source(plan.targets[number], job)
                for place, number in enumerate(self._mine)
            }
            compared = plan.compared(ranks.rank) if self._terms.compare_replicas else []
            hashed = [(offsets[r.name], job.tensors[r.name].local.nbytes) for r in compared]
            slot = job.slot if isinstance(job.slot, Live) else job.slot.number
            wrote = link.ask(Write(slot, sources, hashed), beat=ranks.heed)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others wait for a word
            return _ours(error, f"rank {ranks.rank}")
        if ranks.rank == 0:
            return wrote
        return replace(
            wrote,
            digests={self._mine[place]: found for place, found in wrote.digests.items()},
            extents={self._mine[place]: extent for place, extent in wrote.extents.items()},
        )

    def _prepare(self, job: Job, plan: SavePlan, asked: Prepare) -> None:
        self._ready(job, plan).ask(asked, beat=self._ranks.alive)

    def _commit(self, plan: SavePlan, wrote: Sequence[Wrote]) -> None:
        link = self._link
        if link is None:
            raise StorageError("the writer process is gone")
        # Should this rank have been stopped, the others may have given it up.
        self._ranks.heed()
        if self._terms.compare_replicas:
            _check_replicas(plan, wrote)
        digests = {n: found for rank in wrote for n, found in rank.digests.items()}
        extents: dict[int, Extent] = {n: e for rank in wrote for n, e in rank.extents.items()}
        asked = Commit(digests, extents, self._terms.small)
        done = self._named(lambda: link.ask(asked, beat=self._ranks.alive))
        if done.warning:
            _LOG.warning("%s", done.warning)

    def _named(self, step: Callable[[], T]) -> T:
        """What comes of a step that this rank takes for all; its failures bear the rank's name."""
        try:
            return step()
        except CkptError as error:
            if self._ranks.world == 1:
                raise
            raise _ours(error, f"rank {self._ranks.rank}") from None

    def _abort(self) -> None:
        link = self._link
        if link is not None and link.alive:
            error = _failure(lambda: link.ask(Abort(), timeout=_LONGEST_ABORT))
            if error is not None:
                _LOG.warning("what was written of a failed save is left behind: %s", error)

    def _prune(self, job: Job) -> None:
        """Delete old steps; the save stands whatever comes of it."""
        terms, link = self._terms, self._link
        if terms.policy is None or link is None:
            return
        asked = Prune(terms.url, terms.policy, job.step, terms.options)
        try:
            warning = link.ask(asked, beat=self._ranks.alive).warning
        except CkptError as error:
            warning = str(error)
        if warning:
            _LOG.warning("old steps are left: %s", warning)


def _failure(step: Callable[[], object]) -> CkptError | None:
    """What went wrong at a step of rank 0, for all ranks."""
    try:
        step()
    except CkptError as error:
        return error
    return None


def _ours(error: BaseException, where: str) -> CkptError:
    """An error with where it came up; those of the store through which ranks meet as one of ours.

    It is no cause of the new one: the frames of its traceback would keep the snapshot in memory.
    """
    if isinstance(error, CkptError):
        text = str(error)
        return type(error)(text if text.startswith(where) else f"{where}: {text}")
    _LOG.debug("%s", where, exc_info=error)
    return StorageError(f"{where}: {type(error).__name__}: {error}")


def _joined(heard: Sequence[_Ready]) -> dict[str, Any]:
    """The values of all ranks as one, and with them the names that stand for another tensor."""
    tied: dict[str, str] = {}
    for rank, said in enumerate(heard):
        for name, owner in said.tied.items():
            if tied.setdefault(name, owner) != owner:
                raise RequestError(
                    f"tensor {name!r} is tied to {owner!r} on rank {rank}, to {tied[name]!r} on another"
                )
    values = merge([said.values for said in heard])
    return values | {TIED: tied} if tied else values


def _source(target: Target, job: Job) -> int:
    """Where a target begins in the slot; its bytes lie together in those of the local tensor."""
    held = job.tensors[target.name]
    if held.box is None:
        raise StorageError(f"tensor {target.name!r}: nothing of it is here to be stored")
    at = 0
    for start, size in zip(target.box.within(held.box).start, held.box.shape, strict=True):
        at = at * size + start
    return job.snapshot.offsets[target.name] + at * held.spec.dtype.itemsize


def _check_replicas(plan: SavePlan, wrote: Sequence[Wrote]) -> None:
    """All holders of a box must have the same bytes."""
    hashes = [iter(rank.hashes) for rank in wrote]
    for replica in plan.replicas:
        found = {rank: next(hashes[rank]) for rank in replica.ranks}
        first = replica.ranks[0]
        other = [rank for rank, value in found.items() if value != found[first]]
        if other:
            raise CorruptError(
                f"tensor {replica.name!r}: rank {other[0]} ({to_hex(found[other[0]])}) differs from rank "
                f"{first} ({to_hex(found[first])}), though both hold {replica.box.start} to "
                f"{replica.box.stop} of it; nothing is committed. Replicas have drifted apart, or two "
                "tensors have one name"
            )


def _check_finite(job: Job) -> None:
    for name, offset in job.snapshot.offsets.items():
        local = job.tensors[name].local
        if not local.dtype.is_floating_point or local.dtype.itemsize == 1:
            continue
        if isinstance(job.slot, Slot):
            staged = torch.from_numpy(job.slot.staging.view)[offset : offset + local.nbytes]
            saved = staged.view(local.dtype)
        else:
            saved = local
        bad = int((~torch.isfinite(saved)).sum())
        if bad:
            raise CorruptError(
                f"tensor {name!r}: {bad} of {local.numel()} elements here are NaN or infinite at step "
                f"{job.step}; nothing is committed (check_finite=False saves it anyway)"
            )
