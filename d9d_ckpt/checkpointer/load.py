"""A checkpoint read into live tensors: each rank its own regions, in place, in bounded memory."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch

from d9d_ckpt.checkpointer.base import Held, Saved
from d9d_ckpt.checkpointer.once import Sharing
from d9d_ckpt.checkpointer.state import Intake, names_of, take_in, without
from d9d_ckpt.checkpointer.unpadded import clear_padding, cut
from d9d_ckpt.errors import CkptError, MappingError, RequestError, StorageError
from d9d_ckpt.formats.base import Extent, Opened
from d9d_ckpt.formats.opening import open_checkpoint
from d9d_ckpt.graph import ops
from d9d_ckpt.graph.mosaic import stored
from d9d_ckpt.graph.node import Node
from d9d_ckpt.models.family import nearest
from d9d_ckpt.models.select import Source, Wanted, select
from d9d_ckpt.plan.assign import split_queue, units
from d9d_ckpt.plan.lower import Request, lower
from d9d_ckpt.plan.plan import Plan
from d9d_ckpt.plan.schedule import limits, tasks
from d9d_ckpt.run.checkpoint import Reader
from d9d_ckpt.run.compare import difference
from d9d_ckpt.run.ranks import Ranks
from d9d_ckpt.run.stream import Streamer
from d9d_ckpt.storage.opening import store_for
from d9d_ckpt.storage.store import Options, is_local

_LOG = logging.getLogger(__name__)

TIED = "$tied"
"""Key of the manifest's values under which names that stand for another tensor are kept."""

T = TypeVar("T")

_MOST_NAMES = 100
"""Names in a message."""

_MEMORY = 256 << 20
_THREADS = 2
_IN_FLIGHT = 16
_BEAT = 1.0
"""Seconds of reading between signs of life."""


