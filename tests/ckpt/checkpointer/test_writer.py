"""What writer processes make of a save: bits, commits, and what any end of any of them leaves."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.checkpoints import everything
from helpers.writers import Ranks, children, descriptors, running, state, until

import d9d_ckpt
from d9d_ckpt.checkpointer.link import Link
from d9d_ckpt.checkpointer.messages import Abort, Commit, Prune, Write
from d9d_ckpt.checkpointer.sender import columns_of
from d9d_ckpt.codecs.checksum import digest
from d9d_ckpt.codecs.zstd import Zstd
from d9d_ckpt.errors import DestinationError, MissingError, StorageError
from d9d_ckpt.run.retention import Policy
from d9d_ckpt.tensors import DTYPES, Region, Target, TensorSpec

pytest_plugins = ["helpers.servers"]

codecs = pytest.mark.parametrize("codec", [None, Zstd(1)], ids=["plain", "zstd"])

SLOW = Zstd(22)
"""Half a second for a block: long enough to be caught at it."""


@pytest.fixture(scope="module")
def _worlds():
    with Ranks(1) as one, Ranks(2) as two:
        yield {1: one, 2: two}


@pytest.fixture
def one(_worlds):
    """A rank whose writer other tests have used and will use, whatever they did to it."""
    _worlds[1].codec = None
    return _worlds[1]


@pytest.fixture
def two(_worlds):
    _worlds[2].codec = None
    return _worlds[2]


@pytest.fixture(autouse=True)
def tidy():
    """No test leaves a process or a descriptor behind."""
    before = children()
    yield
    assert children() == before


def check(url, tensors, step=0, **options):
    """Bit for bit what was saved, whole, and nothing else there."""
    ckpt = d9d_ckpt.open(str(url), **options)
    assert set(ckpt.tensors) == set(tensors)
    for name, array in tensors.items():
        found = ckpt[name].read()
        assert found.shape == array.shape
        expected = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected)
    assert ckpt.metadata["values"] == {"cursor": step}
    assert d9d_ckpt.verify(str(url), **options).ok
    if isinstance(url, Path):
        assert {p.name for p in url.iterdir()} == {"manifest.json", ckpt.metadata["save_id"]}


# -- what is written -----------------------------------------------------------------------------


@codecs
@pytest.mark.parametrize("world", [1, 2])
def test_there_and_back(tmp_path, world, codec):
    """Twice: the second save is of other values and more of them, in the same slots."""
    with Ranks(world, codec) as ranks:
        for step in (1, 2):
            tensors = state(step, rows=300 * step)
            assert ranks.save(tmp_path / f"{step}", tensors, step).warning is None
            check(tmp_path / f"{step}", tensors, step)
        check(tmp_path / "1", state(1, rows=300), 1)


def test_small_files_go_along(one, tmp_path):
    one.stage(state())
    one.prepare(tmp_path / "a")
    one.commit(one.write(), small={"config.json": b"{}"})
    assert (tmp_path / "a" / "config.json").read_bytes() == b"{}"
    assert d9d_ckpt.verify(str(tmp_path / "a")).ok


def test_hashes_are_those_of_the_stretches(one, tmp_path):
    one.stage(state())
    one.prepare(tmp_path / "a")
    stretches = [(0, 0), (0, 5), (7, 3 << 20)]
    wrote = one[0].write(hashed=stretches)
    view = memoryview(one[0].slot.view)
    assert wrote.hashes == tuple(digest(view[at : at + n]) for at, n in stretches)
    assert wrote.nbytes == sum(a.nbytes for a in state().values())


def test_the_snapshot_is_what_is_written_not_what_comes_later(one, tmp_path):
    tensors = state()
    one.stage(tensors)
    one.prepare(tmp_path / "a")
    wrote = one.write()
    one[0].slot.view[:] = 0
    one.commit(wrote)
    check(tmp_path / "a", tensors)


def test_columns_are_of_one_rank_and_of_bounded_bytes():
    spec = TensorSpec(DTYPES["U8"], (100 << 20,))
    whole = Region.whole(spec.shape)
    targets = [Target(f"{n}", spec, whole, n % 2, 0, 1) for n in range(7)]
    assert columns_of(targets) == [[0, 2], [1, 3], [4, 6], [5]]
    assert columns_of([]) == []


def test_nothing_is_left_in_the_writer(one, tmp_path):
    """Descriptors and threads of the process are the same after every save, failed or not."""
    counts = []
    process = Path(f"/proc/{one[0].link.pid}")
    for step in range(4):
        one.save(tmp_path / f"{step}", state(step))
        with pytest.raises(DestinationError):
            one.prepare(tmp_path / f"{step}")
        one.prepare(tmp_path / f"x{step}")
        one[0].link.ask(Abort())
        counts.append([len(os.listdir(process / d)) for d in ("fd", "task")])
    assert counts[1:] == [counts[1]] * 3


# -- what was there before -----------------------------------------------------------------------


def test_a_checkpoint_is_replaced_only_when_asked_and_at_the_commit(one, tmp_path):
    place = tmp_path / "a"
    one.save(place, state(1))
    before = everything(place)
    one.stage(state(2))
    with pytest.raises(DestinationError, match="holds a checkpoint already"):
        one.prepare(place)
    assert everything(place) == before
    one.prepare(place, overwrite=True)
    wrote = one.write()
    assert everything(place).items() >= before.items()
    one.commit(wrote)
    check(place, state(2))


def test_a_checkpoint_with_missing_files_is_nobodys_loss(two, tmp_path):
    place = tmp_path / "a"
    two.save(place, state(1))
    next(place.glob("*/rank-*")).unlink()
    two.save(place, state(2))
    check(place, state(2))


def test_a_manifest_that_cannot_be_judged_stays(one, tmp_path):
    place = tmp_path / "a"
    one.save(place, state(1))
    (place / "manifest.json").write_text('{"format": "d9d-sharded", "version": 2}')
    one.stage(state(2))
    with pytest.raises(DestinationError, match="version 2"):
        one.prepare(place)
    assert "version" in (place / "manifest.json").read_text()


def test_another_writers_claim_is_respected(one, two, tmp_path):
    one.stage(state(1))
    two.stage(state(2))
    one.prepare(tmp_path / "a")
    wrote = one.write()
    with pytest.raises(DestinationError, match="claimed by another writer"):
        two.prepare(tmp_path / "a")
    two[0].link.ask(Abort())
    one.commit(wrote)
    check(tmp_path / "a", state(1))


# -- what fails ----------------------------------------------------------------------------------


def test_what_no_rank_has_written_is_not_committed(two, tmp_path):
    two.stage(state())
    two.prepare(tmp_path / "a")
    wrote = two.write()
    with pytest.raises(StorageError, match=r"tensor 'w', rank 1: 0 of 1 blocks"):
        two.commit(wrote[:1])
    two[0].link.ask(Abort())
    assert not (tmp_path / "a").exists()


@codecs
def test_a_full_disk_is_told_with_its_path_and_the_next_save_succeeds(two, tmp_path, codec):
    two.codec = codec
    two.stage(state(1))
    two.prepare(tmp_path / "a")
    two[0].write()
    pid = two[1].link.pid
    limit = resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    with pytest.raises(StorageError, match=r"a/.*/rank-00001\.safetensors: .*errno 27"):
        two[1].write()
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
    for rank in two.ranks:
        rank.link.ask(Abort())
    assert list(tmp_path.iterdir()) == []
    two.save(tmp_path / "a", state(2))
    check(tmp_path / "a", state(2))


def test_a_place_that_cannot_be_made_is_told_with_its_path(one, tmp_path):
    (tmp_path / "file").write_text("mine")
    one.stage(state())
    with pytest.raises(StorageError, match="file/a"):
        one.prepare(tmp_path / "file" / "a")
    one.save(tmp_path / "b", state())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_rank_that_does_not_see_the_files_says_what_may_be_the_cause(two, tmp_path):
    two.stage(state())
    two.prepare(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(
        StorageError, match=r"rank-00001\.safetensors: not there on .* all hosts share"
    ):
        two[1].write()
    (tmp_path / "b").rename(tmp_path / "a")
    two.commit(two.write())
    check(tmp_path / "a", state())


def test_a_fault_of_our_own_is_told_as_well(tmp_path, capfd):
    with Ranks() as ranks:  # of its own, for the stderr that the test captures
        ranks.stage(state())
        ranks.prepare(tmp_path / "a")
        with pytest.raises(StorageError, match="failed at write: KeyError: 7"):
            ranks[0].link.ask(Write(7, ranks[0].sources))
        assert "Traceback" in capfd.readouterr().err
        ranks.commit(ranks.write())
        check(tmp_path / "a", state())


class Enough(Exception):  # noqa: N818 - what a beat breaks off with
    """Of a beat."""


def enough():
    raise Enough


def test_a_write_is_broken_off_by_an_abort(one, tmp_path):
    one.codec = SLOW
    one.stage(state(rows=8000))
    one.prepare(tmp_path / "a")
    with pytest.raises(Enough):
        one[0].write(beat=enough)
    began = time.monotonic()
    one[0].link.ask(Abort())
    assert time.monotonic() - began < 2.0
    assert list(tmp_path.iterdir()) == []


# -- who dies ------------------------------------------------------------------------------------


stages = pytest.mark.parametrize(
    ("stage", "old"),
    [("prepared", False), ("writing", True), ("written", False), ("written", True)],
)
"""How far a save has come, and whether it replaces a checkpoint."""


def written_to(path):
    """Whether a file of the save at ``path`` has bytes."""
    return any(file.stat().st_blocks for file in path.glob("*/rank-*"))


def kill_when(pid, true, number=signal.SIGKILL):
    """A thread that kills a process once something is true."""

    def go():
        if until(true, 10.0):
            os.kill(pid, number)

    thread = threading.Thread(target=go)
    thread.start()
    return thread


@stages
def test_a_killed_writer_leaves_the_old_checkpoint_and_no_obstacle(one, tmp_path, stage, old):
    place = tmp_path / "a"
    if old:
        one.save(place, state(1))
    slow = stage == "writing"
    with Ranks(2, SLOW if slow else None) as ranks:
        ranks.stage(state(2, rows=4000 if slow else 600))
        ranks.prepare(place, overwrite=old)
        link = ranks[0].link
        if slow:
            killer = kill_when(link.pid, lambda: written_to(place))
            with pytest.raises(StorageError, match="signal 9"):
                ranks[0].write()
            killer.join()
        else:
            if stage == "written":
                ranks.write()
            os.kill(link.pid, signal.SIGKILL)
            with pytest.raises(StorageError, match="signal 9"):
                link.ask(Abort())
        ranks[1].link.ask(Abort())
    if old:
        assert d9d_ckpt.verify(str(place)).ok
    else:
        with pytest.raises(MissingError):
            d9d_ckpt.open(str(place))
    one.save(place, state(3), overwrite=old)
    check(place, state(3))


@pytest.mark.parametrize("wait", [0.001, 0.01])
def test_a_writer_killed_at_its_commit_leaves_the_old_or_the_new(one, tmp_path, wait):
    place = tmp_path / "a"
    with Ranks() as ranks:
        ranks.save(place, state(1), 1)
        ranks.stage(state(2))
        ranks.prepare(place, 2, overwrite=True)
        wrote = ranks.write()
        threading.Timer(wait, os.kill, (ranks[0].link.pid, signal.SIGKILL)).start()
        try:
            ranks.commit(wrote)
        except StorageError:
            assert not ranks[0].link.alive
        assert until(lambda: not running(ranks[0].link.pid))
    step = d9d_ckpt.open(str(place)).metadata["values"]["cursor"]
    assert step in (1, 2)
    assert d9d_ckpt.verify(str(place)).ok
    one.save(place, state(3), overwrite=True)
    check(place, state(3))


def trainer(place, stage, old):
    """A trainer in a forked process that has come to ``stage``; its process and its writers'."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        with os.fdopen(reader) as pipe:
            return pid, [int(word) for word in pipe.readline().split()]
    try:
        ranks = Ranks(2, SLOW if stage == "writing" else None)
        ranks.stage(state(2, rows=4000))
        ranks.prepare(place, overwrite=old)
        if stage == "written":
            ranks.write()
        os.write(writer, " ".join(str(r.link.pid) for r in ranks.ranks).encode() + b"\n")
        if stage == "writing":
            ranks.write()
        time.sleep(60)
    finally:
        os._exit(1)


