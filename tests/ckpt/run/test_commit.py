"""Commits that stop at every step: the old checkpoint or the new one, never a mixture, nothing left."""

import contextlib
import errno
import json
import os

import pytest
import torch
from helpers.checkpoints import (
    cli,
    convert,
    equal,
    everything,
    model,
    read_hf,
    read_sharded,
    refused,
    training,
    write_hf,
    write_model,
)

import d9d_ckpt
from d9d_ckpt.errors import StorageError
from d9d_ckpt.storage.local import LocalStore

STEPS = ("claim", "create", "write", "sync", "publish")


class Killed(BaseException):
    """The process is gone: nothing after this runs, so nothing may be tidied up."""


@contextlib.contextmanager
def failing(monkeypatch, step, call, error):
    """The ``call``-th use of one method of the store raises ``error``; counts the uses."""
    original, count = getattr(LocalStore, step), [0]

    def wrapped(self, *args):
        count[0] += 1
        if count[0] == call:
            raise error
        return original(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, step, wrapped)
        yield count


def uses(monkeypatch, step, run):
    """How often ``run`` uses a method."""
    with failing(monkeypatch, step, -1, None) as count:
        run()
    return count[0]


def to_sharded(src, dst, *argv):
    return cli("convert", src, dst, "--to", "sharded", "--layout", "tp=2", "--workers", 1, *argv)


def to_hf(src, dst, *argv):
    return cli(
        "convert", src, dst, "--to", "huggingface", "--max-shard-size", 2000, "--workers", 1, *argv
    )


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("convert_", [to_sharded, to_hf])
def test_d17_a_store_that_fails_at_any_step_leaves_nothing(tmp_path, monkeypatch, step, convert_):
    src = write_model(tmp_path / "src", model("llama"))
    count = uses(monkeypatch, step, lambda: convert_(src, tmp_path / "count"))
    assert count
    error = StorageError(f"{step} refused (errno {errno.ENOSPC})")
    for call in range(1, count + 1):
        dst = tmp_path / "new" / "dst"
        with failing(monkeypatch, step, call, error):
            refused(convert_(src, dst), 5, "refused", f"errno {errno.ENOSPC}")
        assert not dst.exists(), (call, sorted(everything(dst)))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("convert_", [to_sharded, to_hf])
def test_d17_a_failing_replacement_leaves_the_old_one_or_the_new_one(
    tmp_path, monkeypatch, step, convert_
):
    made = model("llama")
    new = {n: t + 1000 for n, t in made.tensors.items()}
    src = write_hf(tmp_path / "src", new, made.config)
    old = write_model(tmp_path / "old", made)
    count = uses(monkeypatch, step, lambda: convert_(src, tmp_path / "count"))
    error = StorageError(f"{step} refused")
    read = read_sharded if convert_ is to_sharded else read_hf
    for call in range(1, count + 1):
        dst = tmp_path / f"dst{call}"
        assert convert_(old, dst).code == 0
        (dst / "notes.txt").write_text("mine")
        before = everything(dst)
        with failing(monkeypatch, step, call, error) as done:
            result = convert_(src, dst, "--overwrite")
        if done[0] < call:
            continue
        assert result.code == 5
        # One rename makes the new one exist; until then every byte of the old one stays.
        assert everything(dst) == before, call
        assert (dst / "notes.txt").read_text() == "mine"
        assert not [n for n in everything(dst) if "claim" in n or n.endswith(".tmp")]
        assert convert_(src, dst, "--overwrite").code == 0
        kept = read(dst)
        assert equal(kept, new) or equal(kept, training(model("llama")._replace(tensors=new)))


