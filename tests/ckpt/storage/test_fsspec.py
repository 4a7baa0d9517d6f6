"""Stores behind fsspec: ranges, fresh listings, translated errors."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
import torch
from helpers.checkpoints import (
    cli,
    convert,
    equal,
    model,
    read_hf,
    read_sharded,
    refused,
    training,
    write_model,
)

import d9d_ckpt
from d9d_ckpt.errors import CorruptError, MissingError, StorageError
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


@pytest.mark.parametrize("workers", [1, 3])
def test_destinations_in_a_store(memory, tmp_path, workers):
    """Both formats, written, read back and converted within the store, and replaced."""
    made = model("llama", vocab=40_000, hidden=64)  # objects of several parts
    src = write_model(tmp_path / "src", made)
    hf, sharded = "memory://t/hf", "memory://t/sharded"
    convert(src, sharded, "sharded", "--layout", "tp=2", "--verify", workers=workers)
    convert(sharded, hf, "huggingface", "--verify", workers=workers)
    assert equal(read_sharded(fetch(memory, tmp_path / "s", "sharded")), training(made))
    assert equal(read_hf(fetch(memory, tmp_path / "hf", "hf")), made.tensors)
    for url in (hf, sharded):
        assert cli("verify", url).code == 0
        assert cli("diff", src, url).code == 0
    old = set(memory.find("/t/sharded"))
    convert(hf, sharded, "sharded", "--layout", "pp=2", "--overwrite", workers=workers)
    left = set(memory.find("/t/sharded"))
    assert left & old == {"/t/sharded/manifest.json", "/t/sharded/config.json"}
    assert equal(read_sharded(fetch(memory, tmp_path / "s2", "sharded")), training(made))
    assert not [name for name in memory.find("/t") if ".d9d" in name]


def fetch(memory, path, name):
    for file in memory.find(f"/t/{name}"):
        local = path / file.removeprefix(f"/t/{name}/")
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_bytes(memory.cat_file(file))
    return path


@pytest.mark.parametrize("to", ["huggingface", "sharded"])
def test_a_destination_that_refuses_is_left_as_it_was(memory, tmp_path, monkeypatch, to):
    src = write_model(tmp_path / "src", model("llama"))
    real = FsspecStore.send

    def fails(self, url, path):
        real(self, url, path)
        raise StorageError(f"put {url}: refused")

    monkeypatch.setattr(FsspecStore, "send", fails)
    argv = ("--to", to, "--workers", 1, *(("--layout", "tp=2") if to == "sharded" else ()))
    refused(cli("convert", src, "memory://t/out", *argv), 5, "memory://t/out", "refused")
    assert memory.find("/t/out") == []


def test_a_claim_in_a_store(store, memory):
    assert store.claim("memory://t/claim", b"first")
    assert not store.claim("memory://t/claim", b"second")
    assert memory.cat_file("/t/claim") == b"first"


def test_a_second_writer_is_refused(memory, tmp_path):
    src = write_model(tmp_path / "src", model("llama"))
    who = {"save_id": "x", "host": "elsewhere", "pid": 4711, "time": 1.0}
    memory.pipe_file("/t/out/.d9d-claim", json.dumps(who).encode())
    argv = ("--to", "huggingface", "--workers", 1, "--overwrite")
    refused(cli("convert", src, "memory://t/out", *argv), 4, "process 4711 on elsewhere")
    assert memory.find("/t/out") == ["/t/out/.d9d-claim"]


def test_parts_of_one_object_may_come_from_several_threads(store, memory, monkeypatch):
    """Each goes to its own place, whoever is between finding the place and writing."""
    upload = store.upload("memory://t/big")
    seek = upload._file.seek

    def slow(*where):
        seek(*where)
        time.sleep(0.05)

    monkeypatch.setattr(upload._file, "seek", slow)
    parts = [bytes([n]) * 1000 for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for n in reversed(range(8)):
            pool.submit(upload.put, n + 1, 1000 * n, memoryview(parts[n]))
    upload.complete()
    assert memory.cat_file("/t/big") == b"".join(parts)


def test_an_aborted_object_never_exists(store, memory):
    upload = store.upload("memory://t/big")
    upload.put(1, 0, memoryview(b"1"))
    upload.abort()
    assert not memory.exists("/t/big")
