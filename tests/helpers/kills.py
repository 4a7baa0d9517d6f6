"""Runs whose ranks are killed at random moments, again and again, until somebody lets them finish."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from helpers.ranks import KILLED, launch
from helpers.runs import Place, Sections, mesh

from d9d_ckpt.api import list_steps
from d9d_ckpt.errors import MissingError
from d9d_train.build import train
from d9d_train.config import Config

WHERE: Sections = mesh(2, pp=2, dp_shard=2, ep=2)
SAME: Sections = {"train": {"dtype": "float32", "deterministic": True}}

_APART = 0.3
"""Seconds between the first rank's end and the others', where they do not end at once."""


@dataclass(frozen=True)
class Kill:
    """When a life ends.

    Attributes:
        steps: Steps that it may take first.
        delay: Seconds after them, or after its start.
        first: The rank that is killed before the others; None for all at once.
        every: Steps between its saves.
    """

    steps: int
    delay: float
    first: int | None
    every: int

    @classmethod
    def drawn(cls, draw: random.Random, world: int) -> "Kill":
        """One at random."""
        return cls(
            steps=draw.randrange(9),
            delay=draw.uniform(0, 0.6),
            first=draw.choice([None, draw.randrange(world)]),
            every=draw.choice([1, 2]),
        )

    def __str__(self) -> str:
        who = "all" if self.first is None else f"rank {self.first}, then all"
        return f"{who}, {self.delay:.3f} s after {self.steps} steps; saves every {self.every}"


@dataclass(frozen=True)
class Life:
    """What came of one start.

    Attributes:
        kill: What was to end it.
        began: The step that it went on from.
        told: The last step that it told of.
        whole: The latest whole step that it left.
        broken: Steps that it left half-written.
        killed: Whether it was killed, or was over before.
    """

    kill: Kill
    began: int
    told: int
    whole: int
    broken: tuple[int, ...]
    killed: bool


def lives(place: Place, steps: int, draw: random.Random) -> Iterator[Life]:
    """Start a run that is killed, and again, for as long as somebody asks or until it is over."""
    while True:
        began, _ = state(place)
        world = place.config(steps, WHERE).topology.world
        kill = Kill.drawn(draw, world)
        made = place.config(
            steps, WHERE, SAME, {"checkpoint": {"every": kill.every, "keep_last": 3}}
        )
        ends = launch(
            world,
            partial(_killed, made, place, kill, began),
            timeout=120,
            allow=frozenset(range(world)),
        )
        whole, broken = state(place)
        told = place.lines()[-1]["step"] if _told(place.metrics) else 0
        life = Life(kill, began, told, whole, broken, KILLED in ends)
        yield life
        if not life.killed:
            return


def state(place: Place) -> tuple[int, tuple[int, ...]]:
    """The latest whole step of a run, 0 for none, and those that are not whole."""
    try:
        run = list_steps(place.run)
    except MissingError:
        return 0, ()
    return run.latest or 0, tuple(s.step for s in run.steps if not s.complete)


def _killed(made: Config, place: Place, kill: Kill, began: int, rank: int) -> str | None:
    """Train until the end comes; what went wrong where another rank's end comes first."""
    end = threading.Thread(target=_end, args=(place.metrics, kill, began, rank), daemon=True)
    end.start()
    try:
        train(made)
    except Exception as error:  # noqa: BLE001 - the other ranks' end may be any error
        end.join()
        return repr(error)
    return None


def _end(metrics: Path, kill: Kill, began: int, rank: int) -> None:
    while kill.steps and _told(metrics) < began + kill.steps:
        time.sleep(0.001)
    time.sleep(kill.delay + (0 if kill.first in (None, rank) else _APART))
    os.kill(os.getpid(), signal.SIGKILL)


def _told(metrics: Path) -> int:
    """Lines, which are as many as the steps of which they tell."""
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0
