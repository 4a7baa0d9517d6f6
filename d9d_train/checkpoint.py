"""The trainer's door to the checkpoint engine: where a run starts, what of it is saved, its export."""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

import d9d_ckpt
import d9d_kernels
from d9d_ckpt.api import list_steps
from d9d_ckpt.checkpointer.cursor import DataCursor
from d9d_ckpt.errors import CkptError, DestinationError, MissingError, RequestError
from d9d_ckpt.formats.steps import Run, StepState
from d9d_ckpt.run.claim import occupied
from d9d_ckpt.run.retention import erase
from d9d_ckpt.storage.opening import normalise, store_for
from d9d_ckpt.storage.store import join
from d9d_train.config import CheckpointConfig, Config, changes

_LOG = logging.getLogger(__name__)

_SECRET = "storage_options"  # noqa: S105 - the name of what may hold one
"""Keys of a config that go nowhere: access to a store, whatever its name says."""

T = TypeVar("T")


def code_hash() -> str:
    """A hash of the sources that decide what a step computes."""
    digest = hashlib.blake2b(digest_size=16)
    for module in (__file__, d9d_kernels.__file__):
        root = Path(str(module)).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root.parent)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def described(config: Config) -> dict[str, Any]:
    """A config as others may see it: in checkpoints, beside metrics."""
    return _without_secrets(config.to_json())


def _without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_secrets(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key != _SECRET
    }


@dataclass(frozen=True)
class Start:
    """Where a run goes on.

    Attributes:
        config: Its config, with what its first start has decided.
        code: Hash of the code, as rank 0 has read it: on the others it may change meanwhile.
        step: Steps done; None when it starts anew.
        replaced: Whole steps after that one, which the run does again.
    """

    config: Config
    code: str
    step: int | None = None
    replaced: tuple[StepState, ...] = ()


def find_start(config: Config) -> Start:
    """Where the run of a config goes on; rank 0 looks, and all ranks hear of it.

    Raises:
        RequestError: The checkpoint was written with another config.
        DestinationError: The run would be mixed with another one.
        CkptError: The step that is asked for is not there, or is damaged.
    """
    return agreed(lambda: _start(config))


def _start(config: Config) -> Start:
    want, code = config.checkpoint, code_hash()
    run = _run(want)
    step = _chosen(want, run)
    if step is None:
        return Start(config.resolved(None), code)
    options = want.storage_options or None
    saved = d9d_ckpt.open(want.url, step=step, storage_options=options).metadata["values"]
    if "config" not in saved:
        raise RequestError(f"{want.url} step {step}: was not saved by a run of this trainer")
    config = config.resolved(saved["config"])
    _check(saved, config, code, f"{want.url} step {step}")
    return Start(config, code, step, tuple(s for s in run.steps if s.complete and s.step > step))


def _run(want: CheckpointConfig) -> Run:
    """The steps at the URL; none where there is no URL."""
    empty = Run(want.url, (), ())
    if not want.url:
        return empty
    try:
        return list_steps(want.url, storage_options=want.storage_options or None)
    except MissingError:
        return empty


def _chosen(want: CheckpointConfig, run: Run) -> int | None:
    """The step to go on from."""
    whole = [s.step for s in run.steps if s.complete]
    if want.resume == "never":
        if whole:
            raise DestinationError(
                f"{want.url}: holds steps {_listed(whole)} of a run, and checkpoint.resume is never; move "
                "them away, name another checkpoint.url, or set checkpoint.resume to auto"
            )
        return None
    if want.resume == "auto":
        for broken in (s for s in run.steps if s.step > (run.latest or 0) and not s.complete):
            _LOG.warning("%s: step %d is not whole: %s", want.url, broken.step, broken.reason)
        return run.latest
    if want.resume not in whole:
        raise MissingError(
            f"checkpoint.resume: {want.url} has no whole step {want.resume}; whole are: "
            f"{_listed(whole) or 'none'}"
        )
    later = [step for step in whole if step > want.resume]
    if later:
        _LOG.warning(
            "%s: the run goes back to step %d; its steps %s are deleted before its next save",
            want.url,
            want.resume,
            _listed(later),
        )
    return want.resume


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _check(saved: Mapping[str, Any], config: Config, code: str, where: str) -> None:
    allowed = config.checkpoint.allow_changes
    found = changes(_without_secrets(saved["config"]), described(config))
    different = [
        f"{key} was {old!r}, is {new!r}" for key, (old, new) in found.items() if key not in allowed
    ]
    if different:
        raise RequestError(
            f"{where} was written with another config: {'; '.join(different)}; name a key in "
            "checkpoint.allow_changes to resume nevertheless"
        )
    if saved.get("code") != code:
        _LOG.warning("%s was written by other code of the trainer", where)


