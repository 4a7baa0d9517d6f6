"""The command line against S3 servers: every command, source and destination, and what it leaves."""

import json
import shutil

import pytest
import torch
from helpers.checkpoints import (
    cli,
    convert,
    equal,
    everything,
    manifest,
    model,
    read_hf,
    read_sharded,
    refused,
    training,
    write_hf,
    write_model,
)

pytest_plugins = ["helpers.servers"]
pytestmark = pytest.mark.s3

SMALL = model("qwen3_moe")
LARGE = model("qwen3_moe", vocab=36_000, hidden=128)
"""Some 37 MB: every object of one file is sent in more than two parts."""

CLAIM = ".d9d-claim"
both = pytest.mark.parametrize("server", ["rclone", "moto"], indirect=True)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("large") / "src", LARGE)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("small") / "src", SMALL, shards=2)


@pytest.fixture
def at(fresh):
    """The environment alone says where the server is."""


# -- there and back ----------------------------------------------------------------------------


def test_the_whole_way(rclone, at, large, tmp_path):
    """To the bucket, on another layout there, to Hugging Face there, and back."""
    _whole_way(rclone, large, LARGE, tmp_path)


def test_the_whole_way_of_a_small_one(moto, at, small, tmp_path):
    _whole_way(moto, small, SMALL, tmp_path)


def _whole_way(server, src, made, tmp_path):
    url = server.url
    few = ("--memory", "32MiB", "--verify")
    convert(src, f"{url}/a", "sharded", "--layout", "pp=2", *few)
    result = cli("reshard", f"{url}/a", f"{url}/b", "--layout", "tp=2,ep=2", "--workers", 1, *few)
    assert result.code == 0, result.err
    convert(f"{url}/b", f"{url}/c", "huggingface", "--max-shard-size", "30MB", *few)
    convert(f"{url}/b", f"{url}/d", "huggingface", *few)
    for name in "abcd":
        assert cli("verify", f"{url}/{name}").code == 0
        assert cli("diff", src, f"{url}/{name}").code == 0
    convert(f"{url}/c", tmp_path / "back", "huggingface", *few)
    assert equal(read_hf(tmp_path / "back"), made.tensors)
    convert(f"{url}/b", tmp_path / "local", "sharded", "--layout", "tp=2,ep=2", *few)
    assert equal(read_sharded(tmp_path / "local"), training(made))
    assert equal(read_hf(server.fetch("d", tmp_path / "d")), made.tensors)
    assert cli("inspect", f"{url}/b").code == 0
    assert server.uploads() == []
    names = [name for name in server.objects() if ".d9d" in name]
    assert names == []


@both
def test_many_at_once(server, at, large, tmp_path):
    """Sixteen requests in flight move the same bytes as one."""
    convert(large, f"{server.url}/a", "sharded", "--layout", "", "--memory", "1GiB", workers=2)
    convert(f"{server.url}/a", tmp_path / "back", "huggingface", "--memory", "1GiB", workers=2)
    assert equal(read_hf(tmp_path / "back"), LARGE.tensors)


def test_too_little_memory_is_refused_with_the_numbers(moto, at, small):
    argv = ("--to", "sharded", "--layout", "tp=2", "--workers", 1, "--memory", "8MiB")
    refused(cli("convert", small, f"{moto.url}/out", *argv), 4, "--memory 8.0 MiB")
    assert moto.objects() == {}


