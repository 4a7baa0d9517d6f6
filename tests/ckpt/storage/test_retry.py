"""Trying again, on a clock that moves only when the code waits."""

import random
from types import SimpleNamespace

import pytest

from d9d_ckpt.errors import StorageError
from d9d_ckpt.storage import retry
from d9d_ckpt.storage.retry import PATIENCE, Patience, persist


class Clock:
    """Pauses asked for; each is over at once, and each attempt takes `each` seconds."""

    def __init__(self, each=0.0):
        self.now, self.each, self.pauses, self.bounds = 1000.0, each, [], []
        self.draw = random.Random(0).uniform

    def monotonic(self):
        return self.now

    def uniform(self, low, high):
        self.bounds.append((low, high))
        return self.draw(low, high)

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=made.monotonic))
    monkeypatch.setattr(retry, "random", SimpleNamespace(uniform=made.uniform))
    return made


class PassingError(Exception):
    """Passes by itself."""


class Server:
    """Fails `failures` times, then answers 7."""

    def __init__(self, clock, failures, error=PassingError):
        self.clock, self.left, self.error, self.tries = clock, failures, error, 0

    def __call__(self):
        self.tries += 1
        self.clock.now += self.clock.each
        if self.left:
            self.left -= 1
            raise self.error("busy")
        return 7


def ask(server, patience=PATIENCE):
    sleep = server.clock.sleep
    return persist(
        "put s3://b/k", server, lambda e: isinstance(e, PassingError), patience, sleep=sleep
    )


@pytest.mark.parametrize("failures", [0, 1, 5, 7])
def test_d13_success_after_failures_that_pass(clock, failures):
    server = Server(clock, failures)
    assert ask(server) == 7
    assert server.tries == failures + 1
    assert len(clock.pauses) == failures


def test_d13_pauses_double_up_to_the_longest_and_are_drawn_from_nothing_up(clock):
    patience = Patience(tries=7, seconds=1e9, first_pause=1, longest_pause=10)
    with pytest.raises(StorageError):
        ask(Server(clock, 99), patience)
    assert clock.bounds == [(0, 1), (0, 2), (0, 4), (0, 8), (0, 10), (0, 10)]
    assert len(set(clock.pauses)) == 6


def test_d13_two_that_fail_together_do_not_come_back_together(monkeypatch):
    pauses = []
    for _ in range(2):
        made = Clock()
        monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=made.monotonic))
        ask(Server(made, 4))
        pauses.append(made.pauses)
    assert pauses[0] != pauses[1]


def test_d13_tries_are_bounded_and_the_message_says_what_and_how_often(clock):
    server = Server(clock, 99)
    with pytest.raises(StorageError, match=r"put s3://b/k: gave up after 8 tries in .* busy") as e:
        ask(server)
    assert server.tries == 8
    assert isinstance(e.value.__cause__, PassingError)


def test_d13_time_is_bounded(clock):
    clock.each = 50
    server = Server(clock, 99)
    with pytest.raises(StorageError, match=r"gave up after 3 tries in 15"):
        ask(server, Patience(tries=100, seconds=120, first_pause=1))
    assert server.tries == 3


def test_d13_no_attempt_starts_after_the_time(clock):
    clock.draw = lambda _, high: high
    server = Server(clock, 10**9)
    with pytest.raises(StorageError):
        ask(server, Patience(tries=10**6, seconds=60, first_pause=0.1, longest_pause=10))
    assert server.tries > 5
    assert clock.now - 1000 <= 60


def test_d14_an_attempt_that_was_getting_somewhere_does_not_use_up_the_time(clock):
    """An hour on a slow line, then a broken connection: that is no reason to give up."""
    clock.each = 3600
    server = Server(clock, 1)
    assert ask(server, Patience(seconds=120, stall=60)) == 7
    assert server.tries == 2


def test_d13_what_does_not_pass_is_raised_at_once_as_it_is(clock):
    server = Server(clock, 1, KeyError)
    with pytest.raises(KeyError):
        ask(server)
    assert (server.tries, clock.pauses) == (1, [])


def test_one_who_stops_waiting_is_not_kept(clock):
    server = Server(clock, 1, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        ask(server)
    assert not clock.pauses


def test_the_usual_patience_ends_within_minutes():
    assert PATIENCE.tries <= 10
    assert PATIENCE.seconds + PATIENCE.stall <= 180
    assert 0 < PATIENCE.first_pause < PATIENCE.longest_pause <= 30