@pytest.mark.parametrize("step", ["sync", "publish"])
def test_d17_a_failing_replacement_keeps_the_small_files_of_the_old_one(
    tmp_path, monkeypatch, step
):
    """They lie beside the manifest under one name for both, and the old manifest has their digests."""
    made = model("llama")
    old = write_model(tmp_path / "old", made)
    src = write_hf(tmp_path / "src", made.tensors, made.config | {"new": True})
    (src / "tokenizer.json").write_text('{"new": true}')
    (old / "tokenizer.json").write_text('{"old": true}')
    count = uses(monkeypatch, step, lambda: to_sharded(src, tmp_path / "count"))
    for call in range(1, count + 1):
        dst = tmp_path / f"dst{call}"
        assert to_sharded(old, dst).code == 0
        with failing(monkeypatch, step, call, StorageError(f"{step} refused")):
            assert to_sharded(src, dst, "--overwrite").code == 5
        assert cli("verify", dst).code == 0, call


@pytest.mark.parametrize("step", [*STEPS, "delete"])
def test_d07_a_writer_killed_at_any_step_never_leaves_a_mixture(tmp_path, monkeypatch, step):
    """Sharded over sharded: readers see the old checkpoint or the new one, whole."""
    made = model("llama")
    new = {n: t + 1000 for n, t in made.tensors.items()}
    src = write_hf(tmp_path / "src", new, made.config | {"new": True})
    old = write_model(tmp_path / "old", made)
    wanted = [training(made), training(made._replace(tensors=new))]
    monkeypatch.setattr("d9d_ckpt.run.commit.Destination.abort", lambda *_: None)
    for call in range(1, 40):
        dst = tmp_path / f"dst{call}"
        assert to_sharded(old, dst).code == 0
        with failing(monkeypatch, step, call, Killed()) as done, contextlib.suppress(Killed):
            to_sharded(src, dst, "--overwrite")
        found = {n: t.read() for n, t in d9d_ckpt.open(str(dst)).tensors.items()}
        (which,) = (n for n, w in enumerate(wanted) if equal(found, w))
        assert cli("verify", dst).code == 0, (step, call)
        convert(dst, tmp_path / f"hf{call}", "huggingface")
        config = json.loads((tmp_path / f"hf{call}" / "config.json").read_text())
        assert config.get("new", False) == bool(which), (step, call)
        if done[0] < call:
            assert which == 1
            assert (dst / "config.json").read_bytes() == (src / "config.json").read_bytes()
            assert not list(dst.rglob("*/config.json"))
            return
    pytest.fail("never ended")


@pytest.mark.parametrize("step", [*STEPS, "delete"])
@pytest.mark.parametrize("sizes", [(2000, 2000), ("5GB", 2000), (2000, "5GB"), ("5GB", "5GB")])
def test_f05_a_writer_killed_at_any_step_leaves_one_of_two_whole_huggingface_directories(
    tmp_path, monkeypatch, step, sizes
):
    made = model("llama")
    new = {n: t + 1000 for n, t in made.tensors.items()}
    src = write_hf(tmp_path / "src", new, made.config)
    old = write_model(tmp_path / "old", made)
    monkeypatch.setattr("d9d_ckpt.run.commit.Destination.abort", lambda *_: None)

    def written(source, dst, size, *argv):
        return cli("convert", source, dst, "--to", "huggingface", "--max-shard-size", size,
                   "--workers", 1, *argv)  # fmt: skip

    for call in range(1, 60):
        dst = tmp_path / f"dst{call}"
        assert written(old, dst, sizes[0]).code == 0
        with failing(monkeypatch, step, call, Killed()) as done, contextlib.suppress(Killed):
            written(src, dst, sizes[1], "--overwrite")
        found = {n: t.read() for n, t in d9d_ckpt.open(str(dst)).tensors.items()}
        assert equal(found, made.tensors) or equal(found, new), (step, call)
        if done[0] < call:
            assert equal(read_hf(dst), new)
            return
    pytest.fail("never ended")


