"""Saves of a trainer: from its own process, and beside it from a writer that is forked, not executed.

Only a forked process has the faults of the one that drills it.
"""

import os
import signal
import socket
import time
from collections.abc import Mapping
from functools import partial
from subprocess import TimeoutExpired
from typing import Any
from unittest.mock import patch

import torch

import d9d_ckpt
from d9d_ckpt.checkpointer.link import Link
from d9d_ckpt.checkpointer.writer import Writer
from drill.scenes import STEP_FOUR, Operation, Spot, Trees

_PAUSE = 0.002

Tensors = Mapping[str, torch.Tensor]


def operations(trees: Trees) -> tuple[Operation, ...]:
    """The third step of a run anew, and a fourth of one that keeps two, from this process and beside it.

    Retention is drilled on the disk alone: where listings are late it leaves steps for the next save.
    """
    new, old = (tensors_of(trees, name) for name in ("sharded", "old sharded"))
    third = (
        Spot("step-00000001", ("sharded",), must=True, end="sharded"),
        Spot("step-00000002", ("old sharded",), must=True, end="old sharded"),
        Spot("step-00000003", ("sharded", "old sharded"), must=True, end="old sharded"),
    )
    saving, beside = partial(_save, new, 4), partial(_save, new, 4, blocking=False)
    over = partial(_save, old, 3)
    return (
        Operation("save", saving, "sharded", "run", STEP_FOUR, {"keep_last": 2}, disk=True),
        Operation("save beside", beside, "sharded", "run", STEP_FOUR, {"keep_last": 2}, disk=True),
        Operation("save over a step", over, "sharded", "run", third),
    )


def tensors_of(trees: Trees, name: str) -> Tensors:
    """The tensors of one of the drill's checkpoints."""
    found = d9d_ckpt.open(str(trees.path(name)))
    return {tensor: found[tensor].read() for tensor in found.tensors}


def _save(
    tensors: Tensors,
    step: int,
    source: str,
    destination: str,
    *,
    blocking: bool = True,
    **settings: Any,
) -> None:
    """One save; a trainer that comes to a step again replaces what it finds there."""
    del source
    with (
        patch.object(Link, "start", started),
        d9d_ckpt.Checkpointer(destination, **settings) as saver,
    ):
        saver.save(step, {"model": tensors}, blocking=blocking, overwrite=True).wait()


class Forked:
    """A forked writer, as far as a link asks a process anything."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code once it has one."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            TimeoutExpired: It is not over in time.
        """
        began = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - began > timeout:
                raise TimeoutExpired("writer", timeout)
            time.sleep(_PAUSE)
        return code

    def kill(self) -> None:
        """End it."""
        os.kill(self.pid, signal.SIGKILL)


def started(silence: float) -> Link:
    """In place of `Link.start`."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        try:
            ours.close()
            Writer(theirs).run()
        finally:
            os._exit(0)
    theirs.close()
    ours.settimeout(0.5)
    process: Any = Forked(pid)
    return Link(process, ours, silence)
