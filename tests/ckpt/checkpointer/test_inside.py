"""Saves that the trainer waits for, written in its own process from its live tensors.

Their bytes are those of a save in the background; what breaks one off leaves the step before.
"""

import errno
import fcntl
import os
import shutil
import signal
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers.checkpoints import everything, manifest
from helpers.ranks import KILLED, launch
from helpers.writers import children, descriptors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import d9d_ckpt
from d9d_ckpt import Checkpointer
from d9d_ckpt.checkpointer.base import Held
from d9d_ckpt.checkpointer.inside import Inside
from d9d_ckpt.checkpointer.messages import Abort, Commit, Describe, Prepare, Write
from d9d_ckpt.checkpointer.snapshot import in_place
from d9d_ckpt.errors import StorageError
from d9d_ckpt.formats.sharded import Manifest
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.run.execute import new_save_id
from d9d_ckpt.storage.local import LocalStore
from d9d_ckpt.tensors import BLOCK, DTYPES, Region, Target, TensorSpec

codecs = pytest.mark.parametrize("codec", ["none", "zstd:1"])

KINDS = [getattr(torch, d.torch) for d in DTYPES.values() if d.torch and d.name != "F4"]
"""Every dtype that a tensor of torch can have and that fills whole bytes."""


@pytest.fixture(autouse=True)
def tidy():
    """Nothing stays behind: no process, thread or descriptor."""
    threads = set(threading.enumerate())
    before = children(), descriptors()
    yield
    assert (children(), descriptors()) == before
    assert set(threading.enumerate()) <= threads


def plain(**tensors):
    return {"model": tensors}


def noise(dtype, *shape):
    """Any bits: NaNs with a payload and subnormals among them."""
    nbytes = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=torch.manual_seed(3))
    return raw.view(dtype).reshape(shape)


def mixed():
    """Kinds, shapes and layouts in memory as a trainer has them; large ones are of several blocks."""
    x = noise(torch.float32, 600, 1000)
    kinds = {str(dtype).removeprefix("torch."): noise(dtype, 7, 3) for dtype in KINDS}
    return plain(
        **kinds,
        large=x,
        rows=x[3:5],
        scalar=torch.tensor(2.5, dtype=torch.bfloat16),
        one=torch.tensor([7]),
        empty=torch.zeros(0, 5),
        hollow=torch.zeros(3, 0, dtype=torch.int8),
        last=noise(torch.uint8, 1),
    ) | {"step": 3, "data": {"at": (1, 2)}}


def odd():
    """Tensors whose bytes do not lie together, or are not what they mean."""
    x = noise(torch.float32, 40, 30)
    c = torch.complex(x[:2, :4], x[2:4, :4])
    return plain(
        t=x.t(), columns=x[:, 3:7], wide=x[0].expand(5, 30), conj=c.conj(), neg=c.conj().imag
    )


def values():
    return {"step": 1}


def nothing():
    return plain(empty=torch.zeros(0, 3))


def files(step):
    """Every file of a checkpoint of one step, without what tells two saves of one state apart."""
    save_id = manifest(step)["save_id"]
    found = everything(step)
    found.pop("manifest.json")
    return {
        name.replace(save_id, "ID"): content.replace(save_id.encode(), b"ID")
        for name, content in found.items()
    }


def description(step):
    """The manifest, without its seal and what the save id gets into."""
    found = manifest(step)
    save_id = found.pop("save_id")
    found.pop("self_xxh3")
    for entry in found["files"].values():
        entry.pop("header_xxh3")
    text = repr(found).replace(save_id, "ID")
    return text.replace("'step': 2, 'layout'", "'step': 1, 'layout'")


def both(root, state, codec, *, inside=True, **options):
    """One state saved from where it is as step 2, and in the background as step 1."""
    with Checkpointer(root, codec=codec, **options) as saver:
        before = children()
        saver.save(2, state, blocking=True)
        assert (children() == before) == inside
        saver.save(1, state).wait()
    return root / "step-00000001", root / "step-00000002"


def same(one, two):
    """Whether two steps are the same checkpoint, byte for byte."""
    return files(one) == files(two) and description(one) == description(two)


def bits(tensor):
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1)
    return flat.view(torch.uint8).tolist()


# -- what is written -----------------------------------------------------------------------------