@pytest.mark.parametrize("convert_", [to_sharded, to_hf])
def test_d16_a_claimed_destination_is_refused_and_not_touched(tmp_path, convert_):
    src = write_model(tmp_path / "src", model("llama"))
    dst = tmp_path / "dst"
    dst.mkdir()
    (dst / ".d9d-claim").write_text('{"host": "elsewhere", "pid": 7}')
    for argv in ((), ("--overwrite",)):
        result = convert_(src, dst, *argv)
        assert result.code == 4
        refused(result, 4, str(dst))
        assert sorted(os.listdir(dst)) == [".d9d-claim"]


def test_d17_no_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    src = write_model(tmp_path / "src", model("llama"))
    monkeypatch.setattr(LocalStore, "free", lambda *_: 1000)
    refused(
        to_sharded(src, tmp_path / "dst"),
        5,
        str(tmp_path / "dst"),
        "1000 B are free",
        "to be written",
    )
    assert not (tmp_path / "dst").exists()


def test_d07_the_manifest_is_the_last_file_to_appear(tmp_path, monkeypatch):
    src = write_model(tmp_path / "src", model("llama"))
    published, synced = [], []
    publish, sync = LocalStore.publish, LocalStore.sync

    def watched(self, url, new):
        if new.endswith("manifest.json"):
            save = [
                n for n in os.listdir(tmp_path / "dst") if not n.startswith(".") and "." not in n
            ]
            for file in os.listdir(tmp_path / "dst" / save[0]):
                assert any(s.endswith(file) for s in synced), file
        published.append(new.rsplit("/", 1)[-1])
        publish(self, url, new)

    def noted(self, url):
        synced.append(url)
        sync(self, url)

    monkeypatch.setattr(LocalStore, "publish", watched)
    monkeypatch.setattr(LocalStore, "sync", noted)
    convert(src, tmp_path / "dst", "sharded", "--layout", "tp=2")
    assert published[-1] == "manifest.json"
    assert str(tmp_path / "dst") in synced[-2:]


def test_d07_the_index_is_the_last_file_to_appear(tmp_path, monkeypatch):
    src = write_model(tmp_path / "src", model("llama"))
    published, publish = [], LocalStore.publish

    def watched(self, url, new):
        published.append(new.rsplit("/", 1)[-1])
        publish(self, url, new)

    monkeypatch.setattr(LocalStore, "publish", watched)
    assert to_hf(src, tmp_path / "dst").code == 0
    assert published[-1] == "model.safetensors.index.json"
    assert len(published) > 3


def test_a_file_in_place_of_the_destination_is_refused(tmp_path):
    src = write_model(tmp_path / "src", model("llama"))
    (tmp_path / "file").write_text("mine")
    for dst in (tmp_path / "file", tmp_path / "file" / "below"):
        for argv in ((), ("--overwrite",)):
            result = to_hf(src, dst, *argv)
            assert result.code in (4, 5)
            refused(result, result.code, str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("form", ["same", "link", "dots", "url"])
def test_rule3_source_and_destination_are_the_same(tmp_path, form):
    src = write_model(tmp_path / "src", model("llama"))
    (tmp_path / "link").symlink_to(src)
    dst = {
        "same": src, "link": tmp_path / "link", "dots": f"{tmp_path}/x/../src/", "url": f"file://{src}",
    }[form]  # fmt: skip
    before = everything(src)
    refused(to_hf(src, dst, "--overwrite"), 4, "same")
    assert everything(src) == before


def test_a_verified_conversion_reads_its_destination_back(tmp_path, monkeypatch):
    src = write_hf(tmp_path / "src", {"w": torch.arange(1000.0)})
    assert to_hf(src, tmp_path / "good", "--verify").code == 0
    write = LocalStore.write

    def wrong(self, url, offset, view):
        if offset >= 4096:
            view = memoryview(bytes([view[0] ^ 1]) + bytes(view[1:]))
        write(self, url, offset, view)

    monkeypatch.setattr(LocalStore, "write", wrong)
    result = to_hf(src, tmp_path / "bad", "--verify")
    refused(result, result.code, "w", "expected", "found")
    assert result.code in (1, 5)