@dataclass(frozen=True)
class LoadReport:
    """What a load has done.

    Attributes:
        loaded: Names that were read.
        missing: Live tensors that the checkpoint has not, as allowed.
        unexpected: Tensors and values of the checkpoint that were ignored.
        fresh: Optimizer state that starts anew, since none was saved for it.
        cast: Tensors that were read into another dtype, as asked.
        step: Step of the checkpoint, where it has one.
        extra: Its JSON values.
        bytes_read: Bytes read by this rank.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    fresh: tuple[str, ...]
    cast: tuple[str, ...]
    step: int | None
    extra: Mapping[str, Any]
    bytes_read: int


@dataclass(frozen=True)
class Leniency:
    """What a load may pass over; everything else is an error.

    Attributes:
        allow_missing: Globs of live tensors that the checkpoint may lack.
        ignore: Globs of tensors, and of paths of values, of the checkpoint that are left out.
        cast: Whether floats may change their dtype.
    """

    allow_missing: Sequence[str] = ()
    ignore: Sequence[str] = ()
    cast: bool = False


@dataclass(frozen=True)
class Origin:
    """A checkpoint that has been opened, with its tensors under the names of training.

    Attributes:
        opened: Its metadata.
        nodes: Its tensors.
        options: Storage options.
        tied: Names that stand for another tensor.
        values: Its JSON.
    """

    opened: Opened
    nodes: Mapping[str, Node]
    options: Options
    tied: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def saved(self) -> Saved:
        """What a state must know of it."""
        specs = {name: node.spec for name, node in self.nodes.items()}
        return Saved(specs, self.values, self.tied, self.opened.step)


def find(url: str, step: int | None, options: Options, ranks: Ranks) -> Origin:
    """The checkpoint at ``url``, or a step of the run there; None for the latest whole one.

    Which one that is rank 0 says: the others might see a step that it does not see yet.

    Raises:
        SourceError: There is none, or it is incomplete or damaged.
        RequestError: A Hugging Face checkpoint of no known family.
    """
    first: Origin | CkptError | None = None
    if ranks.rank == 0:
        try:
            first = patiently(lambda: _found(url, step, options), ranks)
            for note in first.opened.notes:
                _LOG.warning("%s: %s", url, note)
        except CkptError as error:
            first = error
    place = ranks.broadcast(first.opened.url if isinstance(first, Origin) else first)

    def opened() -> Origin:
        if isinstance(first, Origin):
            return first
        return patiently(lambda: _found(str(place), None, options), ranks)

    return everywhere(ranks, opened)


def _found(url: str, step: int | None, options: Options) -> Origin:
    store = store_for(url, options)
    try:
        opened = open_checkpoint(store, url, step)
    finally:
        store.close()
    entries = opened.catalogue.entries
    nodes: Mapping[str, Node] = {name: stored(name, entry) for name, entry in entries.items()}
    if opened.format != "sharded":
        reader = Reader(opened.url, options)

        def same(a: Node, b: Node) -> float | None:
            found = difference("", (a, b), (reader, reader))
            return found.max_abs if found else None

        source = Source(opened.format, nodes, opened.config, opened.family, opened.experts)
        nodes = select(source, Wanted("sharded"), same).mapped.nodes
    values = dict(opened.values)
    tied = values.pop(TIED, {})
    return Origin(opened, nodes, options, tied, values)


def load(
    state: Mapping[str, Any],
    origin: Origin,
    lenient: Leniency,
    unpadded: Mapping[str, int],
    ranks: Ranks,
    sharing: Sharing | None = None,
) -> LoadReport:
    """Fill ``state`` from a checkpoint; rows that ``unpadded`` cuts off become zeros.

    Every rank calls it, and what fails on one is raised on all. With ``sharing``, what several ranks hold
    is read by one of them.

    Raises:
        MappingError: Tensors are missing, unexpected, or of another shape or dtype; nothing has been
            changed then.
        SourceError: The checkpoint is damaged; what has been filled so far stays.
    """
    saved = origin.saved
    ignored = everywhere(ranks, lambda: _covered(names_of(saved), lenient.ignore, "ignore"))
    intake = everywhere(ranks, lambda: take_in(state, without(saved, ignored)))
    missing, unexpected = _over_ranks(intake, ranks)

    def checked() -> tuple[str, ...]:
        _check_names(missing, unexpected, lenient)
        return _check_specs(cut(intake.tensors, unpadded), origin, lenient)

    cast = everywhere(ranks, checked)
    wanted = cut(intake.tensors, unpadded)
    mine = wanted if sharing is None else everywhere(ranks, lambda: sharing.agree(wanted, ranks))
    read = everywhere(ranks, lambda: _filled(mine, origin, ranks))
    if sharing is not None:
        sharing.spread(wanted)
    everywhere(ranks, lambda: _finished(intake, wanted))
    return LoadReport(
        loaded=tuple(intake.tensors),
        missing=missing,
        unexpected=tuple(ignored),
        fresh=intake.fresh,
        cast=cast,
        step=origin.opened.step,
        extra=intake.extra,
        bytes_read=read,
    )


def everywhere(ranks: Ranks, step: Callable[[], T]) -> T:
    """The result of ``step`` here, once it has come to one on every rank."""
    try:
        value = step()
    except Exception as error:
        ranks.gather(_told(error, ranks))
        raise
    ranks.gather(None)
    return value


def patiently(step: Callable[[], T], ranks: Ranks) -> T:
    """The result of ``step``, with signs of life while it takes its time."""
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(step)
        while not wait([result], _BEAT).done:
            ranks.alive()
        return result.result()


def _told(error: Exception, ranks: Ranks) -> Exception:
    """What the others hear of an error; alone, it is the error itself."""
    if ranks.world == 1:
        return error
    if isinstance(error, CkptError):
        return type(error)(f"rank {ranks.rank}: {error}")
    return StorageError(f"rank {ranks.rank}: {type(error).__name__}: {error}")


def _over_ranks(intake: Intake, ranks: Ranks) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names that some rank misses, and tensors of the checkpoint that no rank has a place for."""
    heard = ranks.gather((intake.missing, intake.unexpected))
    found: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    if heard:
        missing = dict.fromkeys(name for names, _ in heard for name in names)
        nowhere = set(heard[0][1]).intersection(*(names for _, names in heard[1:]))
        found = tuple(missing), tuple(name for name in heard[0][1] if name in nowhere)
    told: tuple[tuple[str, ...], tuple[str, ...]] = ranks.broadcast(found)
    return told


def _filled(wanted: Mapping[str, Held], origin: Origin, ranks: Ranks) -> int:
    nodes = {
        name: ops.cast(origin.nodes[_owner(origin, name)], held.spec.dtype)
        for name, held in wanted.items()
    }
    return fill(wanted, nodes, origin.opened.url, origin.options, ranks.alive)


def _finished(intake: Intake, wanted: Mapping[str, Held]) -> None:
    """Once every tensor is filled: padding cleared, and all that is no tensor put back."""
    for name, held in wanted.items():
        if held.spec != intake.tensors[name].spec:
            clear_padding(intake.tensors[name], held)
    intake.finish()