def test_storage_options_in_place_of_the_environment(moto, fresh, small, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    options = ("--storage-option", f"endpoint_url={moto.endpoint}")
    options += ("--storage-option", "key=someone", "--storage-option", "secret=something")
    convert(small, f"{moto.url}/out", "sharded", "--layout", "tp=2", *options)
    assert cli("verify", f"{moto.url}/out", *options).code == 0


# -- d27: one record everywhere ----------------------------------------------------------------


@both
def test_d27_a_checkpoint_copied_by_another_tool_is_whole(server, at, small, tmp_path):
    convert(small, tmp_path / "a", "sharded", "--layout", "tp=2")
    server.send(tmp_path / "a", "a")
    assert cli("verify", f"{server.url}/a").code == 0
    assert cli("diff", tmp_path / "a", f"{server.url}/a").code == 0
    convert(small, f"{server.url}/b", "sharded", "--layout", "tp=2")
    back = server.fetch("b", tmp_path / "b")
    assert cli("verify", back).code == 0
    assert equal(read_sharded(back), training(SMALL))


def test_d27_without_its_record_it_is_none(moto, at, small):
    convert(small, f"{moto.url}/a", "sharded", "--layout", "tp=2")
    moto.delete("a/manifest.json")
    result = cli("verify", f"{moto.url}/a")
    assert result.code == 3, result
    before = moto.objects()
    argv = ("--to", "sharded", "--layout", "tp=2", "--workers", 1)
    refused(cli("convert", small, f"{moto.url}/a", *argv), 4, "not empty")
    assert moto.objects() == before


def test_a_flipped_bit_is_named(moto, at, small):
    convert(small, f"{moto.url}/a", "sharded", "--layout", "tp=2")
    name = next(n for n in moto.objects() if "rank-00001" in n)
    raw = bytearray(moto.get(name))
    raw[-1] ^= 1
    moto.put(name, bytes(raw))
    result = cli("verify", f"{moto.url}/a")
    assert result.code == 1
    assert "rank-00001.safetensors" in result.out + result.err


# -- overwriting -------------------------------------------------------------------------------


@both
def test_overwrite_of_sharded_removes_the_old_save(server, at, small, tmp_path):
    url = f"{server.url}/a"
    convert(small, url, "sharded", "--layout", "tp=2")
    server.put("a/notes.txt", b"not ours")
    old = json.loads(server.get("a/manifest.json"))["save_id"]
    argv = ("--to", "sharded", "--layout", "pp=2", "--workers", 1)
    refused(cli("convert", small, url, *argv), 4, "not empty", "--overwrite")
    convert(small, url, "sharded", "--layout", "pp=2", "--overwrite")
    found = manifest(server.fetch("a", tmp_path / "a"))
    assert found["layout"]["pp"] == 2
    assert found["save_id"] != old
    assert not server.objects(f"a/{old}")
    assert server.get("a/notes.txt") == b"not ours"
    assert f"a/{CLAIM}" not in server.objects()
    assert equal(read_sharded(tmp_path / "a"), training(SMALL))


@both
def test_overwrite_by_the_other_format(server, at, small, tmp_path):
    url = f"{server.url}/a"
    convert(small, url, "sharded", "--layout", "tp=2")
    convert(small, url, "huggingface", "--overwrite")
    assert sorted(server.objects("a/")) == ["a/config.json", "a/model.safetensors"]
    convert(small, url, "sharded", "--layout", "tp=2", "--overwrite")
    assert equal(read_sharded(server.fetch("a", tmp_path / "a")), training(SMALL))
    assert not [n for n in server.objects() if n.endswith("model.safetensors")]


@both
@pytest.mark.parametrize("size", [(), ("--max-shard-size", "3000")], ids=["one", "files"])
def test_overwrite_of_hugging_face_files(server, at, small, tmp_path, size):
    """The new files have names of their own; the old ones go once the index tells of the new."""
    url = f"{server.url}/a"
    convert(small, url, "huggingface", *size)
    old = {n for n in server.objects() if n.endswith(".safetensors")}
    convert(small, url, "huggingface", "--overwrite", "--dtype", "bfloat16", "--verify", *size)
    assert not old & set(server.objects())
    found = read_hf(server.fetch("a", tmp_path / "a"))
    assert equal(found, {n: t.to(torch.bfloat16) for n, t in SMALL.tensors.items()})
    assert json.loads(server.get("a/config.json"))["torch_dtype"] == "bfloat16"
    assert server.uploads() == []


@both
def test_hugging_face_files_of_another_number_replace_the_old_ones(server, at, small, tmp_path):
    url = f"{server.url}/a"
    convert(small, url, "huggingface", "--max-shard-size", "3000")
    old = {n for n in server.objects() if n.endswith(".safetensors")}
    convert(small, url, "huggingface", "--max-shard-size", "1500", "--overwrite")
    assert not old & set(server.objects())
    assert equal(read_hf(server.fetch("a", tmp_path / "a")), SMALL.tensors)


# -- refusals ----------------------------------------------------------------------------------


@both
def test_missing_buckets_and_keys(server, at, small):
    for command in ("inspect", "verify"):
        refused(cli(command, "s3://nosuchbucket/x"), 3, "s3://nosuchbucket/x")
        refused(cli(command, f"{server.url}/none"), 3, f"{server.url}/none")
    argv = ("--to", "sharded", "--layout", "tp=2", "--workers", 1)
    refused(cli("convert", f"{server.url}/none", f"{server.url}/out", *argv), 3, "/none")
    result = cli("convert", small, "s3://nosuchbucket/x", *argv)
    assert result.code in (3, 4, 5)
    refused(result, result.code, "s3://nosuchbucket/x")
    assert server.objects() == {}


def test_a_missing_bucket_is_called_a_bucket(moto, at, small):
    argv = ("--to", "sharded", "--layout", "tp=2", "--workers", 1)
    result = cli("convert", small, "s3://nosuchbucket/x", *argv)
    assert "bucket" in result.err.replace("nosuchbucket", "")


@both
def test_a_shard_that_is_missing_is_named(server, at, small):
    url = server.send(small, "src")
    server.delete("src/model-00002-of-00002.safetensors")
    argv = ("--to", "sharded", "--layout", "tp=2", "--workers", 1)
    refused(cli("convert", url, f"{server.url}/out", *argv), 3, "model-00002-of-00002.safetensors")
    assert server.objects("out") == {}


@both
def test_source_and_destination_are_the_same(server, at, small):
    url = server.send(small, "src")
    before = server.objects()
    for destination in (url, f"{url}/", server.url):
        argv = ("--to", "huggingface", "--overwrite", "--workers", 1)
        refused(cli("convert", url, destination, *argv), 4, "same")
    assert server.objects() == before


@both
@pytest.mark.parametrize("to", ["sharded", "huggingface"])
def test_damage_found_on_the_way_leaves_nothing(server, at, small, tmp_path, to):
    convert(small, tmp_path / "a", "sharded", "--layout", "tp=2")
    file = next((tmp_path / "a").rglob("rank-00001.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    argv = ("--to", to, "--workers", 1, *(("--layout", "pp=2") if to == "sharded" else ()))
    refused(cli("convert", tmp_path / "a", f"{server.url}/out", *argv), 3, "rank-00001")
    assert server.objects() == {}
    assert server.uploads() == []


@both
def test_a_claimed_place_is_refused(server, at, small):
    """Where the server honours conditions; elsewhere the prefix is not empty."""
    who = {"save_id": "x", "host": "elsewhere", "pid": 4711, "time": 1.0}
    server.put(f"out/{CLAIM}", json.dumps(who).encode())
    argv = ("--to", "sharded", "--layout", "tp=2", "--workers", 1)
    refused(cli("convert", small, f"{server.url}/out", *argv), 4, "out")
    assert list(server.objects()) == [f"out/{CLAIM}"]


# -- run directories ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    convert(small, root / "step-00000100", "sharded", "--layout", "tp=2")
    for step in (200, 300, 400):
        shutil.copytree(root / "step-00000100", root / f"step-{step:08}")
    (root / "step-00000400" / "manifest.json").unlink()
    (root / "metrics.jsonl").write_text("{}")
    return root


@both
def test_list_and_prune(server, at, run):
    url = server.send(run, "run")
    listed = cli("list", url, "--json").json
    assert [s["step"] for s in listed["steps"]] == [100, 200, 300, 400]
    assert listed["latest"] == 300
    before = server.objects()
    assert cli("prune", url, "--keep-last", 1, "--dry-run").code == 0
    assert server.objects() == before
    assert cli("prune", url, "--keep-last", 1).code == 0
    left = {name.split("/")[1] for name in server.objects()}
    assert left == {"step-00000300", "step-00000400", "metrics.jsonl"}
    assert server.objects("run/step-00000300") == {
        f"run/step-00000300/{n}": c for n, c in everything(run / "step-00000300").items()
    }
    assert cli("diff", url, run).code == 0


@both
def test_a_whole_step_by_its_run(server, at, run, tmp_path):
    url = server.send(run, "run")
    convert(url, tmp_path / "hf", "huggingface", "--step", 200)
    assert equal(read_hf(tmp_path / "hf"), SMALL.tensors)


# -- rare inputs -------------------------------------------------------------------------------


def test_f15_empty_and_scalar_tensors(moto, at, tmp_path):
    weights = {
        "a": torch.zeros(0, 7),
        "b": torch.zeros(0),
        "s": torch.tensor(1.0),
        "x": torch.arange(5.0),
    }
    src = write_hf(tmp_path / "src", weights)
    mapping = tmp_path / "same.py"
    mapping.write_text(
        "def mapping(ckpt):\n    return {name: ckpt[name] for name in ckpt.tensors}\n"
    )
    argv = ("--mapping", f"{mapping}:mapping")
    convert(src, f"{moto.url}/a", "huggingface", *argv)
    assert equal(read_hf(moto.fetch("a", tmp_path / "a")), weights)
