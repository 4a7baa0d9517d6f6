"""How many requests a server is asked at once: halved when it is busy, one more after each round that it answers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST = 64
"""Requests in flight at most, from the start."""


class Throttle:
    """Turns at a server, shared by all threads that ask it."""

    def __init__(self, most: int = MOST) -> None:
        self._most, self._allowed = most, float(most)
        self._running = 0
        self._cuts = 0
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, is_busy: Callable[[BaseException], bool]) -> Iterator[None]:
        """Wait for a turn and take it; an error that ``is_busy`` says the server has too much to do."""
        with self._changed:
            while self._running >= int(self._allowed):
                self._changed.wait()
            self._running += 1
            cuts = self._cuts
        busy = False
        try:
            yield
        except BaseException as error:
            busy = is_busy(error)
            raise
        else:
            self._grow()
        finally:
            self._leave(cuts, busy=busy)

    def _grow(self) -> None:
        with self._changed:
            self._allowed = min(float(self._most), self._allowed + 1 / self._allowed)

    def _leave(self, cuts: int, *, busy: bool) -> None:
        with self._changed:
            # Those that were under way together are refused together: that is one refusal.
            if busy and cuts == self._cuts:
                self._allowed = max(1.0, min(self._allowed, self._running) / 2)
                self._cuts += 1
            self._running -= 1
            self._changed.notify_all()
