"""Stores behind fsspec: ranges, fresh listings, translated errors."""

import fsspec
import pytest
import torch
from helpers.checkpoints import (
    cli,
    convert,
    equal,
    model,
    read_sharded,
    refused,
    training,
    write_model,
)

import d9d_ckpt
from d9d_ckpt.errors import CkptError, CorruptError, MissingError, StorageError
from d9d_ckpt.storage.fsspec import FsspecStore
from d9d_ckpt.storage.opening import store_for


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/t", recursive=True) if fs.exists("/t") else None


@pytest.fixture
def store(memory):
    memory.pipe_file("/t/a", bytes(range(100)))
    return store_for("memory://t", {})


def test_ranges(store):
    assert isinstance(store, FsspecStore)
    assert store.size("memory://t/a") == 100
    assert store.read("memory://t/a", 10, 5) == bytes(range(10, 15))
    assert store.read("memory://t/a", 0, 0) == b""
    views = [memoryview(bytearray(n)) for n in (3, 0, 5)]
    store.read_into("memory://t/a", 92, views)
    assert b"".join(views) == bytes(range(92, 100))


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 101), (90, 20), (100, 1)])
def test_f21_early_end_has_the_offset(store, offset, nbytes):
    with pytest.raises(CorruptError, match="ends at byte 100, expected at least") as raised:
        store.read("memory://t/a", offset, nbytes)
    assert str(offset + nbytes) in str(raised.value)


def test_listings(store, memory):
    memory.pipe_file("/t/d/x", b"x")
    assert store.names("memory://t") == ["a", "d"]
    assert store.files("memory://t") == {"a": 100}
    assert store.names("memory://t/none") == []


def test_d15_what_another_client_writes_is_seen_at_once(store, memory):
    with pytest.raises(MissingError, match="memory://t/late"):
        store.size("memory://t/late")
    memory.pipe_file("/t/late", b"12")
    assert store.size("memory://t/late") == 2
    memory.pipe_file("/t/late", b"12345")
    assert store.read("memory://t/late", 0, 5) == b"12345"
    assert store.names("memory://t") == ["a", "late"]


def test_missing_files(store):
    with pytest.raises(MissingError):
        store.read("memory://t/no", 0, 1)


@pytest.mark.parametrize("error", [PermissionError("denied"), OSError(5, "Input/output error")])
def test_errors_are_translated(store, monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(store._fs, "cat_file", fails)
    with pytest.raises(StorageError, match="read memory://t/a"):
        store.read("memory://t/a", 0, 1)


def test_an_unknown_protocol_is_refused_plainly():
    result = cli("inspect", "nosuch://x/y")
    assert result.code in (2, 5)
    refused(result, result.code, "nosuch")


def upload(memory, path, name):
    for file in path.rglob("*"):
        if file.is_file():
            memory.pipe_file(f"/t/{name}/{file.relative_to(path)}", file.read_bytes())


def test_a_source_in_a_store_gives_the_same_as_a_local_one(memory, tmp_path):
    made = model("qwen3_moe")
    upload(memory, write_model(tmp_path / "src", made, shards=3), "hf")
    for workers in (1, 3):
        dst = tmp_path / f"s{workers}"
        convert("memory://t/hf", dst, "sharded", "--layout", "tp=2,ep=2", workers=workers)
        assert equal(read_sharded(dst), training(made))
    upload(memory, tmp_path / "s1", "s")
    assert cli("verify", "memory://t/s").code == 0
    assert cli("diff", "memory://t/hf", "memory://t/s").code == 0
    ckpt = d9d_ckpt.open("memory://t/s")
    assert torch.equal(ckpt["model.norm.weight"].read(), made.tensors["model.norm.weight"])


def test_destinations_in_a_store_are_refused(memory, tmp_path):
    src = write_model(tmp_path / "src", model("llama"))
    result = cli("convert", src, "memory://t/out", "--to", "huggingface", "--workers", 1)
    refused(result, 5, "memory://t/out", "local")
    with pytest.raises(CkptError):
        d9d_ckpt.convert(str(src), "memory://t/out", to="huggingface", workers=1)
    assert not memory.exists("/t/out")