@stages
def test_writers_of_a_killed_trainer_undo_and_end(one, tmp_path, stage, old):
    place = tmp_path / "a"
    if old:
        one.save(place, state(1))
    before = everything(place) if old else {}
    pid, writers = trainer(place, stage, old)
    try:
        if stage == "writing":
            assert until(lambda: written_to(place))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert until(lambda: not any(map(running, writers)), 2.0)
    assert everything(place) == before if old else not place.exists()
    one.save(place, state(3), overwrite=old)
    check(place, state(3))


def odd(*lines, silence=300.0):
    """A link to a writer that behaves as ``lines`` make it."""
    ours, theirs = socket.socketpair()
    code = [
        "import time",
        "from d9d_ckpt.checkpointer import clerk, writer",
        *lines,
        "writer.main()",
    ]
    with theirs:
        number = theirs.fileno()
        argv = [sys.executable, "-c", "\n".join(code), str(number)]
        process = subprocess.Popen(argv, pass_fds=(number,))  # noqa: S603 - this interpreter
    ours.settimeout(0.5)
    return Link(process, ours, silence)


def test_work_that_takes_longer_than_a_silence_is_waited_for(tmp_path):
    with Ranks() as ranks:
        ranks[0].link.close()
        ranks[0].link = odd(
            "real = clerk.send",
            "clerk.send = lambda sending: time.sleep(2.5) or real(sending)",
            silence=1.0,
        )
        beats = []
        ranks.stage(state())
        ranks.prepare(tmp_path / "a")
        ranks.commit([ranks[0].write(beat=lambda: beats.append(0))])
        check(tmp_path / "a", state())
    assert 4 <= len(beats) <= 12