def fill(
    tensors: Mapping[str, Held],
    nodes: Mapping[str, Node],
    url: str,
    options: Options,
    beat: Callable[[], object],
) -> int:
    """Read every local part, and call ``beat`` every second of it; the bytes that were read."""
    wanted = [held for held in tensors.values() if held.box is not None and held.box.numel]
    requests = [
        Request(held.name, nodes[held.name], (held.box,), (0,)) for held in wanted if held.box
    ]
    plan = lower(requests)
    writer = _LiveWriter(plan, [held.local for held in wanted])
    remote = not is_local(url)
    threads = _IN_FLIGHT if remote else _THREADS
    limit = limits(_MEMORY, threads, remote=remote, encoded=plan.encoded)
    work = units(plan, small=remote)
    counts: list[int] = []

    def go(numbers: Sequence[int]) -> None:
        store = store_for(url, options)
        streamer = Streamer(plan, limit, store, writer, digests=False)
        try:
            for number in numbers:
                for task in tasks(plan, work[number], limit, exact=True):
                    streamer.run(task)
        finally:
            store.close()
            counts.append(streamer.bytes_read)

    queues = split_queue([unit.nbytes for unit in work], threads)
    with ThreadPoolExecutor(threads) as pool:
        left = {pool.submit(go, queue) for queue in queues if queue}
        while left:
            done, left = wait(left, _BEAT, FIRST_COMPLETED)
            beat()
            for future in done:
                future.result()
    writer.finish()
    return sum(counts)


class _LiveWriter:
    """Targets in live tensors: straight into contiguous ones, through one copy into any other."""

    def __init__(self, plan: Plan, locals_: Sequence[torch.Tensor]) -> None:
        self._plan, self._locals = plan, locals_
        self._lock = threading.Lock()
        self._flat: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}

    def write(self, target: int, start: int, view: memoryview) -> Extent | None:
        flat = self._bytes(target)[start : start + len(view)]
        flat.copy_(torch.frombuffer(view, dtype=torch.uint8))
        return None

    def finish(self) -> None:
        """Put what was read beside its tensor in place."""
        with torch.no_grad():
            for target, flat in self._copies.items():
                local = self._locals[target]
                local.copy_(flat.view(local.dtype).view(local.shape))
        self._copies.clear()

    def _bytes(self, target: int) -> torch.Tensor:
        with self._lock:
            flat = self._flat.get(target)
            if flat is None:
                local = self._locals[target]
                if local.is_contiguous():
                    flat = local.view(-1).view(torch.uint8)
                else:
                    flat = torch.empty(local.nbytes, dtype=torch.uint8, device=local.device)
                    self._copies[target] = flat
                self._flat[target] = flat
            return flat


def _owner(origin: Origin, name: str) -> str:
    return origin.tied.get(name, name)


def _check_names(missing: Sequence[str], unexpected: Sequence[str], lenient: Leniency) -> None:
    allowed = _covered(missing, lenient.allow_missing, "allow_missing")
    lacking = [name for name in missing if name not in allowed]
    told = []
    if lacking:
        told.append(f"{len(lacking)} names of the state are not in it: {_listed(lacking)}")
    if unexpected:
        told.append(f"{len(unexpected)} of its tensors have no place: {_listed(unexpected)}")
    if told:
        near = nearest(lacking[0], unexpected) if lacking else []
        hint = f"; is {lacking[0]!r} its {near[0]!r}?" if near else ""
        raise MappingError(
            f"checkpoint and state do not fit: {'; '.join(told)}{hint} Let names pass by allow_missing= "
            "and ignore=, or correct the state"
        )


def _covered(names: Iterable[str], globs: Sequence[str], option: str) -> dict[str, None]:
    """Names that a glob covers; a glob that covers none is a mistake.

    Raises:
        RequestError: One does.
    """
    every = list(names)
    out: dict[str, None] = {}
    for glob in globs:
        found = [name for name in every if fnmatchcase(name, glob)]
        if not found:
            raise RequestError(f"{option}={glob!r} matches no name; drop it, or correct it")
        out.update(dict.fromkeys(found))
    return out


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")


def _check_specs(tensors: Mapping[str, Held], origin: Origin, lenient: Leniency) -> tuple[str, ...]:
    """Names of tensors that are cast."""
    cast = []
    for name, held in tensors.items():
        found = origin.nodes[_owner(origin, name)].spec
        if found.shape != held.spec.shape:
            raise MappingError(
                f"tensor {name!r}: {list(found.shape)} in the checkpoint, {list(held.spec.shape)} in the "
                "state; the model was built with other sizes"
            )
        if found.dtype != held.spec.dtype:
            if not lenient.cast:
                raise MappingError(
                    f"tensor {name!r}: {found.dtype.name} in the checkpoint, {held.spec.dtype.name} in "
                    "the state; give cast=True to convert it"
                )
            if not (found.dtype.floating and held.spec.dtype.floating):
                raise MappingError(
                    f"tensor {name!r}: {found.dtype.name} in the checkpoint, {held.spec.dtype.name} in "
                    "the state; only floats are cast"
                )
            cast.append(name)
    return tuple(cast)
