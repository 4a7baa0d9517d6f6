"""The process group of a run, from the variables that torchrun sets or of one process, and its end by a signal."""

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

_PrefixStore: Any = dist.distributed_c10d.PrefixStore

_RUNS = itertools.count()
"""Every rank begins the same runs in the same order: what a signal said to one no other hears."""

_TIMEOUT = timedelta(minutes=10)
"""A collective that takes longer has lost a rank."""


@contextmanager
def started(*, deterministic: bool) -> Iterator[str]:
    """The process group and this rank's device; gives the device type.

    Args:
        deterministic: Let torch choose only kernels whose result does not change from run to run.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if deterministic:
        # Read by cuBLAS when it makes its first handle.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    own = not dist.is_initialized()
    if own:
        _join(device)
    try:
        yield device
    finally:
        torch.use_deterministic_algorithms(before)
        if own:
            dist.destroy_process_group()


def _join(device: str) -> None:
    # Objects and counts go over gloo, also where tensors go over NCCL.
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=_TIMEOUT)


class Stopping:
    """Lets a signal, to whichever rank, end a run after the same step on all of them.

    As a context, it takes the signal's handler. The ranks meet in the key-value store of the process
    group: no collective, and nothing for a GPU to wait for.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        """No signal is awaited before the context is entered."""
        self._number, self._came = number, False
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public way to it
        self._store = _PrefixStore(f"d9d_train/stopping/{next(_RUNS)}", store)
        self._before: Any = None

    def at(self, done: int) -> bool:
        """Whether the run ends now; every rank asks after each step.

        Ranks are less than a step apart, since each needs the others' gradients. So the step after the
        one that a signalled rank has done is one that no rank has asked about.

        Args:
            done: Steps done.
        """
        if self._came:
            self._store.compare_set("last", "", str(done + 1))
        return bool(self._store.check(["last"])) and done >= int(self._store.get("last"))

    def __enter__(self) -> Self:
        self._before = signal.signal(self._number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # None stands for a handler that Python did not set.
        signal.signal(self._number, self._before or signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