def test_a_writer_that_hangs_undoes_and_ends_all_the_same(tmp_path):
    with Ranks() as ranks:
        ranks[0].link.close()
        ranks[0].link = odd("clerk.send = lambda _: time.sleep(60)")
        ranks.stage(state())
        ranks.prepare(tmp_path / "a")
        with pytest.raises(Enough):
            ranks[0].write(beat=enough)
        began = time.monotonic()
        ranks[0].link.close()
        assert time.monotonic() - began < 2.0
    assert list(tmp_path.iterdir()) == []


def test_a_commit_that_has_begun_is_carried_through(tmp_path):
    with Ranks() as ranks:
        ranks[0].link.close()
        ranks[0].link = odd(
            "commit = clerk.Directory.commit",
            "def slow(*args): time.sleep(1.5), commit(*args), time.sleep(0.5)",
            "clerk.Directory.commit = slow",
        )
        ranks.stage(state())
        ranks.prepare(tmp_path / "a")
        wrote = ranks.write()
        commit = Commit(wrote[0].digests)
        with pytest.raises(Enough):
            ranks[0].link.ask(commit, beat=enough)
    check(tmp_path / "a", state())


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_undoes_what_is_going_on(tmp_path, rank):
    with Ranks(2, SLOW) as ranks:
        ranks.stage(state(rows=4000))
        ranks.prepare(tmp_path / "a")
        link = ranks[rank].link
        killer = kill_when(link.pid, lambda: written_to(tmp_path / "a"), signal.SIGTERM)
        with pytest.raises(StorageError, match="told to end"):
            ranks[rank].write()
        killer.join()
        assert until(lambda: not running(link.pid), 2.0)
        names = [p.name for p in (tmp_path / "a").glob("*/rank-*")]
        assert names == ([] if rank == 0 else ["rank-00000.safetensors"])
        ranks[0].link.close()
        assert list(tmp_path.iterdir()) == []


