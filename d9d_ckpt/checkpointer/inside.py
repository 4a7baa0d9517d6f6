"""A writer in the trainer's own process: for saves that the trainer waits for, from its live tensors."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, TypeVar, cast

from d9d_ckpt.checkpointer.clerk import Clerk
from d9d_ckpt.checkpointer.messages import Abort, Message
from d9d_ckpt.errors import CkptError, StorageError

A = TypeVar("A")

_BEAT = 0.5
"""Seconds between looks at what else there is while an answer is awaited."""


def _nothing() -> None:
    """What is done while waiting unless something else is asked for."""


class Inside:
    """Asked as `Link` is; what is written needs no copy, nor the memory of one."""

    def __init__(self) -> None:
        self._clerk = Clerk()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="d9d-ckpt writer")
        self.alive = True

    def ask(
        self,
        message: Message[A],
        beat: Callable[[], object] = _nothing,
        timeout: float | None = None,
    ) -> A:
        """The answer to ``message``.

        Args:
            message: What is asked.
            beat: Called about every half second of waiting. When it raises, what is being done is
                broken off by `Abort`.
            timeout: Seconds after which no answer is awaited any more; None for no limit.

        Raises:
            CkptError: What could not be done.
            StorageError: It is not done in time.
        """
        if isinstance(message, Abort):
            self._clerk.give_up()
        asked: Message[Any] = message
        answer = self._pool.submit(self._clerk.answer, asked)
        began = monotonic()
        while True:
            try:
                value = answer.result(_BEAT)
            except TimeoutError:
                beat()
                if timeout is not None and monotonic() - began > timeout:
                    what = type(message).__name__.lower()
                    raise StorageError(f"no end of {what} after {timeout:g} s") from None
            else:
                break
        if isinstance(value, CkptError):
            try:
                raise value
            finally:
                # Its traceback holds this frame, which must not hold it: what it saw is freed at once.
                del value
        return cast("A", value)

    def close(self) -> None:
        """Undo what is not committed."""
        self.alive = False
        self._clerk.leave()
        self._pool.shutdown()
        self._clerk.undo()
