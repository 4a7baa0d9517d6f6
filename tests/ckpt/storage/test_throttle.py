"""Turns at a server that says when it has too much to do."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from d9d_ckpt.storage.throttle import Throttle


class BusyError(Exception):
    """Too much to do."""


class Server:
    """Counts who is there at once; refuses whoever comes while more than `bearable` are."""

    def __init__(self, bearable=10**9):
        self.bearable, self.lock = bearable, threading.Lock()
        self.here, self.most, self.refused = 0, 0, 0

    def ask(self, throttle, seconds=0.002):
        with throttle.turn(lambda e: isinstance(e, BusyError)):
            with self.lock:
                self.here += 1
                self.most = max(self.most, self.here)
                busy = self.here > self.bearable
                self.refused += busy
            threading.Event().wait(seconds)
            with self.lock:
                self.here -= 1
            if busy:
                raise BusyError

    def stubborn(self, throttle):
        while True:
            try:
                return self.ask(throttle)
            except BusyError:
                continue


def at_once(work, count, threads=32):
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: work(), range(count)))


def test_no_more_than_the_most_at_once():
    throttle, server = Throttle(3), Server()
    at_once(lambda: server.ask(throttle), 60)
    assert server.most == 3


def test_d13_after_a_refusal_half_as_many():
    throttle = Throttle(32)
    refused(throttle, together=16)
    server = Server()
    at_once(lambda: server.ask(throttle), 8)
    assert server.most <= 9


def test_refusals_of_one_moment_count_once():
    throttle = Throttle(32)
    refused(throttle, together=16)
    server = Server()
    at_once(lambda: server.ask(throttle, 0.05), 8)
    assert server.most == 8


def test_there_is_always_one():
    throttle = Throttle(4)
    for _ in range(10):
        refused(throttle, together=1)
    server = Server()
    server.ask(throttle)
    assert server.most == 1


def test_success_lets_it_grow_by_one_a_round():
    throttle = Throttle(8)
    for _ in range(5):
        refused(throttle, together=1)
    most = []
    for rounds in (1, 2, 3, 4):
        for _ in range(rounds):
            Server().ask(throttle)
        server = Server()
        at_once(lambda server=server: server.ask(throttle, 0.02), 8)
        most.append(server.most)
    assert most == sorted(most)
    assert most[0] < most[-1] <= 8


def test_other_errors_change_nothing():
    throttle = Throttle(4)
    for _ in range(20):
        with pytest.raises(KeyError), throttle.turn(lambda e: isinstance(e, BusyError)):
            raise KeyError
    server = Server()
    at_once(lambda: server.ask(throttle, 0.02), 8)
    assert server.most == 4


def test_d13_a_server_that_bears_few_is_left_in_peace():
    """64 threads that try again at once; without turns it would refuse nearly all, for ever."""
    throttle, server = Throttle(64), Server(bearable=4)
    at_once(lambda: server.stubborn(throttle), 600, threads=64)
    assert 0 < server.refused < 300


def refused(throttle, together):
    """So many under way at once, all of them refused."""
    meet = threading.Barrier(together)

    def one():
        with throttle.turn(lambda e: isinstance(e, BusyError)):
            meet.wait()
            raise BusyError

    def expect():
        with pytest.raises(BusyError):
            one()

    at_once(expect, together, threads=together)