@codecs
@pytest.mark.parametrize("make", [mixed, odd, values, nothing])
def test_the_bytes_are_those_of_a_save_in_the_background(tmp_path, codec, make):
    state = make()
    before = {n: (t.dtype, t.shape, bits(t)) for n, t in state.get("model", {}).items()}
    one, two = both(tmp_path, state, codec, inside=make is not odd)
    assert same(one, two)
    for step in (one, two):
        assert d9d_ckpt.verify(str(step)).ok
        found = {n: t.read() for n, t in d9d_ckpt.open(str(step)).tensors.items()}
        assert {n: (t.dtype, t.shape, bits(t)) for n, t in found.items()} == before


def _sharded():
    """Rows of which the third rank has none, columns, replicas, and a 0-D tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(24.0).reshape(4, 6)
    return plain(
        rows=distribute_tensor(whole, mesh, [Shard(0)]),
        columns=distribute_tensor(whole.double(), mesh, [Shard(1)]),
        copies=distribute_tensor(noise(torch.bfloat16, 300, 400), mesh, [Replicate()]),
        scalar=distribute_tensor(torch.tensor(4), mesh, [Replicate()]),
        plain=torch.arange(5),
    )


def _save_shards(root, codec, rank):
    both(root, _sharded(), codec, silence=10)


@pytest.mark.ranks
@codecs
def test_shards_are_written_as_by_a_save_in_the_background(tmp_path, codec):
    launch(3, partial(_save_shards, tmp_path, codec))
    one, two = tmp_path / "step-00000001", tmp_path / "step-00000002"
    assert same(one, two)
    assert {name.rpartition("/")[2] for name in files(two)} == {
        f"rank-{n:05}.safetensors" for n in range(3)
    }
    ckpt = d9d_ckpt.open(str(two))
    whole = torch.arange(24.0).reshape(4, 6)
    assert torch.equal(ckpt["rows"].read(), whole)
    assert torch.equal(ckpt["columns"].read(), whole.double())
    assert bits(ckpt["copies"].read()) == bits(noise(torch.bfloat16, 300, 400))
    assert ckpt["scalar"].read().item() == 4
    assert d9d_ckpt.verify(str(two)).ok


def slowed(write, seconds, third=lambda: None):
    """``LocalStore.write`` on a slow disk; ``third`` is done before the third one."""
    count = iter(range(1, 1000))

    def slow(store, *args):
        time.sleep(seconds)
        if next(count) == 3:
            third()
        write(store, *args)

    return slow


# -- a disk that fails ---------------------------------------------------------------------------


@contextmanager
def failing(monkeypatch, call, at):
    """The ``at``-th system call of that name off the main thread finds the disk full; counts them."""
    original, count = getattr(os, call), [0]

    def wrapped(*args, **more):
        if threading.current_thread() is threading.main_thread() or not _concerns(call, args):
            return original(*args, **more)
        count[0] += 1
        if call == "close":
            original(*args)
        if count[0] == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return None if call == "close" else original(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, wrapped)
        yield count


def told(step):
    """What a step raises, as text; nothing where it succeeds."""
    try:
        step()
    except StorageError as error:
        return str(error)
    return ""


def _concerns(call, args):
    """Of descriptors, only the end of those that were written through can fail."""
    return call != "close" or fcntl.fcntl(args[0], fcntl.F_GETFL) & os.O_WRONLY


@codecs
@pytest.mark.parametrize(
    ("call", "least"),
    [
        ("mkdir", 2),
        ("ftruncate", 2),
        ("pwrite", 5),
        ("fsync", 4),
        ("close", 2),
        ("link", 1),
        ("replace", 1),
    ],
)
def test_d17_a_disk_that_is_full_at_any_call_leaves_the_step_before(
    tmp_path, monkeypatch, codec, call, least
):
    state = plain(w=noise(torch.float32, 800, 1000), b=torch.ones(3))
    run, config, failed = tmp_path / "run", {"config.json": b"{}"}, 0
    words = (f"{run}/step-00000002", f"(errno {errno.ENOSPC})", " free")
    with Checkpointer(run, codec=codec, files=config, keep_last=2) as saver:
        saver.save(1, state, blocking=True)
        before = everything(run)
        for at in range(1, 60):
            with failing(monkeypatch, call, at) as count:
                text = told(lambda: saver.save(2, state, blocking=True))
            if count[0] < at:
                break
            if text:
                missing = [word for word in words if word not in text]
                assert missing == [], (at, text)
                failed += 1
            else:
                # A directory that is there already, or what is tidied up after the commit.
                assert d9d_ckpt.verify(str(run)).ok, at
                assert saver.load(state).step == 2
                shutil.rmtree(run / "step-00000002")
            assert everything(run) == before, at
            assert [p.name for p in run.iterdir()] == ["step-00000001"], at
        assert (text, saver.load(state).step) == ("", 2)
    assert failed >= least
    assert d9d_ckpt.verify(str(run)).ok


def _one_full(root, rank):
    """Rank 1's disk is full when it writes; rank 0 is at work for long then."""
    with Checkpointer(root / "run", silence=10) as saver:
        w = distribute_tensor(torch.ones(16 << 20), init_device_mesh("cpu", (2,)), [Shard(0)])
        saver.save(1, plain(w=w), blocking=True)
        write = LocalStore.write
        LocalStore.write = _refusing if rank else slowed(write, 0.2)
        began = time.monotonic()
        with pytest.raises(StorageError) as caught:
            saver.save(2, plain(w=w), blocking=True)
        seconds = time.monotonic() - began
        # The others have heard of it while rank 0 removes what is left.
        names = None if rank else sorted(p.name for p in (root / "run").iterdir())
        LocalStore.write = write
        saver.save(3, plain(w=w), blocking=True)
        return str(caught.value), seconds, names, saver.load(plain(w=w)).step


