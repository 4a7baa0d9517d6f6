"""Work in a forked process group of its own, with a deadline that nothing in it can miss."""

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from d9d_ckpt.errors import CkptError

SECONDS = 30.0
"""What takes longer is hung."""

_PAUSE = 0.002
_LAST_WORDS = 0.3
"""Seconds for a hung process to print where it stands."""

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Ended:
    """How it went.

    Attributes:
        how: ``done``, ``refused`` (a CkptError), ``crashed``, ``killed``, ``hung``, or ``littered``
            where work that judges itself has found what it should have removed.
        text: The message, or the traceback of a crash.
        value: What was returned.
        seconds: Until the last process of the group was gone.
    """

    how: str
    text: str = ""
    value: Any = None
    seconds: float = 0.0


class Verdict(Exception):  # noqa: N818 - no error of what is run, but what it finds about itself
    """Work that has looked at its own processes says how it went.

    Attributes:
        how: ``crashed``, ``hung``, or ``littered`` where it has left something behind.
    """

    def __init__(self, how: str, text: str) -> None:
        super().__init__(text)
        self.how = how


def adopt() -> None:
    """Become the parent of orphaned grandchildren, so that a group is known to be gone."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(work: Callable[[], Any], seconds: float = SECONDS) -> Ended:
    """``work`` in a child; it ends when every process of the child's group has."""
    started = time.monotonic()
    reader, writer = os.pipe()
    # What it prints, and where it stands when it hangs.
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the reader below
    pid = os.fork()
    if not pid:
        os.close(reader)
        _child(work, writer, errors)
    # Whichever of the two comes first: the group must be there before anybody asks for it.
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    os.close(writer)
    os.set_blocking(reader, False)
    said = bytearray()
    hung = False
    try:
        while _alive(pid):
            said += _drained(reader)
            time.sleep(_PAUSE)
            if time.monotonic() - started > seconds and not hung:
                hung = True
                _kill(pid, signal.SIGUSR2)
                time.sleep(_LAST_WORDS)
                _kill(pid, signal.SIGKILL)
        said += _drained(reader)
        errors.seek(0)
        printed = errors.read().decode(errors="replace")
    finally:
        os.close(reader)
        errors.close()
    spent = time.monotonic() - started
    if hung:
        return Ended("hung", f"not over after {seconds:.0f} s\n{printed}", seconds=spent)
    try:
        how, text, value = pickle.loads(bytes(said))  # noqa: S301 - of our own child
    except (EOFError, pickle.UnpicklingError):
        return Ended("killed", printed, seconds=spent)
    return Ended(how, text, value, spent)


def _child(work: Callable[[], Any], writer: int, errors: IO[bytes]) -> None:
    try:
        os.setpgid(0, 0)
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
        said = pickle.dumps(_tried(work))
        while said:
            said = said[os.write(writer, said) :]
    finally:
        os._exit(0)


def _tried(work: Callable[[], Any]) -> tuple[str, str, Any]:
    try:
        return "done", "", work()
    except CkptError as error:
        return "refused", f"{type(error).__name__}: {error}", None
    except Verdict as verdict:
        return verdict.how, str(verdict), None
    except BaseException:  # noqa: BLE001 - whatever it is, the drill reports it
        return "crashed", traceback.format_exc(), None


def _alive(leader: int) -> bool:
    """Whether the group has members left; those that ended are reaped."""
    try:
        while os.waitpid(-leader, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _kill(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def _drained(reader: int) -> bytes:
    try:
        return os.read(reader, 1 << 20)
    except BlockingIOError:
        return b""
