"""The local store: short counts, ends, errors of the kernel, large offsets, modes."""

import errno
import os
import random
import stat

import pytest

from d9d_ckpt.errors import CorruptError, MissingError, StorageError
from d9d_ckpt.storage.local import LocalStore
from d9d_ckpt.storage.opening import normalise, store_for
from d9d_ckpt.storage.store import join


@pytest.fixture
def store():
    made = LocalStore()
    yield made
    made.close()


@pytest.fixture
def umask():
    """Sets the umask until the test ends."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


# -- reading -----------------------------------------------------------------------------------


def test_f21_short_counts_are_looped_over(store, tmp_path, monkeypatch):
    data = random.Random(1).randbytes(50_000)
    (tmp_path / "f").write_bytes(data)
    calls = cut_reads_short(monkeypatch)
    url = str(tmp_path / "f")
    for offset, nbytes in ((0, 50_000), (1, 49_999), (12_345, 7), (49_999, 1), (50_000, 0)):
        assert store.read(url, offset, nbytes) == data[offset : offset + nbytes]
    assert len(calls) > 100


def cut_reads_short(monkeypatch):
    """`os.preadv` gives a random part of what is asked; its calls are listed."""
    draw, preadv, calls = random.Random(2), os.preadv, []

    def short(fd, buffers, offset):
        calls.append(offset)
        left, cut = draw.randint(1, 999), []
        for buffer in buffers:
            if left > 0:
                cut.append(buffer[:left])
                left -= len(buffer)
        return preadv(fd, cut, offset)

    monkeypatch.setattr(os, "preadv", short)
    return calls


@pytest.mark.parametrize("cut", [False, True])
def test_f21_scattering_reads_fill_every_view(store, tmp_path, monkeypatch, cut):
    data, draw = random.Random(1).randbytes(400_000), random.Random(3)
    (tmp_path / "f").write_bytes(data)
    if cut:
        cut_reads_short(monkeypatch)
    views = [memoryview(bytearray(draw.randint(0, 300))) for _ in range(2500)]
    store.read_into(str(tmp_path / "f"), 1000, views)
    got = b"".join(views)
    assert got == data[1000 : 1000 + len(got)]


@pytest.mark.parametrize("cut", [False, True])
def test_f21_separate_runs_are_put_side_by_side(store, tmp_path, monkeypatch, cut):
    data, draw = random.Random(1).randbytes(100_000), random.Random(3)
    (tmp_path / "f").write_bytes(data)
    if cut:
        cut_reads_short(monkeypatch)
    offsets = [draw.randint(0, 98_000) for _ in range(50)]
    out = bytearray(50 * 1500)
    store.read_runs(str(tmp_path / "f"), offsets, 1500, memoryview(out))
    assert out == b"".join(data[at : at + 1500] for at in offsets)
    with pytest.raises(CorruptError, match="ends at byte 100000, expected at least"):
        store.read_runs(str(tmp_path / "f"), [0, 99_000], 1500, memoryview(out))


def test_f21_scattering_reads_past_the_end(store, tmp_path):
    (tmp_path / "f").write_bytes(bytes(100))
    views = [memoryview(bytearray(30)) for _ in range(5)]
    with pytest.raises(CorruptError, match="ends at byte 100, expected at least"):
        store.read_into(str(tmp_path / "f"), 0, views)


def test_f21_short_writes_are_looped_over(store, tmp_path, monkeypatch):
    data = random.Random(1).randbytes(50_000)
    draw, pwrite = random.Random(2), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, b, at: pwrite(fd, b[: draw.randint(1, 999)], at))
    url = str(tmp_path / "f")
    store.create(url, 60_000)
    store.write(url, 10_000, memoryview(data))
    assert (tmp_path / "f").read_bytes() == bytes(10_000) + data


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 101), (90, 20), (100, 1), (5000, 8)])
def test_f21_early_end_has_the_offset(store, tmp_path, offset, nbytes):
    (tmp_path / "f").write_bytes(bytes(100))
    with pytest.raises(CorruptError) as raised:
        store.read(str(tmp_path / "f"), offset, nbytes)
    text = str(raised.value)
    assert str(tmp_path / "f") in text
    assert f"ends at byte {max(offset, 100)}" in text
    assert f"expected at least {offset + nbytes}" in text


def test_f21_a_file_that_shrinks_after_it_was_opened(store, tmp_path):
    (tmp_path / "f").write_bytes(bytes(100))
    store.read(str(tmp_path / "f"), 0, 100)
    os.truncate(tmp_path / "f", 60)
    with pytest.raises(CorruptError, match="ends at byte 60, expected at least 100"):
        store.read(str(tmp_path / "f"), 0, 100)


@pytest.mark.parametrize(
    ("call", "operation"), [("preadv", "read"), ("pwrite", "write"), ("fsync", "fsync")]
)
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOSPC, errno.ESTALE])
def test_f21_errors_of_the_kernel_are_storage_errors(
    store, tmp_path, monkeypatch, call, operation, number
):
    url = str(tmp_path / "f")
    (tmp_path / "f").write_bytes(bytes(100))

    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fails)
    calls = {
        "read": lambda: store.read(url, 0, 10),
        "write": lambda: store.write(url, 0, memoryview(b"x")),
        "fsync": lambda: store.sync(url),
    }
    with pytest.raises(StorageError) as raised:
        calls[operation]()
    text = str(raised.value)
    assert operation in text
    assert url in text
    assert f"errno {number}" in text
    assert os.strerror(number) in text
    assert ("free" in text) == (number == errno.ENOSPC)


def test_f21_error_in_the_middle_of_a_read(store, tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(bytes(100))
    preadv = os.preadv

    def fails_later(fd, buffers, offset):
        if offset:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, [buffers[0][:10]], offset)

    monkeypatch.setattr(os, "preadv", fails_later)
    with pytest.raises(StorageError, match="errno 5"):
        store.read(str(tmp_path / "f"), 0, 100)


def test_f21_offsets_above_4_gib_are_exact(store, tmp_path):
    url, marks = str(tmp_path / "f"), [(1 << 32) - 1, 1 << 32, (1 << 32) + 7, (1 << 33) + 12_345]
    store.create(url, (1 << 33) + 20_000)
    for n, at in enumerate(marks):
        store.write(url, at, memoryview(bytes([n + 1])))
    store.flush()
    assert store.size(url) == (1 << 33) + 20_000
    for n, at in enumerate(marks):
        assert store.read(url, at, 1) == bytes([n + 1])
    assert store.read(url, (1 << 32) - 2, 4) == b"\0\1\2\0"
    assert store.read(url, (1 << 33) + 12_344, 3) == b"\0\4\0"


def test_missing_files(store, tmp_path):
    url = str(tmp_path / "no" / "f")
    for call in (store.size, lambda u: store.read(u, 0, 1), store.sync, store.files):
        with pytest.raises(MissingError, match="no such file"):
            call(url)
    assert store.names(url) == []


def test_a_directory_in_place_of_a_file_is_a_storage_error(store, tmp_path):
    (tmp_path / "d").mkdir()
    with pytest.raises(StorageError, match="errno 21"):
        store.read(str(tmp_path / "d"), 0, 1)


def test_names_and_files_are_sorted_and_fresh(store, tmp_path):
    for name in ("b", "a10", "a9"):
        (tmp_path / name).write_bytes(bytes(len(name)))
    (tmp_path / "dir").mkdir()
    assert store.names(str(tmp_path)) == ["a10", "a9", "b", "dir"]
    assert store.files(str(tmp_path)) == {"a10": 3, "a9": 2, "b": 1}
    (tmp_path / "b").unlink()
    assert store.names(str(tmp_path)) == ["a10", "a9", "dir"]


def test_many_files_do_not_run_out_of_descriptors(store, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for n in range(300):
        (tmp_path / str(n)).write_bytes(str(n).encode())
    for n in [*range(300), *range(0, 300, 7)]:
        assert store.read(str(tmp_path / str(n)), 0, 1) == str(n)[:1].encode()
    assert len(os.listdir("/proc/self/fd")) - before <= 130
    store.close()


# -- writing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_f09_new_files_follow_the_umask(store, tmp_path, umask, mask, expected):
    umask(mask)
    store.create(str(tmp_path / "d" / "f"), 3)
    store.claim(str(tmp_path / "d" / "c"), b"x")
    store.publish(str(tmp_path / "d" / "f"), str(tmp_path / "d" / "g"))
    assert mode(tmp_path / "d" / "g") == expected
    assert mode(tmp_path / "d" / "c") == expected
    assert mode(tmp_path / "d") == 0o777 & ~mask


def test_f09_a_replaced_file_keeps_its_mode(store, tmp_path, umask):
    umask(0o022)
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "old").chmod(0o640)
    store.create(str(tmp_path / "new"), 3)
    store.write(str(tmp_path / "new"), 0, memoryview(b"new"))
    store.publish(str(tmp_path / "new"), str(tmp_path / "old"))
    assert (tmp_path / "old").read_bytes() == b"new"
    assert mode(tmp_path / "old") == 0o640
    assert os.listdir(tmp_path) == ["old"]


def test_claim_is_given_once(store, tmp_path):
    url = str(tmp_path / "d" / "claim")
    assert store.claim(url, b"first")
    assert not store.claim(url, b"second")
    assert store.read(url, 0, 5) == b"first"


@pytest.mark.parametrize("call", ["ftruncate", "pwrite", "link"])
def test_a_claim_that_fails_leaves_nothing(store, tmp_path, monkeypatch, call):
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(errno.ENOSPC))
        with pytest.raises(StorageError, match=r"No space left.* free"):
            store.claim(str(tmp_path / "d" / "claim"), b"mine")
    assert os.listdir(tmp_path / "d") == []
    assert store.claim(str(tmp_path / "d" / "claim"), b"mine")


def test_a_claim_and_its_directories_are_durable_before_they_are_relied_on(
    store, tmp_path, monkeypatch
):
    synced, link = [], os.link

    def linked(source, target):
        assert source in synced
        assert {str(tmp_path), str(tmp_path / "a")} <= set(synced)
        link(source, target)

    sync = LocalStore.sync
    monkeypatch.setattr(LocalStore, "sync", lambda self, url: (synced.append(url), sync(self, url)))
    monkeypatch.setattr(os, "link", linked)
    assert store.claim(str(tmp_path / "a" / "b" / "claim"), b"mine")


def failing(number):
    """A system call that is refused."""

    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


def test_put_after_a_put_that_failed_writes_the_new_file(store, tmp_path, monkeypatch):
    url = str(tmp_path / "f")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", failing(errno.EIO))
        with pytest.raises(StorageError):
            store.put(url, b"first")
    store.put(url, b"second")
    assert (tmp_path / "f").read_bytes() == b"second"


def test_close_lets_go_of_everything_and_tells_of_writes_that_may_be_lost(
    store, tmp_path, monkeypatch
):
    for name in ("read", "written", "other"):
        (tmp_path / name).write_bytes(b"x")
    store.read(str(tmp_path / "read"), 0, 1)
    store.write(str(tmp_path / "written"), 0, memoryview(b"y"))
    store.write(str(tmp_path / "other"), 0, memoryview(b"y"))
    close, closed = os.close, []

    def refused(fd):
        close(fd)
        closed.append(fd)
        raise OSError(errno.EIO, "lost")

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", refused)
        with pytest.raises(StorageError, match=r"close .*written: lost"):
            store.close()
    assert len(closed) == 3
    store.close()


def test_close_of_what_was_only_read_is_no_failure(store, tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(b"x")
    store.read(str(tmp_path / "f"), 0, 1)
    close = os.close

    def refused(fd):
        close(fd)
        raise OSError(errno.EIO, "lost")

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", refused)
        store.close()
    assert store.read(str(tmp_path / "f"), 0, 1) == b"x"


def test_a_full_disk_is_told_although_the_directory_is_not_there(store, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", failing(errno.ENOSPC))
        with pytest.raises(StorageError, match=r"No space left.* free"):
            store.create(str(tmp_path / "a" / "b"), 1)


def test_free_of_a_path_that_cannot_be_looked_at(store, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", failing(errno.EIO))
        with pytest.raises(StorageError, match="statvfs"):
            store.free(str(tmp_path))


def test_delete_takes_files_directories_and_nothing(store, tmp_path):
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "e" / "f").write_bytes(b"x")
    (tmp_path / "g").write_bytes(b"x")
    for name in ("d", "g", "absent"):
        store.delete(str(tmp_path / name))
    assert os.listdir(tmp_path) == []


def test_delete_does_not_follow_links(store, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    store.delete(str(tmp_path / "link"))
    assert (tmp_path / "kept" / "f").read_bytes() == b"x"
    assert not (tmp_path / "link").exists()


def test_remove_empty_leaves_what_is_used(store, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "f").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    for name in ("used", "empty", "absent"):
        store.remove_empty(str(tmp_path / name))
    assert os.listdir(tmp_path) == ["used"]


def test_free_of_a_path_that_is_not_there_yet(store, tmp_path):
    free = store.free(str(tmp_path / "a" / "b" / "c"))
    assert free is not None
    assert free > 0


def test_urls():
    assert join("/a/", "b") == "/a/b"
    assert join("/", "b") == "/b"
    assert join("s3://bucket/x", "b") == "s3://bucket/x/b"
    assert normalise("file:///a/b") == "/a/b"
    assert normalise("memory://x/") == "memory://x"
    assert normalise("a") == os.path.join(os.getcwd(), "a")
    assert normalise("~/x") == os.path.expanduser("~/x")
    assert isinstance(store_for("/a", {}), LocalStore)