def _refusing(_, url, *__):
    raise StorageError(f"write {url}: No space left on device (errno {errno.ENOSPC})")


@pytest.mark.ranks
def test_d03_a_rank_at_work_is_broken_off_when_another_fails(tmp_path):
    """32 blocks of a fifth of a second would take rank 0 more than 6 s."""
    for text, seconds, names, latest in launch(2, partial(_one_full, tmp_path)):
        assert "rank 1: write " in text
        assert "rank-00001.safetensors: No space left on device (errno 28)" in text
        assert seconds < 2.0
        assert names in (None, ["step-00000001"])
        assert latest == 3


# -- what breaks a save off ----------------------------------------------------------------------


ROWS = 32
"""Blocks of the tensor of `prepared`."""


@contextmanager
def prepared(url, monkeypatch, pause=0.1):
    """A writer in this process that takes ``pause`` seconds for a block, and a tensor to be written."""
    w = torch.ones(ROWS, BLOCK // 4)
    spec = TensorSpec(DTYPES["F32"], tuple(w.shape))
    target = Target("w", spec, Region.whole(spec.shape), 0, 0, 1)
    snapshot, live = in_place({"w": Held("w", spec, target.box, w)})
    writer = Inside()
    try:
        writer.ask(Describe([target], {"w": spec}))
        writer.ask(Prepare(str(url), empty_manifest(), coordinator=True))
        monkeypatch.setattr(LocalStore, "write", slowed(LocalStore.write, pause))
        yield writer, Write(live, {0: snapshot.offsets["w"]}, threads=1)
    finally:
        writer.close()


def empty_manifest():
    return Manifest(
        save_id=new_save_id(),
        step=2,
        layout=Topology(),
        family=None,
        config=None,
        experts="",
        entries={},
        files={},
        values={},
    )


@pytest.fixture
def run(tmp_path):
    """A run directory with one step, and what is in it."""
    with Checkpointer(tmp_path / "run") as saver:
        saver.save(1, plain(w=torch.zeros(3)), blocking=True)
    return tmp_path / "run", everything(tmp_path / "run")


def untouched(run):
    """Whether the run has its first step and nothing else."""
    url, before = run
    return everything(url) == before and [p.name for p in url.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, StorageError("rank 3 is lost"), SystemExit])
