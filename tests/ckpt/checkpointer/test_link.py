"""The trainer's end: what comes back, what is noticed, and what is left."""

import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest
from helpers.writers import children, descriptors, running, until

from d9d_ckpt.checkpointer.link import Link
from d9d_ckpt.checkpointer.messages import Abort, Commit, Describe
from d9d_ckpt.errors import CkptError, StorageError
from d9d_ckpt.run.frames import pack, unpack
from d9d_ckpt.tensors import DTYPES, Region, Target, TensorSpec


@pytest.fixture
def link():
    made = Link.start()
    yield made
    made.close()


@contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Enough(Exception):  # noqa: N818 - what a beat breaks off with
    """Of a beat."""


def enough():
    raise Enough


def test_it_is_up_at_once_and_without_torch(link):
    began = time.monotonic()
    link.ask(Abort())
    assert time.monotonic() - began < 3.0
    with open(f"/proc/{link.pid}/maps") as maps:
        assert "torch" not in maps.read()
    assert os.getpgid(link.pid) != os.getpgid(0)


def test_its_errors_are_raised_here_and_it_goes_on(link):
    with pytest.raises(CkptError, match="no save has been prepared"):
        link.ask(Commit({}))
    link.ask(Abort())
    assert link.alive


def test_messages_larger_than_a_socket_buffer(link):
    spec = TensorSpec(DTYPES["F32"], (10, 10))
    targets = [Target(f"t{n}", spec, Region.whole((10, 10)), 0, 0, 1) for n in range(10_000)]
    link.ask(Describe(targets, {t.name: spec for t in targets}))


def test_a_description_arrives_as_it_was():
    specs = {
        "": TensorSpec(DTYPES["F32"], ()),
        "a": TensorSpec(DTYPES["BF16"], (4, 6)),
        "empty": TensorSpec(DTYPES["I8"], (0, 3)),
        "b": TensorSpec(DTYPES["U8"], (1 << 40,)),
    }
    targets = [
        Target("b", specs["b"], Region((1 << 39,), (1 << 39,)), 7, 1, 2),
        Target("a", specs["a"], Region((0, 1), (4, 2)), 131_071, 0, 3),
        Target("", specs[""], Region((), ()), 0, 0, 1),
        Target("a", specs["a"], Region((3, 3), (1, 2)), 0, 2, 3),
    ]
    for columns in (None, [[0, 3], [1], [2]]):
        described = Describe(targets, specs, columns)
        assert list(unpack(bytearray(pack(described)))) == [described]


def test_nothing_is_left_of_it():
    before, others = descriptors(), children()
    for _ in range(3):
        link = Link.start()
        link.ask(Abort())
        link.close()
        link.close()
        assert not running(link.pid)
    killed = Link.start()
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(StorageError):
        killed.ask(Abort())
    assert descriptors() == before
    assert children() == others


def test_a_killed_one_is_noticed_while_it_is_asked(link):
    link.ask(Abort())
    os.kill(link.pid, signal.SIGSTOP)
    died = []

    def kill():
        os.kill(link.pid, signal.SIGKILL)
        died.append(time.monotonic())

    threading.Timer(0.2, kill).start()
    with pytest.raises(StorageError, match=rf"{link.pid} died \(signal 9\) during commit"):
        link.ask(Commit({}))
    assert time.monotonic() - died[0] < 1.0
    assert not link.alive
    with pytest.raises(StorageError, match="has ended; abort needs a new one"):
        link.ask(Abort())


def test_a_killed_one_is_noticed_though_somebody_else_has_its_end(link, monkeypatch):
    """A descriptor that leaked to another process keeps the socket open."""
    link.ask(Abort())
    os.kill(link.pid, signal.SIGKILL)
    assert until(lambda: not running(link.pid))

    class Silent:
        def fileno(self):
            return 0

        def sendmsg(self, buffers, *_):
            return sum(map(len, buffers))

        def recv(self, _):
            time.sleep(0.05)
            raise TimeoutError

        def close(self):
            pass

    monkeypatch.setattr(link, "_end", Silent())
    with pytest.raises(StorageError, match="died"):
        link.ask(Abort())


def test_one_that_could_not_start_says_how_it_ended(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr("d9d_ckpt.checkpointer.link._path", lambda: str(tmp_path))
    (tmp_path / "d9d_ckpt").mkdir()
    (tmp_path / "d9d_ckpt" / "__init__.py").write_text("raise ImportError('of no use')")
    link = Link.start()
    with pytest.raises(StorageError, match=r"died \(exit code 1\) during abort"):
        link.ask(Abort())
    link.close()
    assert "of no use" in capfd.readouterr().err


def test_one_that_does_not_answer_in_time_is_given_up(link):
    link.ask(Abort())
    os.kill(link.pid, signal.SIGSTOP)
    with pytest.raises(StorageError, match=r"has not answered for 0\.6 s during commit"):
        link.ask(Commit({}), timeout=0.6)
    assert not running(link.pid)


def test_one_that_shows_no_sign_of_life_is_killed():
    link = Link.start(silence=1.0)
    link.ask(Abort())
    os.kill(link.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(
        StorageError, match=rf"{link.pid} has shown no sign of life for 1 s during commit, and was"
    ):
        link.ask(Commit({}))
    assert 1.0 < time.monotonic() - began < 2.5
    assert not running(link.pid)
    link.close()


def test_a_beat_that_raises_leaves_it_to_be_asked(link):
    link.ask(Abort())
    with stopped(link.pid), pytest.raises(Enough):
        link.ask(Commit({}), beat=enough)
    # The answer to the commit is an error; it is not taken for that to the next message.
    assert link.ask(Abort()) is None


def test_beats_come_twice_a_second(link):
    link.ask(Abort())
    beats = []
    threading.Timer(1.2, os.kill, (link.pid, signal.SIGCONT)).start()
    os.kill(link.pid, signal.SIGSTOP)
    link.ask(Abort(), beat=lambda: beats.append(time.monotonic()))
    assert 2 <= len(beats) <= 4
    assert beats[1] - beats[0] > 0.4


def test_the_keyboard_is_not_for_it(link):
    link.ask(Abort())
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(link.pid, number)
    link.ask(Abort())


def test_sigterm_ends_it(link):
    link.ask(Abort())
    os.kill(link.pid, signal.SIGTERM)
    assert until(lambda: not running(link.pid))
    with pytest.raises(StorageError, match="exit code 0"):
        link.ask(Abort())


def test_a_forked_process_does_not_keep_it_alive(link):
    link.ask(Abort())
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(writer)
        code = 1
        try:
            link.close()
            os.read(reader, 1)
            code = 0
        finally:
            os._exit(code)
    os.close(reader)
    try:
        # The close in the forked process has ended nothing here.
        time.sleep(0.1)
        link.ask(Abort())
        began = time.monotonic()
        link.close()
        assert time.monotonic() - began < 2.0
        assert link._process.returncode == 0
    finally:
        os.close(writer)
        assert os.waitpid(pid, 0)[1] == 0
