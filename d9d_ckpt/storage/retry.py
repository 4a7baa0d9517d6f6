"""Trying again: what may pass by itself, after growing pauses of random length, within a budget."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from d9d_ckpt.errors import StorageError

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """How long a request may take and how often it is tried.

    Attributes:
        tries: Attempts in all.
        seconds: From the first attempt on; no attempt starts later.
        first_pause: Upper bound of the first pause, which doubles each time.
        longest_pause: Upper bound of any pause.
        attempt: Seconds of one attempt without an answer.
    """

    tries: int = 8
    seconds: float = 120.0
    first_pause: float = 0.1
    longest_pause: float = 10.0
    attempt: float = 60.0


PATIENCE = Patience()


async def persist(
    what: str,
    attempt: Callable[[], Awaitable[T]],
    passing: Callable[[BaseException], bool],
    patience: Patience = PATIENCE,
) -> T:
    """The result of ``attempt``, tried again while its error is one that may pass.

    Args:
        what: Operation and URL, for the message.
        attempt: One try.
        passing: Whether an error may pass by itself: server faults and broken connections may,
            refusals do not.
        patience: The limits.

    Raises:
        StorageError: The tries or the time are used up; the message has their number and the last
            error. Errors that do not pass come out as they are.
    """
    started = time.monotonic()
    pause = patience.first_pause
    for number in range(1, patience.tries + 1):
        try:
            return await asyncio.wait_for(attempt(), patience.attempt)
        except Exception as error:
            if not (isinstance(error, TimeoutError) or passing(error)):
                raise
            spent = time.monotonic() - started
            if number == patience.tries or spent + pause > patience.seconds:
                reason = str(error) or f"no answer within {patience.attempt:.0f} s"
                raise StorageError(
                    f"{what}: gave up after {number} tries in {spent:.1f} s: {reason}"
                ) from error
        # Full jitter: many workers that were refused together must not come back together.
        await asyncio.sleep(random.uniform(0, pause))
        pause = min(2 * pause, patience.longest_pause)
    raise StorageError(f"{what}: not tried")