def test_what_a_beat_raises_breaks_the_write_off(run, monkeypatch, error):
    def beat():
        raise error

    with prepared(run[0] / "step-00000002", monkeypatch) as (writer, write):
        with pytest.raises(error if isinstance(error, type) else type(error)):
            writer.ask(write, beat=beat)
        assert list(run[0].glob("step-00000002/*/rank-*"))
        began = time.monotonic()
        writer.ask(Abort())
        # All of it would take three seconds.
        assert time.monotonic() - began < 1.5
        assert untouched(run)
        assert d9d_ckpt.open(str(run[0])).metadata["step"] == 1
        # It takes another save at once.
        writer.ask(Prepare(str(run[0] / "step-00000003"), empty_manifest(), coordinator=True))
        writer.ask(Abort())
    assert untouched(run)


def test_an_abort_of_another_thread_is_the_writes_error(run, monkeypatch):
    with prepared(run[0] / "step-00000002", monkeypatch) as (writer, write):
        abort = threading.Timer(0.2, writer.ask, (Abort(),))
        abort.start()
        with pytest.raises(StorageError, match="the save was given up"):
            writer.ask(write)
        abort.join()
        assert untouched(run)


def test_what_is_not_over_in_time_is_given_up(run, monkeypatch):
    with prepared(run[0] / "step-00000002", monkeypatch) as (writer, write):
        with pytest.raises(StorageError, match=r"no end of write after 0\.1 s"):
            writer.ask(write, timeout=0.1)
        writer.ask(Abort())
        assert untouched(run)


@pytest.mark.parametrize("written", [False, True])
def test_a_close_undoes_what_is_not_committed(run, monkeypatch, written):
    with prepared(run[0] / "step-00000002", monkeypatch, 0.0) as (writer, write):
        if written:
            assert writer.ask(write).nbytes == ROWS * BLOCK
        assert writer.alive
    assert not writer.alive
    assert untouched(run)


def test_a_commit_is_what_makes_it_exist(run, monkeypatch):
    with prepared(run[0] / "step-00000002", monkeypatch, 0.0) as (writer, write):
        wrote = writer.ask(write)
        assert d9d_ckpt.open(str(run[0])).metadata["step"] == 1
        assert writer.ask(Commit(wrote.digests)).warning is None
        # There is nothing left to undo.
        writer.ask(Abort())
    assert d9d_ckpt.open(str(run[0])).metadata["step"] == 2
    assert torch.equal(d9d_ckpt.open(str(run[0]))["w"].read(), torch.ones(ROWS, BLOCK // 4))


def test_a_fault_of_our_own_is_told_as_well(run, monkeypatch, capfd):
    with prepared(run[0] / "step-00000002", monkeypatch, 0.0) as (writer, write):
        with pytest.raises(StorageError, match="failed at write: KeyError: 7"):
            writer.ask(Write(7, write.sources))
        assert "Traceback" in capfd.readouterr().err
        writer.ask(Abort())
    assert untouched(run)


def test_an_interrupt_is_raised_when_the_tensors_are_the_callers_again(run, monkeypatch):
    """What is written from its place would else be half of what the caller makes of it next."""
    w = torch.zeros(16, BLOCK // 4)
    monkeypatch.setattr(LocalStore, "write", slowed(LocalStore.write, 0.02, interrupt))
    with Checkpointer(run[0]) as saver:
        with pytest.raises(KeyboardInterrupt):
            saver.save(2, plain(w=w), blocking=True)
        w.fill_(9)
        assert saver.load(plain(w=w)).step == 2
    assert not w.any()
    assert d9d_ckpt.verify(str(run[0])).ok


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def _killed(root, rank):
    w = torch.ones(64, BLOCK // 4)
    with Checkpointer(root) as saver:
        saver.save(1, plain(w=w), blocking=True)
        LocalStore.write = slowed(LocalStore.write, 0.0, die)
        saver.save(2, plain(w=w), blocking=True)


@pytest.mark.ranks
def test_d01_a_trainer_killed_while_it_writes_leaves_the_step_before(tmp_path):
    assert launch(1, partial(_killed, tmp_path), allow=frozenset({0})) == [KILLED]
    assert list(tmp_path.glob("step-00000002/*/rank-*"))
    assert d9d_ckpt.open(str(tmp_path)).metadata["step"] == 1
    w = torch.zeros(64, BLOCK // 4)
    with Checkpointer(tmp_path) as saver:
        assert saver.load(plain(w=w)).step == 1
        assert w.all()
        saver.save(2, plain(w=w), blocking=True)
        assert saver.load(plain(w=w)).step == 2
    assert d9d_ckpt.verify(str(tmp_path)).ok
