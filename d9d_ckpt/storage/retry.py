"""Trying again: what may pass by itself, after growing pauses of random length, within a budget."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from d9d_ckpt.errors import StorageError

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """How long nothing may happen and how often a request is tried.

    Attributes:
        tries: Attempts in all.
        seconds: From the first attempt on; no attempt starts later. An attempt counts for no more
            than ``stall``: one that took longer was getting somewhere.
        first_pause: Upper bound of the first pause, which doubles each time.
        longest_pause: Upper bound of any pause.
        stall: Seconds without a byte after which an attempt is broken off. One that goes on moving
            bytes may take as long as it needs.
    """

    tries: int = 8
    seconds: float = 120.0
    first_pause: float = 0.1
    longest_pause: float = 10.0
    stall: float = 60.0


PATIENCE = Patience()


def persist(
    what: str,
    attempt: Callable[[], T],
    passing: Callable[[BaseException], bool],
    patience: Patience = PATIENCE,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """The result of ``attempt``, tried again while its error is one that may pass.

    Args:
        what: Operation and URL, for the message.
        attempt: One try, which ends by itself when nothing has moved for ``patience.stall``.
        passing: Whether an error may pass by itself: server faults and broken connections may,
            refusals do not.
        patience: The limits.
        sleep: How pauses are made.

    Raises:
        StorageError: The tries or the time are used up; the message has their number and the last
            error. Errors that do not pass come out as they are.
    """
    began = time.monotonic()
    spent = 0.0
    pause = patience.first_pause
    for number in range(1, patience.tries + 1):
        started = time.monotonic()
        try:
            return attempt()
        except Exception as error:
            if not passing(error):
                raise
            spent += min(time.monotonic() - started, patience.stall)
            if number == patience.tries or spent + pause > patience.seconds:
                took = time.monotonic() - began
                raise StorageError(
                    f"{what}: gave up after {number} tries in {took:.1f} s: {error}"
                ) from error
        # Full jitter: many workers that were refused together must not come back together.
        wait = random.uniform(0, pause)
        sleep(wait)
        spent += wait
        pause = min(2 * pause, patience.longest_pause)
    raise StorageError(f"{what}: not tried")
