"""Claims of writers that are gone: taken over, with what they left removed, unless it is a checkpoint."""

import json
import os
import socket

import pytest
from helpers.checkpoints import everything

from d9d_ckpt.errors import DestinationError
from d9d_ckpt.run import claim
from d9d_ckpt.storage.local import LocalStore

DEAD, NEW = "20260101T000000-0000dead", "20260102T000000-00000new"


@pytest.fixture
def store():
    made = LocalStore()
    yield made
    made.close()


@pytest.fixture
def gone():
    """The number of a process that has ended."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def claimed(path, pid, save_id=DEAD, host=None):
    """A directory as a writer has left it."""
    written = (f"{DEAD}/rank-00000", f".{DEAD}.model", f"model-{DEAD}-00001-of-00002")
    for name in (*(f"{w}.safetensors" for w in written), "notes.txt"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"x")
    found = {"host": host or socket.gethostname(), "pid": pid, "time": 0.0, "save_id": save_id}
    (path / ".d9d-claim").write_text(json.dumps(found))


def test_what_a_dead_writer_left_goes_with_its_claim(store, tmp_path, gone):
    claimed(tmp_path / "d", gone)
    claim.take(store, str(tmp_path / "d"), NEW, {})
    assert claim.held(store, str(tmp_path / "d"), NEW)
    assert sorted(everything(tmp_path / "d")) == [".d9d-claim", "notes.txt"]


@pytest.fixture
def unasked():
    """The number of a process that has ended and that nobody has asked how, as in many a container."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield pid
    os.waitpid(pid, 0)


def test_a_writer_that_nobody_has_waited_for_is_dead_as_well(store, tmp_path, unasked):
    claimed(tmp_path / "d", unasked)
    claim.take(store, str(tmp_path / "d"), NEW, {})
    assert claim.held(store, str(tmp_path / "d"), NEW)


def test_a_save_that_is_the_checkpoint_there_stays(store, tmp_path, gone):
    claimed(tmp_path / "d", gone)
    (tmp_path / "d" / "manifest.json").write_text(json.dumps({"save_id": DEAD}))
    claim.take(store, str(tmp_path / "d"), NEW, {})
    assert f"{DEAD}/rank-00000.safetensors" in everything(tmp_path / "d")
    assert f".{DEAD}.model.safetensors" not in everything(tmp_path / "d")


@pytest.mark.parametrize("again", [False, True])
def test_what_a_committed_save_had_replaced_goes_and_nothing_else(store, tmp_path, gone, again):
    """Its writer died before it could remove it, and the new manifest does not name it."""
    path, old = tmp_path / "d", "20250101T000000-0000a01d"
    claimed(path, gone)
    (path / "manifest.json").write_text(json.dumps({"save_id": DEAD}))
    for name in (f"{old}/rank-00000.safetensors", "model-00001-of-00002.safetensors"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"x")
    named = [old, "model-00001-of-00002.safetensors", "notes.txt", "../elsewhere", DEAD]
    found = json.loads((path / ".d9d-claim").read_text())
    (path / ".d9d-claim").write_text(json.dumps(found | {"old": named}))
    claim.take(store, str(path), DEAD if again else NEW, {}, again=again)
    left = {".d9d-claim", "manifest.json", "notes.txt", f"{DEAD}/rank-00000.safetensors"}
    unfinished = {f".{DEAD}.model.safetensors", f"model-{DEAD}-00001-of-00002.safetensors"}
    assert set(everything(path)) == left | (unfinished if again else set())


def test_a_claim_is_respected_where_the_store_would_replace_it(store, tmp_path, monkeypatch):
    claimed(tmp_path / "d", os.getpid())
    monkeypatch.setattr(LocalStore, "claim", lambda *_: True)
    with pytest.raises(DestinationError, match="claimed by another writer"):
        claim.take(store, str(tmp_path / "d"), NEW, {})


@pytest.mark.parametrize(
    "change",
    [{"pid": os.getpid()}, {"host": "elsewhere"}, {"save_id": ""}, {"save_id": "notes.txt"}],
)
def test_a_writer_that_may_be_alive_keeps_its_claim(store, tmp_path, gone, change):
    claimed(tmp_path / "d", **{"pid": gone} | change)
    before = everything(tmp_path / "d")
    with pytest.raises(DestinationError, match=r"claimed by another writer .*delete .*claim"):
        claim.take(store, str(tmp_path / "d"), NEW, {})
    assert everything(tmp_path / "d") == before
