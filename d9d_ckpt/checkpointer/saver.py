"""`Checkpointer`: saves beside the training and resumes on any topology."""

import atexit
import itertools
import json
import logging
import os
import queue
import signal
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from d9d_ckpt.checkpointer.base import Flat
from d9d_ckpt.checkpointer.courier import Courier, Job, Refused, Slot, Terms
from d9d_ckpt.checkpointer.export import export
from d9d_ckpt.checkpointer.load import Leniency, LoadReport, everywhere, find, load, patiently
from d9d_ckpt.checkpointer.once import Sharing
from d9d_ckpt.checkpointer.share import holding
from d9d_ckpt.checkpointer.snapshot import Snapshot, Snapshots, in_place
from d9d_ckpt.checkpointer.staging import Live, Staging
from d9d_ckpt.checkpointer.state import flatten
from d9d_ckpt.checkpointer.unpadded import cut, unmatched
from d9d_ckpt.codecs.zstd import parse_codec
from d9d_ckpt.errors import CkptError, UsageError
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.run.ranks import LaunchedRanks, OneRank, Ranks
from d9d_ckpt.run.retention import Policy
from d9d_ckpt.storage.opening import normalise, store_for
from d9d_ckpt.storage.store import Options, is_local
from d9d_ckpt.tensors import parse_bytes

_LOG = logging.getLogger(__name__)

_PrefixStore: Any = dist.distributed_c10d.PrefixStore

_SLOTS = 2
"""Snapshots at once: one is written while the next is taken."""


_NUMBERS = itertools.count()
"""Every rank makes the same checkpointers in the same order: what one has said no other hears."""


