"""The writer process of one rank: ``python -m d9d_ckpt.checkpointer.writer FD``, a socket's descriptor.

It answers one message after the other. When the trainer's end of the socket closes, however that came
about, it undoes what is not committed and ends. Nothing here imports torch.
"""

import logging
import os
import queue
import signal
import socket
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait

from d9d_ckpt.checkpointer.clerk import Clerk
from d9d_ckpt.checkpointer.messages import Abort, Answer, Lend, Message, Working
from d9d_ckpt.checkpointer.staging import Lent
from d9d_ckpt.errors import StorageError
from d9d_ckpt.run.frames import pack, unpack

_LOG = logging.getLogger(__name__)

_GRACE = 0.7
"""Seconds that work which is no longer wanted gets to end by itself, and the process after it."""

_BEAT = 0.5
"""Seconds between signs of life while something is being done."""

_MOST_FDS = 4


class Writer:
    """Answers what comes in on a socket until it closes."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._queue: queue.SimpleQueue[tuple[int, Message[object]] | None] = queue.SimpleQueue()
        self._received: list[int] = []
        self._clerk = Clerk()
        self._ended = threading.Event()

    def run(self) -> None:
        """Everything until the end."""
        threading.Thread(target=self._listen, daemon=True).start()
        with ThreadPoolExecutor(1) as pool:
            while (item := self._queue.get()) is not None:
                number, message = item
                answer = pool.submit(self._answer, message)
                try:
                    self._say_when_done(number, answer)
                except OSError:
                    # The trainer is gone; what it still asked for comes to nothing.
                    self._clerk.leave()
        self._clerk.undo()
        self._ended.set()

    def _say_when_done(self, number: int, answer: "Future[object]") -> None:
        while not wait([answer], _BEAT).done:
            self._say(Answer(number, Working()))
        self._say(Answer(number, answer.result()))

    def _answer(self, message: Message[object]) -> object:
        if not isinstance(message, Lend):
            return self._clerk.answer(message)
        try:
            self._clerk.lend(message.slot, Lent.map(self._received.pop(0), message.nbytes))
        except (OSError, ValueError) as error:
            return StorageError(f"slot {message.slot} of {message.nbytes} bytes: {error}")
        return None

    def _listen(self) -> None:
        """Take messages; when there are no more, see to it that the process ends soon."""
        try:
            self._receive()
        except ConnectionError as error:
            _LOG.debug("the trainer is gone: %s", error)
        finally:
            self._clerk.leave()
            self._queue.put(None)
        if not self._ended.wait(_GRACE):
            try:
                # A commit that has begun is carried through; anything else may hang for long.
                self._clerk.undo()
            finally:
                if not self._ended.wait(_GRACE):
                    os._exit(1)

    def _receive(self) -> None:
        received = bytearray()
        while True:
            data, fds, _, _ = socket.recv_fds(self._end, 1 << 20, _MOST_FDS)
            self._received += fds
            if not data:
                return
            received += data
            for number, message in unpack(received):
                if isinstance(message, Abort):
                    self._clerk.give_up()
                self._queue.put((number, message))

    def _say(self, answer: Answer) -> None:
        self._end.sendall(pack(answer))


def _end_at_sigterm(end: socket.socket) -> None:
    """As if the trainer had closed its end, however long a system call of another thread takes."""
    signal.sigwait({signal.SIGTERM})
    end.shutdown(socket.SHUT_RD)


def main() -> None:
    """Run until the socket whose descriptor is the first argument closes."""
    # What ends the trainer ends this process by way of the socket.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Of this thread and those that it starts: one of them waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    end = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_at_sigterm, args=(end,), daemon=True).start()
    Writer(end).run()


if __name__ == "__main__":
    main()