def test_a_rank_that_ends_once_it_has_written_takes_nothing_with_it(tmp_path):
    """The coordinator may be committing by then."""
    with Ranks(2) as ranks:
        ranks.stage(state())
        ranks.prepare(tmp_path / "a")
        wrote = ranks.write()
        ranks[1].link.ask(Abort())
        ranks[1].link.close()
        ranks.commit(wrote)
        ranks[0].link.ask(Abort())
    check(tmp_path / "a", state())


def test_leaving_undoes_what_is_not_committed(tmp_path):
    with Ranks(2) as ranks:
        ranks.stage(state())
        ranks.prepare(tmp_path / "a")
        ranks.write()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_in_the_trainer(tmp_path):
    before = descriptors()
    with Ranks(2) as ranks:
        ranks.save(tmp_path / "a", state())
    del ranks
    assert descriptors() == before


# -- retention -----------------------------------------------------------------------------------


def test_old_steps_go_and_newer_ones_do_not_count(one, tmp_path):
    """Step 9 is of a run that was resumed from before it: it is neither the newest kept nor deleted."""
    for step in (1, 2, 3, 9):
        one.save(tmp_path / f"step-{step:08d}", state(step, rows=8), step)
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    done = one[0].link.ask(Prune(str(tmp_path), Policy(1), 3))
    assert done.deleted == (1, 2)
    assert done.warning is None
    left = [str(p.relative_to(tmp_path)) for p in tmp_path.iterdir()]
    assert sorted(left) == ["step-00000001", "step-00000003", "step-00000009"]
    assert [p.name for p in (tmp_path / "step-00000001").iterdir()] == ["notes.txt"]


