"""A save of several ranks, one of which meets a fault: what the others hear of it, and how soon.

Ranks are forked and meet in a file; each has a writer of its own, forked as well.
"""

import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import d9d_ckpt
from d9d_ckpt.checkpointer.link import Link
from d9d_ckpt.errors import CkptError, StorageError
from drill import children, syscalls
from drill.board import Board, Fault
from drill.saves import Tensors, started, tensors_of
from drill.scenes import STEP_FOUR, Operation, Trees

WORLD = 4
STEP = 4
SILENCE = 4.0
"""Seconds without a sign of life after which a rank or a writer is lost: enough on a busy machine."""

_STOPPED = 7.0
"""Seconds that a stopped trainer stands still."""

_TOGETHER = 2.0
"""Seconds from the first rank that hears of a fault to the last."""

_NOTICED = 3.0
"""Seconds, beyond a silence, until the first one does."""

_PAUSE = 0.005

_dist: Any = dist
"""Untyped in part."""

_CAUSES = {
    "kill trainer": "no sign of life",
    "stop trainer": "no sign of life",
    "kill writer": "died (signal 9)",
    "stop writer": "no sign of life",
    "full": "errno 28",
}
_SILENT = ("kill trainer", "stop trainer", "stop writer")

_KINDS = ("create", "write", "truncate", "fsync", "rename", "link", "mkdir", "unlink")


class Word(NamedTuple):
    """What a rank says in the end.

    Attributes:
        how: ``done``, ``refused`` or ``crashed``.
        text: Its error.
        when: By the clock that all processes have in common.
    """

    how: str
    text: str
    when: float


def operations(trees: Trees, board: Board) -> tuple[Operation, ...]:
    """The fourth step of a run that keeps two, by four ranks that hold rows of each tensor."""
    call = partial(_save, board, tensors_of(trees, "sharded"))
    settings = {"keep_last": 2}
    return (
        Operation(
            "save of four ranks", call, "sharded", "run", STEP_FOUR, settings,
            disk=True, faults=faults, share=0.05,
        ),
    )  # fmt: skip


def faults(counts: Mapping[str, int]) -> list[Fault]:
    """Each rank before its save, and every call of any writer that changes something on the disk."""
    found = [
        Fault("save", n, effect)
        for n in range(1, WORLD + 1)
        for effect in ("kill trainer", "stop trainer")
    ]
    for kind in _KINDS:
        for number in range(1, counts.get(kind, 0) + 1):
            found += [
                Fault(kind, number, effect)
                for effect in _CAUSES
                if effect != "full" or kind in syscalls.ALLOCATING
            ]
    return found


def _save(board: Board, tensors: Tensors, source: str, destination: str, **settings: Any) -> None:
    """In a process that may fork: the save, and what is wrong with what its ranks say."""
    del source
    before = _files(destination)
    words = _words(partial(_rank, board, tensors, destination, settings))
    fault = board.fault
    if board.hits and fault is not None:
        _check(words, board, fault, destination)
        if any(word.how == "refused" for word in words.values()):
            _check_left(destination, before, board, fault)
    _end(words)


def _end(words: Mapping[int, Word]) -> None:
    """As one process would end.

    Raises:
        StorageError: A rank was refused.
        Verdict: A rank has crashed.
    """
    for rank, word in words.items():
        if word.how == "crashed":
            raise children.Verdict("crashed", f"rank {rank}: {word.text}")
    for word in words.values():
        if word.how == "refused":
            raise StorageError(word.text)


def _check(words: Mapping[int, Word], board: Board, fault: Fault, destination: str) -> None:
    """What is raised on one rank is raised on all that live, at once, with rank, path and cause.

    Raises:
        Verdict: Not so.
    """
    silent = set(range(WORLD)) - set(words)
    if silent - ({board.struck} if fault.effect == "kill trainer" else set()):
        raise children.Verdict("crashed", f"ranks {silent} died without a word: {words}")
    refused = {rank: word for rank, word in words.items() if word.how == "refused"}
    # A first rank that stood still while its writer committed was given up by the others meanwhile.
    given_up = fault.effect == "stop trainer" and board.struck == 0
    if refused and len(refused) < len(words) and not given_up:
        raise children.Verdict("crashed", f"some ranks are done and others not: {words}")
    told = (f"rank {board.struck}", f"step-{STEP:08d}", destination, _CAUSES[fault.effect])
    for rank, word in refused.items():
        if any(part not in word.text for part in told):
            raise children.Verdict("crashed", f"rank {rank}: not all of {told} in: {word.text}")
    waiting = [
        word.when
        for rank, word in refused.items()
        if rank != board.struck or fault.effect != "stop trainer"
    ]
    allowed = _NOTICED + (SILENCE if fault.effect in _SILENT else 0)
    if waiting and min(waiting) - board.when > allowed:
        raise children.Verdict("hung", f"noticed {min(waiting) - board.when:.1f} s later: {words}")
    if waiting and max(waiting) - min(waiting) > _TOGETHER:
        raise children.Verdict("hung", f"{max(waiting) - min(waiting):.1f} s apart: {words}")


