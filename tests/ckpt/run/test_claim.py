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
    for name in (f"{DEAD}/rank-00000.safetensors", f".{DEAD}.model.safetensors", "notes.txt"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"x")
    found = {"host": host or socket.gethostname(), "pid": pid, "time": 0.0, "save_id": save_id}
    (path / ".d9d-claim").write_text(json.dumps(found))


def test_what_a_dead_writer_left_goes_with_its_claim(store, tmp_path, gone):
    claimed(tmp_path / "d", gone)
    claim.take(store, str(tmp_path / "d"), NEW, {})
    assert claim.held(store, str(tmp_path / "d"), NEW)
    assert sorted(everything(tmp_path / "d")) == [".d9d-claim", "notes.txt"]


def test_a_save_that_is_the_checkpoint_there_stays(store, tmp_path, gone):
    claimed(tmp_path / "d", gone)
    (tmp_path / "d" / "manifest.json").write_text(json.dumps({"save_id": DEAD}))
    claim.take(store, str(tmp_path / "d"), NEW, {})
    assert f"{DEAD}/rank-00000.safetensors" in everything(tmp_path / "d")
    assert f".{DEAD}.model.safetensors" not in everything(tmp_path / "d")


@pytest.mark.parametrize("change", [{"pid": os.getpid()}, {"host": "elsewhere"}, {"save_id": ""}])
def test_a_writer_that_may_be_alive_keeps_its_claim(store, tmp_path, gone, change):
    claimed(tmp_path / "d", **{"pid": gone} | change)
    before = everything(tmp_path / "d")
    with pytest.raises(DestinationError, match=r"claimed by another writer .*delete .*claim"):
        claim.take(store, str(tmp_path / "d"), NEW, {})
    assert everything(tmp_path / "d") == before