def test_retention_that_fails_is_a_warning(one, tmp_path):
    done = one[0].link.ask(Prune(str(tmp_path / "none"), Policy(1), 3))
    assert "none: old steps are not all removed: " in done.warning
    with pytest.raises(StorageError, match="no save"):
        one[0].link.ask(Commit({}))


# -- object stores -------------------------------------------------------------------------------


@pytest.mark.s3
@codecs
def test_there_and_back_on_an_object_store(moto, fresh, codec):
    """An object of two parts, then of one in its place."""
    url, options = f"{moto.url}/a", {"storage_options": moto.options}
    with Ranks(2, codec) as ranks:
        for step, rows in ((1, 4500), (2, 300)):
            more = {"options": moto.options, "overwrite": step == 2}
            assert ranks.save(url, state(step, rows=rows), step, **more).warning is None
            check(url, state(step, rows=rows), step, **options)
    names = {name.split("/")[-1] for name in moto.objects()}
    assert names == {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}
    assert moto.uploads() == []


@pytest.mark.s3
@pytest.mark.parametrize("stage", ["writing", "written"])
def test_an_object_store_after_a_save_that_was_given_up(moto, fresh, stage):
    url = f"{moto.url}/a"
    with Ranks(2, SLOW if stage == "writing" else None) as ranks:
        ranks.stage(state(rows=4000 if stage == "writing" else 600))
        ranks.prepare(url, options=moto.options)
        if stage == "writing":
            killer = threading.Timer(0.5, os.kill, (ranks[1].link.pid, signal.SIGTERM))
            killer.start()
            with pytest.raises(StorageError, match="told to end"):
                ranks[1].write()
        else:
            ranks.write()
    assert moto.objects() == {}
    assert moto.uploads() == []