class Checkpoints:
    """The saves of one run.

    Every rank calls the same methods in the same order.
    """

    def __init__(self, start: Start, saver: d9d_ckpt.Checkpointer) -> None:
        """Nothing is read or written yet.

        Args:
            start: Of the run.
            saver: Saves to its ``checkpoint.url``.
        """
        self._start, self._saver = start, saver
        self._replaced = start.replaced
        self._about = {"config": described(start.config), "code": start.code}
        self._handle: d9d_ckpt.Handle | None = None
        self._waited = 0.0

    def resume(self, state: Mapping[str, Any]) -> None:
        """Fill ``state`` from the checkpoint that the run goes on from, if there is one.

        Raises:
            CkptError: It is damaged, or does not fit.
        """
        if self._start.step is None:
            return
        allowed = self._start.config.checkpoint.allow_changes
        if any(key.startswith("data.") for key in allowed):
            state = {**state, "data": _Position(state["data"])}
        self._saver.load(state, self._start.step, cast="train.dtype" in allowed)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Start a save.

        Args:
            step: Its number.
            state: What `resume` fills.

        Raises:
            CkptError: The state cannot be saved, or an earlier save has failed.
        """
        begun = time.perf_counter()
        self._make_room()
        self._handle = self._saver.save(step, {**state, **self._about})
        self._waited += time.perf_counter() - begun

    def wait_snapshot(self) -> None:
        """Return when the state of the save under way may be written to again."""
        if self._handle is not None:
            begun = time.perf_counter()
            self._handle.wait_snapshot()
            self._handle = None
            self._waited += time.perf_counter() - begun

    def stall(self) -> float:
        """Seconds that training stood still for saves since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def poll(self) -> None:
        """Raise what has gone wrong with a save since the last look."""
        self._saver.poll()

    def wait(self) -> None:
        """Return when every save is committed.

        Raises:
            CkptError: One was not.
        """
        self._saver.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._saver.__exit__(kind, error, trace)

    def _make_room(self) -> None:
        """Delete the steps that this run does again: as the latest ones, they would be resumed from.

        Rank 0 does it before it takes part in a save, which no rank writes without it.
        """
        replaced, self._replaced = self._replaced, ()
        if dist.get_rank() or not replaced:
            return
        want = self._start.config.checkpoint
        url = normalise(want.url)
        store = store_for(url, want.storage_options)
        try:
            for state in reversed(replaced):
                if not erase(store, join(url, state.name), state):
                    raise DestinationError(
                        f"{url}: step {state.step} is claimed by another process"
                    )
        finally:
            store.close()


@dataclass(frozen=True)
class _Position:
    """A cursor in other data than it was saved in: its position alone carries over."""

    cursor: DataCursor

    def state_dict(self) -> dict[str, Any]:
        return self.cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cursor.consumed = state["consumed"]


def load_weights(url: str, tensors: Mapping[str, torch.Tensor], padded: Mapping[str, int]) -> None:
    """Fill a model from a Hugging Face or sharded checkpoint, into the dtype that it has.

    Args:
        url: The checkpoint.
        tensors: Parameters and saved buffers; buffers that the checkpoint has not stay as they are.
        padded: Rows that are stored, by glob, of tensors with more.
    """
    biases = [name for name in tensors if name.endswith(".router.bias")]
    with d9d_ckpt.Checkpointer(url, unpadded=padded) as saver:
        saver.load({"model": tensors}, url=url, cast=True, allow_missing=biases)


def check_export(config: Config) -> None:
    """Refuse, before a run begins, what could not be exported at its end; on every rank.

    Raises:
        RequestError: The model has something that its family cannot hold.
        DestinationError: Something is at the URL.
    """
    url = config.checkpoint.export
    if not url:
        return
    if config.train.balance_bias:
        raise RequestError(
            "checkpoint.export: a Hugging Face checkpoint of this family has no place for the routers' "
            "selection bias; set train.balance_bias = 0, or leave checkpoint.export out"
        )
    agreed(lambda: _check_free(url, config.checkpoint.storage_options))


def _check_free(url: str, options: Mapping[str, Any]) -> None:
    place = normalise(url)
    store = store_for(place, options)
    try:
        found = occupied(store, place)
    finally:
        store.close()
    if found:
        raise DestinationError(
            f"checkpoint.export {url}: not empty ({', '.join(found[:4])}); export to another place"
        )


def agreed(decide: Callable[[], T]) -> T:
    """What rank 0 decides, on every rank; its error as well."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [decide()]
        except CkptError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], CkptError):
        raise box[0]
    found: T = box[0]
    return found
