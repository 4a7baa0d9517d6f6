"""The processes of one run: a single one, or those of a launcher, meeting in its key-value store."""

import importlib
import itertools
import os
import pickle
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from d9d_ckpt.errors import CkptError, StorageError

_POLL = 0.05
_LEAST_POLL = 0.001
"""Seconds between looks at a key: short at first, since most rounds are over at once."""

_SILENCE = 600.0
"""Seconds without a sign of life of a rank after which it counts as lost."""

_LEFT = "d9d/left"
"""Key of why no further round comes to an end: a rank has left, or given another one up."""


class Ranks(Protocol):
    """Who takes part and how they agree; no call waits inside a timed collective."""

    rank: int
    world: int

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank; or rank 0's error."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on rank 0 (empty elsewhere); any rank's error, on every rank."""
        ...

    def alive(self) -> None:
        """Tell the others that this rank is still at work."""
        ...

    def heed(self) -> None:
        """The same, and raise what has failed on another rank that has come to the next `gather`."""
        ...

    def leave(self, cause: str) -> None:
        """Tell the others that this rank comes to no further round: theirs fail at once."""
        ...

    def clear(self) -> None:
        """Drop what was said, once every rank is known to be past it."""
        ...


class OneRank:
    """A run of one process and its local workers."""

    rank = 0
    world = 1

    def broadcast(self, value: Any) -> Any:
        if isinstance(value, CkptError):
            raise value
        return value

    def gather(self, value: Any) -> list[Any]:
        return [self.broadcast(value)]

    def alive(self) -> None:
        """Nobody waits."""

    def heed(self) -> None:
        """Nobody else fails."""

    def leave(self, cause: str) -> None:
        """Nobody stays behind."""

    def clear(self) -> None:
        """Nothing was written down."""


class LaunchedRanks:
    """The ranks that torchrun, or any launcher that sets its variables, has started.

    Values travel through the rendezvous store and waiting is polling, so that a rank may take as
    long as its I/O needs; a failure reaches everybody with its text within one poll.
    """

    def __init__(self, store: Any, rank: int, world: int, silence: float = _SILENCE) -> None:
        self.rank, self.world = rank, world
        self._store, self._silence, self._round, self._beat = store, silence, 0, 0
        self._read: list[str] = []

    def broadcast(self, value: Any) -> Any:
        self._round += 1
        key = f"d9d/{self._round}/value"
        if self.rank == 0:
            self._read.append(key)
            self._store.set(key, pickle.dumps(value))
        else:
            value = self._from_first(key)
        if isinstance(value, CkptError):
            raise value
        return value

    def gather(self, value: Any) -> list[Any]:
        self._round += 1
        prefix = f"d9d/{self._round}"
        if isinstance(value, CkptError):
            # Others may be at work for long, and rank 0 wait for one of them.
            self._store.set(f"{prefix}/failed", pickle.dumps(value))
        self._store.set(f"{prefix}/{self.rank}", pickle.dumps(value))
        if self.rank:
            outcome = self._from_first(f"{prefix}/outcome")
            if outcome is not None:
                raise outcome
            return []
        values = [value]
        failure = value if isinstance(value, CkptError) else None
        watch = _Watch(self._store, range(1, self.world), self._silence)
        for rank in range(1, self.world):
            if failure is None:
                values.append(self._heard(prefix, rank, watch))
                failure = values[-1] if isinstance(values[-1], CkptError) else None
        self._store.set(f"{prefix}/outcome", pickle.dumps(failure))
        said = [*(f"{prefix}/{rank}" for rank in range(self.world)), f"{prefix}/outcome"]
        if failure is not None:
            self._read += [*said, f"{prefix}/failed"]
            raise failure
        self._forget(said)
        return values

    def _heard(self, prefix: str, rank: int, watch: "_Watch") -> Any:
        """The value of a rank, the failure of any, or that one is lost: the others hear it too."""
        try:
            return self._wait(f"{prefix}/{rank}", watch, f"{prefix}/failed")
        except StorageError as error:
            return error

    def _from_first(self, key: str) -> Any:
        """What rank 0 says; should it only have been stopped, it hears that it was given up."""
        try:
            return self._wait(key, _Watch(self._store, [0], self._silence))
        except StorageError as error:
            self._store.set(_LEFT, pickle.dumps(error))
            raise

    def _forget(self, keys: Sequence[str]) -> None:
        """Drop what every rank has read: all that came before a round in which all have answered."""
        for key in self._read:
            self._store.delete_key(key)
        self._read = list(keys)

    def alive(self) -> None:
        self._beat += 1
        self._store.set(f"d9d/beat/{self.rank}", str(self._beat))

    def heed(self) -> None:
        self.alive()
        for word in (f"d9d/{self._round + 1}/failed", _LEFT):
            if self._store.check([word]):
                raise self._value(word)

    def leave(self, cause: str) -> None:
        error = StorageError(f"rank {self.rank} left: {cause}")
        self._store.set(_LEFT, pickle.dumps(error))

    def clear(self) -> None:
        if self.rank == 0:
            self._forget([_LEFT, *(f"d9d/beat/{rank}" for rank in range(self.world))])
            self._forget([])

    def _wait(self, key: str, watch: "_Watch", failed: str | None = None) -> Any:
        """The value under ``key``, or under ``failed``, while all who are watched show signs of life."""
        pause = _LEAST_POLL
        while not self._store.check([key]):
            if failed is not None and self._store.check([failed]):
                return self._value(failed)
            # Who leaves when all is said has read the last word, which is there by then.
            if self._store.check([_LEFT]) and not self._store.check([key]):
                raise self._value(_LEFT)
            watch.look()
            self.alive()
            time.sleep(pause)
            pause = min(2 * pause, _POLL)
        return self._value(key)

    def _value(self, key: str) -> Any:
        # Written by our own ranks in this run, never read from storage.
        return pickle.loads(self._store.get(key))  # noqa: S301


class _Watch:
    """Looks for signs of life, at one rank a poll in turn: that is all a store of a thousand can answer."""

    def __init__(self, store: Any, ranks: Sequence[int], silence: float) -> None:
        self._store, self._silence = store, silence
        self._seen = dict.fromkeys(ranks, (b"", time.monotonic()))
        self._turns = itertools.cycle(ranks)

    def look(self) -> None:
        """Look at the next one.

        Raises:
            StorageError: It has shown none for too long.
        """
        rank, now = next(self._turns), time.monotonic()
        key = f"d9d/beat/{rank}"
        beat = self._store.get(key) if self._store.check([key]) else b""
        before, since = self._seen[rank]
        if beat != before:
            self._seen[rank] = beat, now
        elif now - since > self._silence:
            raise StorageError(f"rank {rank} has shown no sign of life for {self._silence:.0f} s")


def launched() -> bool:
    """Whether a launcher has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def open_ranks() -> Ranks:
    """The ranks of this run."""
    if not launched():
        return OneRank()
    rendezvous = importlib.import_module("torch.distributed.rendezvous").rendezvous
    store, rank, world = next(rendezvous("env://", timeout=timedelta(minutes=10)))
    return LaunchedRanks(store, rank, world)
