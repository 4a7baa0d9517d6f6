"""Gloo ranks forked from this process: torch is imported already, so eight of them start in a third of a second."""

import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

KILLED = object()
"""Outcome of a rank that was killed."""


def launch(
    world: int,
    work: Callable[[int], Any],
    *,
    timeout: float = 60.0,
    allow: frozenset[int] = frozenset(),
) -> list[Any]:
    """What ``work(rank)`` returns on each of ``world`` ranks of one process group.

    The first exception of a rank is raised here with its traceback; ranks in ``allow`` may be killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(rank, world, work, Path(folder)) for rank in range(world)]
        deadline = time.monotonic() + timeout
        try:
            codes = {rank: _wait(pid, deadline) for rank, pid in enumerate(children)}
        finally:
            for pid in children:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except (ProcessLookupError, ChildProcessError):
                    continue
        out = []
        for rank, code in codes.items():
            path = Path(folder) / f"out{rank}"
            if not path.exists():
                if rank not in allow:
                    raise AssertionError(f"rank {rank} ended with {code} and no word")
                out.append(KILLED)
                continue
            good, value = pickle.loads(path.read_bytes())  # noqa: S301 - written by our own child
            if not good:
                raise AssertionError(f"rank {rank}: {value}")
            out.append(value)
        return out


def _wait(pid: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    raise AssertionError(f"a rank (process {pid}) is not over in time")


def _fork(rank: int, world: int, work: Callable[[int], Any], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        outcome = True, work(rank)
    except BaseException:  # noqa: BLE001 - told to the parent, which raises it
        outcome = False, traceback.format_exc()
    try:
        staged = folder / f"tmp{rank}"
        staged.write_bytes(pickle.dumps(outcome))
        staged.rename(folder / f"out{rank}")
    finally:
        os._exit(0)