class Handle:
    """One save on its way.

    Attributes:
        step: Its step.
    """

    def __init__(self, step: int, snapshot: Snapshot, future: "Future[None]") -> None:
        self.step = step
        self._snapshot, self._future = snapshot, future
        self._heard = False

    def wait(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is durable and committed.

        Raises:
            CkptError: What went wrong, on whichever rank; `Checkpointer.poll` does not repeat it.
            TimeoutError: It is not over after ``timeout`` seconds.
        """
        try:
            self._future.result(timeout)
        except CkptError:
            self._heard = True
            raise

    def settle(self) -> None:
        """Return when it is over, well or badly."""
        self._future.exception()

    def wait_snapshot(self) -> None:
        """Return when the state may be written to again; at once on CPU."""
        self._snapshot.wait()

    @property
    def done(self) -> bool:
        """Whether it is over, well or badly."""
        return self._future.done()

    @property
    def unheard(self) -> CkptError | None:
        """What went wrong with a save that is over, unless `wait` has raised it."""
        error = self._future.exception()
        return error if isinstance(error, CkptError) and not self._heard else None


class Checkpointer:
    """Saves the state of a trainer to a run directory and loads it again, on any topology.

    Every rank has one and calls the same methods with the same steps. `save` returns once the state has
    been copied (on a GPU: once the copies are enqueued); a process beside the trainer writes. What goes
    wrong there is raised on every rank by the next `save`, `wait` or `poll`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        codec: str = "none",
        compare_replicas: bool = True,
        check_finite: bool = False,
        on_error: str = "raise",
        optimizers: Sequence[torch.optim.Optimizer] = (),
        unpadded: Mapping[str, int] | None = None,
        layout: Topology | None = None,
        family: str | None = None,
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        silence: float = 300.0,
        storage_options: Options | None = None,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            url: The run directory: each step becomes ``step-NNNNNNNN`` in it.
            keep_last: How many of the newest whole steps stay after a save; None keeps all.
            keep_every: Steps divisible by it stay as well.
            codec: ``none``, ``zstd`` or ``zstd:LEVEL``.
            compare_replicas: Refuse to commit when ranks that hold the same tensor hold other bytes.
            check_finite: Refuse to commit NaN and infinity.
            on_error: ``raise``, or ``warn`` to log a failed save and train on.
            optimizers: On a GPU, their next step waits for the copies by itself.
            unpadded: Rows by glob: tensors with more rows (a padded vocabulary) are stored cut to them,
                and loaded with zeros beyond.
            layout: Topology for the manifest.
            family: Model family for the manifest, so that `d9d-ckpt reshard` and `convert` know it.
            config: The model's config.json, parsed.
            files: Files that go along, config.json and tokenizer say.
            silence: Seconds without a sign of life after which a rank counts as lost.
            storage_options: Passed to fsspec.

        Raises:
            UsageError: A codec or an error mode that there is not.
        """
        if on_error not in ("raise", "warn"):
            raise UsageError(f"on_error={on_error!r}: must be raise or warn")
        policy = None if keep_last is None else Policy(keep_last, keep_every)
        self._terms = Terms(
            url=normalise(url),
            options=storage_options or {},
            codec=parse_codec(codec),
            policy=policy,
            compare_replicas=compare_replicas,
            check_finite=check_finite,
            layout=layout or Topology(),
            family=family,
            config=config,
            small=files or {},
        )
        self._on_error, self._silence = on_error, silence
        self._optimizers, self._unpadded = optimizers, unpadded or {}
        self._snapshots, self._sharing = Snapshots(), Sharing()
        self._staging = [Staging() for _ in range(_SLOTS)]
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(_SLOTS):
            self._free.put(slot)
        self._courier: Courier | None = None
        self._pending: list[Handle] = []
        self._guards: list[Any] = []
        self._signalled = self._closed = False
        self._saves = self._loads = self._exports = 0
        self._number = next(_NUMBERS)
        drain = partial(_drain, weakref.ref(self))
        atexit.register(drain)
        self._forget = weakref.finalize(self, atexit.unregister, drain)
        self._forget.atexit = False
        self._process, self._group = os.getpid(), _group()

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        blocking: bool = False,
        overwrite: bool = False,
    ) -> Handle:
        """Save ``state`` as ``step``.

        Args:
            step: Its number; the same on every rank.
            state: A nested dict of tensors, DTensors, objects with state_dict, and JSON values.
            blocking: Return only when it is durable and committed.
            overwrite: Replace a whole checkpoint of that step.

        Raises:
            CkptError: The state cannot be saved, or an earlier save has failed.
        """
        if self._closed:
            raise UsageError("save() after close(); make another Checkpointer")
        courier = self._running()
        self._saves += 1
        try:
            self.poll()
            job = self._job(step, state, overwrite=overwrite, blocking=blocking)
        except BaseException as error:
            # The other ranks may have sent theirs, and wait for this one.
            courier.send(Refused(step, error))
            raise
        courier.send(job)
        handle = Handle(step, job.snapshot, job.future)
        self._pending.append(handle)
        if blocking:
            try:
                self.wait()
            finally:
                # The tensors may be written from where they are: they are not the caller's before.
                handle.settle()
        return handle

    def load(
        self,
        state: Mapping[str, Any],
        step: int | str = "latest",
        *,
        url: str | os.PathLike[str] | None = None,
        allow_missing: Sequence[str] = (),
        ignore: Sequence[str] = (),
        cast: bool = False,
        read: str = "each",
    ) -> LoadReport:
        """Fill ``state`` in place, each rank its own regions.

        Args:
            state: As given to `save`; live tensors are filled, JSON values are put back.
            step: A step, or ``latest`` for the highest whole one.
            url: Another run, sharded or Hugging Face checkpoint to load from.
            allow_missing: Globs of live tensors that the checkpoint may lack.
            ignore: Globs of tensors of the checkpoint that the state may lack.
            cast: Let floats change their dtype.
            read: ``each`` rank reads all it holds, or what several hold is read ``once`` and sent to the
                others through the default process group's backend.

        Raises:
            SourceError: There is no such checkpoint, or it is damaged.
            MappingError: Checkpoint and state do not fit together.
        """
        if read not in ("each", "once"):
            raise UsageError(f"read={read!r}: must be each or once")
        if isinstance(step, str) and step != "latest":
            raise UsageError(f"step={step!r}: must be a number or 'latest'")
        place = self._terms.url if url is None else normalise(url)
        self._loads += 1
        ranks = self._ranks(f"load/{self._loads}")
        everywhere(ranks, lambda: patiently(self.wait, ranks))
        wanted = None if isinstance(step, str) else step
        origin = find(place, wanted, self._terms.options, ranks)
        lenient = Leniency(allow_missing, ignore, cast)
        sharing = self._sharing if read == "once" and ranks.world > 1 else None
        return load(state, origin, lenient, self._unpadded, ranks, sharing)

    def export_hf(
        self,
        url: str | os.PathLike[str],
        state: Mapping[str, Any],
        *,
        experts: str | None = None,
        max_shard_size: str | int = "5GB",
    ) -> None:
        """Write the model of a live state as a Hugging Face directory; no rank gathers it.

        The weights go to ``<url>.d9d-export`` first, sharded as they are; then every rank writes its share
        of the files, and that is removed. Needs ``family`` and ``config``; ``files`` go along.

        Args:
            url: The directory; empty or absent.
            state: As given to `save`; only what is under ``model`` is exported.
            experts: ``split`` or ``fused``; None for the family's layout on the hub.
            max_shard_size: Bytes of a file.

        Raises:
            CkptError: What stopped it, on every rank; nothing is left then.
        """
        place, scratch = normalise(url), f"{normalise(url)}.d9d-export"
        terms = self._terms
        size = parse_bytes(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
        small = {"config.json": json.dumps(terms.config, indent=2).encode() + b"\n", **terms.small}
        self._exports += 1
        ranks = self._ranks(f"export/{self._exports}")
        try:
            with self._beside(scratch) as saver:
                saver.save(0, {"model": state["model"]}, blocking=True, overwrite=True)
            origin = find(scratch, 0, terms.options, ranks)
            export(origin, place, ranks, small, experts=experts, size=size)
        finally:
            if ranks.rank == 0:
                store = store_for(scratch, terms.options)
                store.delete(scratch)
                store.close()

    def poll(self) -> None:
        """Raise what has gone wrong in the background since the last look.

        Raises:
            CkptError: The first failure, with rank and cause.
        """
        over = [handle for handle in self._pending if handle.done]
        self._pending = [handle for handle in self._pending if not handle.done]
        failures = [handle.unheard for handle in over if handle.unheard is not None]
        if failures and self._on_error == "raise":
            raise failures[0]
        for failure in failures:
            _LOG.warning("a save has failed: %s", failure)

    def wait(self) -> None:
        """Return when every save so far is committed.

        Raises:
            CkptError: What went wrong with the first that was not.
        """
        for handle in self._pending:
            handle.settle()
        self.poll()

    def save_on_signal(self, number: int = signal.SIGTERM) -> None:
        """Let `due` say when a save is wanted because a signal came, on whichever rank."""
        signal.signal(number, self._note_signal)

    def due(self, step: int) -> bool:
        """Whether a signal asks for a save at this step; ask once a step, on every rank.

        The first rank that was signalled names the step after next, which no rank has passed: all are
        within one step of each other.
        """
        store = self._store()
        if store is None:
            return self._signalled
        if self._signalled:
            store.compare_set("stop", "", str(step + 2))
        return bool(store.check(["stop"])) and step >= int(store.get("stop"))

    def close(self) -> None:
        """Finish the saves on their way and let go of the writer process and its memory.

        A rank that waits for this one in a later save fails at once.

        Raises:
            CkptError: A save has failed that nobody has heard of yet.
        """
        self._leave("its checkpointer was closed")
        self.poll()

    def _leave(self, cause: str) -> None:
        # What a forked process does with its copy is no business of the ranks.
        if self._closed or os.getpid() != self._process:
            return
        courier, self._courier = self._courier, None
        self._closed = True
        self._forget()
        if courier is not None:
            courier.end()
            courier.join()
        self._say_farewell(cause)
        for staging in self._staging:
            self._snapshots.release(staging)
        for guard in self._guards:
            guard.remove()
        self._guards = []

    def _say_farewell(self, cause: str) -> None:
        """Let no other rank wait for this one, in what it has begun or in what would come next."""
        begun = ("load", self._loads), ("export", self._exports)
        names = [f"{what}/{number + more}" for what, number in begun for more in (0, 1)]
        try:
            for name in (f"save/{self._saves}", *names):
                self._ranks(name).leave(cause)
        except Exception as error:  # noqa: BLE001 - whoever hosts the store has left before
            _LOG.debug("the store of the ranks does not answer: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._leave(_told(error))
        try:
            self.close()
        except CkptError as failed:
            if error is None:
                raise
            _LOG.warning("a save has failed as well: %s", failed)

    def _job(self, step: int, state: Mapping[str, Any], *, overwrite: bool, blocking: bool) -> Job:
        """A snapshot of ``state``, with all that is said of it."""
        flat = self._flat(state)
        live = in_place(flat.tensors) if blocking and is_local(self._terms.url) else None
        snapshot, slot = live or self._copied(flat)
        return Job(
            step=step,
            overwrite=overwrite,
            tensors=flat.tensors,
            holding=holding(flat.tensors),
            values=flat.values,
            tied=flat.tied,
            unmatched=unmatched(flat.tensors, self._unpadded),
            snapshot=snapshot,
            slot=slot,
            future=Future(),
        )

    def _copied(self, flat: Flat) -> tuple[Snapshot, Slot | Live]:
        """A copy of all tensors in a slot of its own."""
        number = self._taken_slot()
        slot = Slot(number, self._staging[number])
        try:
            snapshot = self._snapshots.take(flat.tensors, slot.staging)
            self._guard(snapshot)
        except BaseException:
            self._free.put(number)
            raise
        return snapshot, slot

    def _beside(self, url: str) -> "Checkpointer":
        """One for another place, with nothing that belongs to the run."""
        terms = self._terms
        return Checkpointer(
            url,
            compare_replicas=terms.compare_replicas,
            check_finite=terms.check_finite,
            unpadded=self._unpadded,
            layout=terms.layout,
            family=terms.family,
            config=terms.config,
            silence=self._silence,
            storage_options=terms.options,
        )

    def _flat(self, state: Mapping[str, Any]) -> Flat:
        flat = flatten(state)
        return Flat(cut(flat.tensors, self._unpadded), flat.values, flat.tied)

    def _taken_slot(self) -> int:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            _LOG.warning(
                "both snapshots are still being written: the store is slower than the saves"
            )
        return self._free.get()

    def _guard(self, snapshot: Snapshot) -> None:
        """On a GPU, hold the next step of the optimizers back until the copies are made."""
        for guard in self._guards:
            guard.remove()
        self._guards = []
        if snapshot.events:
            for optimizer in self._optimizers:
                hook = optimizer.register_step_pre_hook(lambda *_: snapshot.guard())
                self._guards.append(hook)

    def _running(self) -> Courier:
        if self._courier is None:
            self._courier = Courier(
                self._terms,
                lambda number: self._ranks(f"save/{number}"),
                self._free.put,
                self._silence,
            )
            self._courier.start()
        return self._courier

    def _ranks(self, name: str) -> Ranks:
        """The ranks for one save or load: apart from all others, whatever became of those."""
        store = self._store()
        if store is None:
            return OneRank()
        _, rank, world = self._group
        return LaunchedRanks(_PrefixStore(name, store), rank, world, self._silence)

    def _store(self) -> Any:
        """Where the ranks meet: the key-value store of the default process group, never a collective."""
        if dist.is_initialized():
            self._group = _group()
        if self._group.world == 1:
            return None
        return _PrefixStore(f"d9d-ckpt/{self._number}/{self._terms.url}", self._group.store)

    def _note_signal(self, *_: object) -> None:
        self._signalled = True


class _Group(NamedTuple):
    """The default process group: still of use once it is destroyed, which a rank may do before it leaves."""

    store: Any
    rank: int
    world: int


def _group() -> _Group:
    if not dist.is_initialized():
        return _Group(None, 0, 1)
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name
    return _Group(store, dist.get_rank(), dist.get_world_size())


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _drain(reference: "weakref.ref[Checkpointer]") -> None:
    """At the end of the interpreter: what is on its way arrives, and the other ranks hear why."""
    saver = reference()
    if saver is None:
        return
    # What nobody has caught, and ended the process by it.
    error: BaseException | None = getattr(sys, "last_value", None)
    try:
        saver.__exit__(None if error is None else type(error), error, None)
    except CkptError as failed:
        _LOG.error("a save has failed: %s", failed)
