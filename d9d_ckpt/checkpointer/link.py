"""The trainer's end of its writer process: started, asked, and ended."""

import logging
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar, cast

from d9d_ckpt.checkpointer.messages import Answer, Lend, Message, Working
from d9d_ckpt.checkpointer.staging import Staging
from d9d_ckpt.errors import CkptError, StorageError
from d9d_ckpt.run.frames import pack, unpack

_LOG = logging.getLogger(__name__)

A = TypeVar("A")
T = TypeVar("T")

_BEAT = 0.5
"""Seconds between looks at what else there is while an answer is awaited."""

_SILENCE = 300.0
"""Seconds without a sign of life after which a process is given up."""

_DYING = 5.0
"""Seconds that a process which takes no more messages gets to end by itself."""


def _nothing() -> None:
    """What is done while waiting unless something else is asked for."""


class Link:
    """A running writer process; one thread at a time asks it."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", end: socket.socket, silence: float = _SILENCE
    ) -> None:
        self._process, self._end, self._silence = process, end, silence
        self._number = self._silent = 0
        self._received = bytearray()
        _LINKS.add(self)

    @classmethod
    def start(cls, silence: float = _SILENCE) -> "Link":
        """Start a writer process; it is up a third of a second later.

        It has a process group of its own: what the keyboard sends to the trainer is the trainer's
        to answer.

        Args:
            silence: Seconds without a sign of life, while it is asked something, after which it is
                killed. It gives one twice a second however long its work takes.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            try:
                process = subprocess.Popen(  # noqa: S603 - this interpreter, our own module
                    [sys.executable, "-P", "-m", "d9d_ckpt.checkpointer.writer", str(number)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(number,),
                    process_group=0,
                    env=os.environ | {"PYTHONPATH": _path()},
                )
            except OSError as error:
                ours.close()
                raise StorageError(f"the writer process cannot be started: {error}") from error
        ours.settimeout(_BEAT)
        return cls(process, ours, silence)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can still be asked; another one must be started when it cannot."""
        return self._end.fileno() >= 0 and self._process.poll() is None

    def lend(self, slot: int, staging: Staging, beat: Callable[[], object] = _nothing) -> None:
        """Let the process read a slot under a number; needed anew once the slot has grown."""
        self.ask(Lend(slot, staging.nbytes), fds=(staging.fd,), beat=beat)

    def ask(
        self,
        message: Message[A],
        fds: Sequence[int] = (),
        beat: Callable[[], object] = _nothing,
        timeout: float | None = None,
    ) -> A:
        """The answer to ``message``.

        Args:
            message: What is asked.
            fds: Descriptors that go with it.
            beat: Called about every half second of waiting. When it raises, the process can still
                be asked: what it is doing is broken off by `Abort`.
            timeout: Seconds after which the process is given up and killed; None for no limit.

        Raises:
            CkptError: What the process could not do.
            StorageError: It has died, has not answered in time, or shows no sign of life.
        """
        what = type(message).__name__.lower()
        if self._end.fileno() < 0:
            raise StorageError(f"writer process {self.pid} has ended; {what} needs a new one")
        began, self._silent = time.monotonic(), 0

        def pause() -> None:
            beat()
            if self._process.poll() is not None:
                raise self._lost(what)
            if timeout is not None and time.monotonic() - began > timeout:
                raise self._given_up(f"has not answered for {timeout:g} s during {what}")
            # Counted, not by the clock: a trainer that was stopped has heard nothing meanwhile.
            self._silent += 1
            if self._silent * _BEAT > self._silence:
                raise self._given_up(
                    f"has shown no sign of life for {self._silence:g} s during {what}"
                )

        self._number += 1
        self._send(pack((self._number, message)), fds, what, pause)
        while True:
            for answer in unpack(self._received):
                # Of a message whose waiting was broken off, the answer comes late.
                if answer.number != self._number:
                    continue
                if not isinstance(answer.value, Working):
                    return cast("A", _value(answer))
                pause()
            data = self._patiently(lambda: self._end.recv(1 << 20), what, pause)
            if not data:
                raise self._lost(what)
            self._silent = 0
            self._received += data

    def close(self, timeout: float = 10.0) -> None:
        """End the process: it undoes what is not committed, and is killed after ``timeout`` seconds."""
        self._end.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            _LOG.warning("writer process %d was killed: busy %g s after its end", self.pid, timeout)
            self._process.kill()
            self._process.wait()

    def let_go(self) -> None:
        """Close this end alone."""
        self._end.close()

    def _send(self, frame: bytes, fds: Sequence[int], what: str, pause: Callable[[], None]) -> None:
        left = memoryview(frame)
        sent = self._patiently(lambda: socket.send_fds(self._end, [left], fds), what, pause)
        while left := left[sent:]:
            sent = self._patiently(lambda: self._end.send(left), what, pause)

    def _patiently(self, step: Callable[[], T], what: str, pause: Callable[[], None]) -> T:
        """The result of ``step`` once the socket is ready for it."""
        while True:
            try:
                return step()
            except TimeoutError:
                pause()
            except OSError as error:
                raise self._lost(what) from error

    def _given_up(self, why: str) -> StorageError:
        self._process.kill()
        self._reap()
        return StorageError(
            f"writer process {self.pid} {why}, and was killed; is it stopped, or its storage gone?"
        )

    def _lost(self, what: str) -> StorageError:
        self._reap()
        code = self._process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return StorageError(f"writer process {self.pid} died ({how}) during {what}")

    def _reap(self) -> None:
        """Take note of its end, which makes its claims those of a process that is gone."""
        self._end.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_DYING)
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()


def _value(answer: Answer) -> object:
    if isinstance(answer.value, CkptError):
        raise answer.value
    return answer.value


def _path() -> str:
    """Where this process finds modules, for one that does not look at its working directory."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


_LINKS: "weakref.WeakSet[Link]" = weakref.WeakSet()


def _let_go() -> None:
    """A forked process must not keep the writers of its parent waiting for a trainer that is gone."""
    for link in list(_LINKS):
        link.let_go()


os.register_at_fork(after_in_child=_let_go)