def _check_left(destination: str, before: set[str], board: Board, fault: Fault) -> None:
    """A save that fails leaves nothing, unless the writer is gone that has claimed the place.

    Raises:
        Verdict: Something is left, or gone.
    """
    after = _files(destination)
    is_gone = board.struck == 0 and fault.effect.endswith("writer")
    if f"step-{STEP:08d}/manifest.json" in after or is_gone:
        return
    if after != before:
        raise children.Verdict("littered", f"{sorted(after ^ before)}")


def _files(destination: str) -> set[str]:
    root = Path(destination)
    found = (Path(at, name) for at, _, names in os.walk(root) for name in names)
    return {str(path.relative_to(root)) for path in found}


# -- ranks --------------------------------------------------------------------------------------


def _rank(
    board: Board, tensors: Tensors, destination: str, settings: Mapping[str, Any], rank: int
) -> Word:
    """One rank's save."""
    board.rank = rank
    options = {**settings, "silence": SILENCE}
    state = {"model": _sharded(tensors)}
    # A rank gives no sign of life before it comes to its first save.
    dist.barrier()
    with patch.object(Link, "start", started):
        try:
            with d9d_ckpt.Checkpointer(destination, **options) as saver:
                _meet_fault(board)
                saver.save(STEP, state, overwrite=True).wait()
        except CkptError as error:
            return Word("refused", str(error), time.monotonic())
    return Word("done", "", time.monotonic())


def _meet_fault(board: Board) -> None:
    number, fault = board.count("save"), board.fault
    if fault is not None and (fault.kind, fault.number) == ("save", number):
        board.hit()
        syscalls.strike(fault.effect, os.getpid())


def _sharded(tensors: Tensors) -> dict[str, DTensor]:
    """Rows of each tensor, as torch cuts them."""
    mesh = init_device_mesh("cpu", (WORLD,))
    rank = mesh.get_local_rank()
    out = {}
    for name, whole in tensors.items():
        rows = -(-whole.shape[0] // WORLD)
        local = whole[rank * rows : (rank + 1) * rows].clone()
        out[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return out


def _words(work: Callable[[int], Word]) -> dict[int, Word]:
    """What each rank says that lives to say anything, once all of their processes are gone."""
    children.adopt()
    with tempfile.TemporaryDirectory(prefix="d9d-drill-") as name:
        folder = Path(name)
        ranks = [_fork(rank, work, folder) for rank in range(WORLD)]
        _wait_for_all(ranks)
        return {
            rank: pickle.loads((folder / f"{rank}").read_bytes())  # noqa: S301 - of our own child
            for rank in range(WORLD)
            if (folder / f"{rank}").exists()
        }


def _wait_for_all(ranks: list[int]) -> None:
    """Return when no process is left; a trainer that stands still is let go on after a while."""
    stopped: dict[int, float] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return
        if pid in ranks and os.WIFSTOPPED(status):
            stopped[pid] = time.monotonic()
        for rank, since in list(stopped.items()):
            if time.monotonic() - since > _STOPPED:
                os.kill(rank, signal.SIGCONT)
                del stopped[rank]
        if not pid:
            time.sleep(_PAUSE)


def _fork(rank: int, work: Callable[[int], Word], folder: Path) -> int:
    pid = os.fork()
    if not pid:
        _child(rank, work, folder)
    return pid


def _child(rank: int, work: Callable[[int], Word], folder: Path) -> NoReturn:
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=_dist.FileStore(str(folder / "store"), WORLD),
            rank=rank,
            world_size=WORLD,
            timeout=timedelta(seconds=children.SECONDS),
        )
        word = work(rank)
    except BaseException:  # noqa: BLE001 - told to the parent
        word = Word("crashed", traceback.format_exc(), time.monotonic())
    try:
        staged = folder / f"{rank}.tmp"
        staged.write_bytes(pickle.dumps(word))
        staged.rename(folder / f"{rank}")
    finally:
        os._exit(0)
